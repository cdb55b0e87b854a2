"""transformers: vision, speech and text models of small configurations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zoo.row import Inputs, Row, batches, pixels, squares

IMAGES = squares(64, 96, 128, 80, 72)
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}


def hugging(model: str, config: str, **settings) -> Callable[[], nn.Module]:
    """The model of a configuration, with attention written out in ATen's ops."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def _with_backbone(model: str, config: str, **settings) -> Callable[[], nn.Module]:
    """The same upon a small ResNet."""

    def build() -> nn.Module:
        import transformers

        stages = [f"stage{i}" for i in range(1, 5)]
        backbone = transformers.ResNetConfig(**RESNET, out_features=settings.pop("stages", stages))
        chosen = getattr(transformers, config)(backbone_config=backbone, **settings)
        return getattr(transformers, model)(chosen)

    return build


def _waves(name: str = "input_values", channels: int = 0) -> Callable[..., Inputs]:
    dims = (channels,) if channels else ()
    return lambda batch, length: {name: 0.5 * torch.randn(batch, *dims, length)}


def _frames(batch: int, frames: int, *spatial: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, frames, 3, *spatial)}


def _tokens(batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(3, 90, (batch, length))}


def _spectrum(batch: int, length: int) -> Inputs:
    return {
        "input_features": torch.randn(batch, 16, length),
        "decoder_input_ids": torch.randint(3, 90, (batch, 5)),
    }


def _gray(batch: int, *spatial: int) -> Inputs:
    return {"pixel_values": torch.rand(batch, 1, *spatial).expand(-1, 3, -1, -1).contiguous()}


def _row(name: str, model: str, config: str, sizes=IMAGES, inputs=None, **settings) -> Row:
    build = hugging(model, config, **settings)
    return Row(f"transformers/{name}", build, inputs or pixels(), sizes)


SPEECH = ((1, 4000), (2, 4000), (1, 5200), (2, 6401), (1, 8000))
TEXT = ((1, 16), (2, 16), (1, 24), (3, 9), (2, 40))
CONVOLUTIONAL_SPEECH = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (8, 4, 2),
}

ROWS = (
    Row(
        "transformers/detr",
        _with_backbone(
            "DetrForObjectDetection",
            "DetrConfig",
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            stages=["stage4"],
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_queries=7,
        ),
        pixels(),
        squares(64, 96, 128, 80),
    ),
    Row(
        "transformers/upernet",
        _with_backbone(
            "UperNetForSemanticSegmentation",
            "UperNetConfig",
            hidden_size=32,
            auxiliary_in_channels=48,
            auxiliary_channels=16,
        ),
        pixels(),
        squares(64, 96, 128, 80),
    ),
    _row(
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        "Swin2SRConfig",
        squares(32, 48, 40, 56),
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 2],
        image_size=32,
        window_size=8,
    ),
    _row(
        "wav2vec2",
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        SPEECH,
        _waves(),
        **TINY,
        **CONVOLUTIONAL_SPEECH,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    _row(
        "hubert",
        "HubertModel",
        "HubertConfig",
        SPEECH,
        _waves(),
        **TINY,
        **CONVOLUTIONAL_SPEECH,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    _row(
        "whisper",
        "WhisperModel",
        "WhisperConfig",
        batches(64),
        _spectrum,
        num_mel_bins=16,
        max_source_positions=32,
        vocab_size=100,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        use_cache=False,
    ),
    _row(
        "encodec",
        "EncodecModel",
        "EncodecConfig",
        ((1, 1280), (2, 1280), (1, 1600), (1, 1999), (2, 960)),
        _waves(channels=1),
        num_filters=4,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=32,
        num_lstm_layers=1,
        target_bandwidths=[1.5],
    ),
    _row(
        "dac",
        "DacModel",
        "DacConfig",
        ((1, 1024), (2, 1024), (1, 1536), (3, 512)),
        _waves(channels=1),
        encoder_hidden_size=8,
        decoder_hidden_size=32,
        downsampling_ratios=[2, 4],
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=32,
        codebook_dim=4,
        hidden_size=32,
    ),
    _row(
        "videomae",
        "VideoMAEModel",
        "VideoMAEConfig",
        batches(4, 32, 32),
        _frames,
        **TINY,
        image_size=32,
        num_frames=4,
        patch_size=8,
    ),
    _row(
        "vivit",
        "VivitModel",
        "VivitConfig",
        batches(4, 32, 32),
        _frames,
        **TINY,
        image_size=32,
        num_frames=4,
        tubelet_size=[2, 8, 8],
    ),
    _row(
        "superpoint",
        "SuperPointForKeypointDetection",
        "SuperPointConfig",
        squares(64, 96, 128, 80),
        _gray,
        encoder_hidden_sizes=[16, 16, 32, 32],
        decoder_hidden_size=32,
        descriptor_decoder_dim=32,
    ),
    _row("mobilenet_v1", "MobileNetV1Model", "MobileNetV1Config", squares(64, 96, 65, 75, 80, 47)),
    _row("mobilenet_v2", "MobileNetV2Model", "MobileNetV2Config", squares(64, 96, 65, 75, 80, 47)),
    _row(
        "mobilenet_v2_deeplab",
        "MobileNetV2ForSemanticSegmentation",
        "MobileNetV2Config",
        squares(64, 96, 65, 75, 80),
        output_stride=8,
    ),
    _row(
        "levit",
        "LevitForImageClassification",
        "LevitConfig",
        batches(64, 64),
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    _row("resnet", "ResNetModel", "ResNetConfig", **RESNET),
    _row(
        "regnet",
        "RegNetModel",
        "RegNetConfig",
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        groups_width=8,
    ),
    _row(
        "convnext",
        "ConvNextModel",
        "ConvNextConfig",
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 2, 1],
    ),
    _row(
        "convnextv2",
        "ConvNextV2Model",
        "ConvNextV2Config",
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 2, 1],
    ),
    _row(
        "poolformer",
        "PoolFormerModel",
        "PoolFormerConfig",
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 1, 1],
    ),
    _row(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
    ),
    _row(
        "swin",
        "SwinModel",
        "SwinConfig",
        squares(64, 96, 80, 72, 49),
        image_size=64,
        embed_dim=16,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _row(
        "focalnet",
        "FocalNetModel",
        "FocalNetConfig",
        squares(64, 96, 80, 72),
        image_size=64,
        embed_dim=16,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    _row(
        "mobilevit",
        "MobileViTModel",
        "MobileViTConfig",
        squares(64, 96, 128, 80, 72),
        hidden_sizes=[24, 32, 48],
        neck_hidden_sizes=[8, 16, 24, 32, 32, 48, 64],
    ),
    _row("mobilevitv2", "MobileViTV2Model", "MobileViTV2Config", width_multiplier=0.5),
    _row(
        "efficientnet",
        "EfficientNetModel",
        "EfficientNetConfig",
        squares(64, 96, 65, 75, 80),
        width_coefficient=0.5,
        depth_coefficient=0.5,
        hidden_dim=640,
    ),
    _row(
        "bit",
        "BitModel",
        "BitConfig",
        squares(64, 96, 65, 75, 80),
        embedding_size=16,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1],
        num_groups=8,
        global_padding="SAME",
    ),
    _row(
        "sew",
        "SEWModel",
        "SEWConfig",
        SPEECH,
        _waves(),
        **TINY,
        **CONVOLUTIONAL_SPEECH,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    _row(
        "pvt_v2",
        "PvtV2Model",
        "PvtV2Config",
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
    ),
    _row("hgnet_v2", "HGNetV2ForImageClassification", "HGNetV2Config"),
    _row(
        "swiftformer",
        "SwiftFormerModel",
        "SwiftFormerConfig",
        squares(64, 96, 128, 160),
        depths=[1, 1, 1, 1],
        embed_dims=[16, 24, 32, 48],
    ),
    _row(
        "dinov2",
        "Dinov2Model",
        "Dinov2Config",
        squares(56, 84, 70, 112),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    ),
    _row("vit", "ViTModel", "ViTConfig", batches(32, 32), **TINY, image_size=32, patch_size=8),
    _row(
        "glpn",
        "GLPNForDepthEstimation",
        "GLPNConfig",
        squares(64, 96, 128, 160),
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
    ),
    _row(
        "yolos",
        "YolosForObjectDetection",
        "YolosConfig",
        squares(64, 96, 80, 128),
        **TINY,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=5,
    ),
    _row("bert", "BertModel", "BertConfig", TEXT, _tokens, **TINY, vocab_size=100),
    _row(
        "gpt2",
        "GPT2Model",
        "GPT2Config",
        TEXT,
        _tokens,
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=100,
        n_positions=64,
        use_cache=False,
    ),
)
