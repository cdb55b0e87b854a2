"""What makes models of other packages where one call of the package does not. Each function imports
the package when it is called."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zoo.row import make

STAGES = 4
RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
UNET: dict[str, Any] = {
    "n_stages": STAGES,
    "features_per_stage": (8, 16, 24, 32),
    "kernel_sizes": 3,
    "strides": (1, 2, 2, 2),
    "num_classes": 3,
    "n_conv_per_stage_decoder": 1,
    "conv_bias": True,
    "nonlin": nn.LeakyReLU,
}


class Result(nn.Module):
    """The one result of a model that returns a dict."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model, self.key = model, key

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[self.key]


def result(key: str, path: str, *args: Any, **settings: Any) -> nn.Module:
    """The model that "module:name" makes, with its result of that name only."""
    return Result(make(path, *args, **settings)(), key)


def hugging(model: str, config: str, **settings: Any) -> nn.Module:
    """The model of a configuration of transformers."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def with_backbone(model: str, config: str, **settings: Any) -> nn.Module:
    """The same upon a small ResNet."""
    import transformers

    stages = settings.pop("stages", [f"stage{i + 1}" for i in range(STAGES)])
    backbone = transformers.ResNetConfig(**RESNET, out_features=stages)
    return hugging(model, config, backbone_config=backbone, **settings)


def features(name: str) -> nn.Module:
    """Of a model of pytorchcv, without the last pooling, which takes maps of 7x7 only."""
    from pytorchcv.model_provider import get_model

    found = get_model(name, pretrained=False).features
    if hasattr(found, "final_pool"):
        found.final_pool = nn.Identity()
    return found


def yolo(name: str) -> nn.Module:
    from ultralytics import YOLO

    return YOLO(f"{name}.yaml", verbose=False).model


def plain_unet() -> nn.Module:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    return PlainConvUNet(
        1, conv_op=nn.Conv2d, norm_op=nn.InstanceNorm2d, n_conv_per_stage=2, **UNET
    )


def residual_unet() -> nn.Module:
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    return ResidualEncoderUNet(
        1, conv_op=nn.Conv3d, norm_op=nn.InstanceNorm3d, n_blocks_per_stage=2, **UNET
    )


def language_model() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2)
    return TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers)
