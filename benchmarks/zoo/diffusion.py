"""diffusers: denoising networks and autoencoders."""

from __future__ import annotations

import torch

from zoo.row import Inputs, Row, make, squares

SMALL = {"norm_num_groups": 4, "layers_per_block": 1}
LATENTS = squares(32, 64, 48, 24)


def _step(channels: int):
    """sample and timestep."""
    return lambda batch, *spatial: (torch.randn(batch, channels, *spatial), torch.tensor(7))


def _conditioned(channels: int, width: int):
    def inputs(batch: int, *spatial: int) -> Inputs:
        sample = torch.randn(batch, channels, *spatial)
        return sample, torch.tensor(7), torch.randn(batch, 5, width)

    return inputs


def _images(channels: int):
    return lambda batch, *spatial: (torch.randn(batch, channels, *spatial),)


def _transformer(batch: int, *spatial: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, *spatial),
        "timestep": torch.full((batch,), 7),
        "class_labels": torch.arange(batch) % 10,
    }


ROWS = (
    Row(
        "diffusers/unet2d",
        make(
            "diffusers:UNet2DModel",
            sample_size=32,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            **SMALL,
        ),
        _step(3),
        LATENTS,
    ),
    Row(
        "diffusers/unet2d_skip",
        make(
            "diffusers:UNet2DModel",
            sample_size=32,
            block_out_channels=(32, 32),
            down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
            up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D"),
            attention_head_dim=8,
            **SMALL,
        ),
        _step(3),
        LATENTS,
    ),
    Row(
        "diffusers/unet2d_condition",
        make(
            "diffusers:UNet2DConditionModel",
            sample_size=32,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=24,
            attention_head_dim=4,
            **SMALL,
        ),
        _conditioned(4, 24),
        squares(32, 64, 48, 24, 17),
    ),
    Row(
        "diffusers/unet3d_condition",
        make(
            "diffusers:UNet3DConditionModel",
            sample_size=16,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=24,
            attention_head_dim=8,
            **SMALL,
        ),
        _conditioned(4, 24),
        ((1, 4, 16, 16), (2, 4, 16, 16), (1, 4, 24, 16), (1, 6, 16, 32), (2, 3, 24, 24)),
    ),
    Row(
        "diffusers/unet1d",
        make(
            "diffusers:UNet1DModel",
            sample_size=64,
            in_channels=2,
            extra_in_channels=32,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
            up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
        ),
        _step(2),
        ((1, 64), (2, 64), (1, 128), (3, 96)),
    ),
    Row(
        "diffusers/autoencoder_kl",
        make(
            "diffusers:AutoencoderKL",
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
        ),
        _images(3),
        squares(32, 64, 48, 24),
    ),
    Row(
        "diffusers/autoencoder_tiny",
        make(
            "diffusers:AutoencoderTiny",
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        _images(3),
        squares(32, 64, 48, 24),
    ),
    Row(
        "diffusers/vq_model",
        make(
            "diffusers:VQModel",
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            num_vq_embeddings=16,
        ),
        _images(3),
        squares(32, 64, 48, 24),
    ),
    Row(
        "diffusers/dit",
        make(
            "diffusers:DiTTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            num_layers=1,
            norm_num_groups=4,
            sample_size=16,
            num_embeds_ada_norm=10,
        ),
        _transformer,
        ((1, 16, 16), (2, 16, 16), (3, 16, 16), (4, 16, 16)),
    ),
)
