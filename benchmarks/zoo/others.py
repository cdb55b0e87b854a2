"""Audio codecs, transformers and super resolution from smaller packages."""

from __future__ import annotations

import torch
from torch import nn

from zoo.row import Inputs, Row, batches, images, make, squares

IMAGES = squares(64, 96, 80, 65, 75, 47)
LITTLE = {"dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}


def _snac(noise: bool, window: int | None = None):
    return make(
        "snac:SNAC",
        encoder_dim=8,
        encoder_rates=[2, 2, 4],
        decoder_dim=64,
        decoder_rates=[4, 2, 2],
        attn_window_size=window,
        codebook_size=32,
        codebook_dim=4,
        vq_strides=[2, 1],
        noise=noise,
    )


def _language_model() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=50, max_seq_len=64, attn_layers=Decoder(dim=32, depth=2, heads=2)
    )


def _tokens(batch: int, length: int) -> Inputs:
    return (torch.randint(0, 50, (batch, length)),)


def _sequence(batch: int, length: int) -> Inputs:
    return (torch.randn(batch, length, 32),)


def _efficientnet() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0")


TEXT = ((1, 16), (2, 16), (1, 24), (3, 9), (2, 40))
SOUND = ((1, 1024), (2, 1024), (1, 1536), (1, 1999), (3, 512))

ROWS = (
    Row("snac/snac", _snac(noise=False), images(1), SOUND),
    Row("snac/snac_noise", _snac(noise=True), images(1), SOUND, torch.float32),
    Row(
        "snac/snac_attention",
        _snac(False, window=8),
        images(1),
        ((1, 1024), (2, 1024), (1, 1536), (3, 512)),
    ),
    Row(
        "vit-pytorch/vit",
        make("vit_pytorch:ViT", image_size=32, patch_size=8, num_classes=10, **LITTLE),
        images(3),
        batches(32, 32),
    ),
    Row(
        "vit-pytorch/simple_vit",
        make("vit_pytorch:SimpleViT", image_size=32, patch_size=8, num_classes=10, **LITTLE),
        images(3),
        batches(32, 32),
    ),
    Row(
        "vit-pytorch/cvt",
        make(
            "vit_pytorch.cvt:CvT",
            num_classes=10,
            s1_emb_dim=16,
            s1_depth=1,
            s2_emb_dim=32,
            s2_heads=2,
            s2_depth=1,
            s3_emb_dim=48,
            s3_heads=2,
            s3_depth=2,
        ),
        images(3),
        squares(64, 96, 80, 72),
    ),
    Row(
        "vit-pytorch/mobile_vit",
        make(
            "vit_pytorch.mobile_vit:MobileViT",
            image_size=(64, 64),
            dims=[32, 48, 64],
            channels=[8, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96],
            num_classes=10,
        ),
        images(3),
        squares(64, 128, 192),
    ),
    Row(
        "vit-pytorch/max_vit",
        make(
            "vit_pytorch.max_vit:MaxViT",
            num_classes=10,
            dim_conv_stem=16,
            dim=16,
            dim_head=8,
            depth=(1, 1),
            window_size=4,
        ),
        images(3),
        squares(64, 96, 128, 32),
    ),
    Row(
        "vit-pytorch/twins_svt",
        make(
            "vit_pytorch.twins_svt:TwinsSVT",
            num_classes=10,
            s1_emb_dim=16,
            s2_emb_dim=32,
            s3_emb_dim=48,
            s4_emb_dim=64,
            s1_local_patch_size=2,
            s2_local_patch_size=2,
            s3_local_patch_size=2,
            s4_local_patch_size=2,
            s1_global_k=2,
            s2_global_k=2,
            s3_global_k=2,
            s4_global_k=2,
        ),
        images(3),
        squares(64, 128, 192),
    ),
    Row("x-transformers/decoder", _language_model, _tokens, TEXT),
    Row(
        "conformer/conformer",
        make("conformer:Conformer", dim=32, depth=2, dim_head=8, heads=2),
        _sequence,
        TEXT,
    ),
    Row(
        "mlp-mixer-pytorch/mixer",
        make(
            "mlp_mixer_pytorch:MLPMixer",
            image_size=32,
            channels=3,
            patch_size=8,
            dim=32,
            depth=2,
            num_classes=10,
        ),
        images(3),
        batches(32, 32),
    ),
    Row(
        "geffnet/tf_efficientnet_lite0",
        make("geffnet:tf_efficientnet_lite0", pretrained=False),
        images(3),
        IMAGES,
    ),
    Row(
        "geffnet/mixnet_s",
        make("geffnet:mixnet_s", pretrained=False),
        images(3),
        IMAGES,
    ),
    Row(
        "efficientnet-pytorch/b0",
        _efficientnet,
        images(3),
        squares(64, 96, 80, 72, 65),
    ),
    Row(
        "spandrel/esrgan",
        make("spandrel.architectures.ESRGAN:ESRGAN", num_filters=16, num_blocks=1),
        images(3),
        squares(32, 48, 40, 33, 27),
    ),
    Row(
        "spandrel/swinir",
        make(
            "spandrel.architectures.SwinIR:SwinIR",
            img_size=32,
            embed_dim=24,
            depths=[2],
            num_heads=[2],
            window_size=8,
            upsampler="pixelshuffle",
            upscale=2,
        ),
        images(3),
        squares(32, 48, 40, 33, 27),
    ),
)
