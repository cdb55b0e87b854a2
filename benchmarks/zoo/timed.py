"""Models of other packages for peers.py: one of each kind that people run, as its authors wrote it.

Their packages are those of third_party.txt. Weights are what the package itself draws, after a
fixed seed, but for those that it begins with zeros, and the statistics of batch norms those of one
random batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torch_blocked.bench.networks.weights import set_statistics
from zoo.row import declare_torchvision_ops, make

SEED = 0
IMAGES = 8  # of two a head's batch norm would see two numbers a channel, some of them equal
IMAGE = (3, 224, 224)
SEGMENTATION = "segmentation_models_pytorch:"


@dataclass(frozen=True)
class Timed:
    """A model of another package. input_dims: [C, *spatial] of one input."""

    build: Callable[[], nn.Module]
    input_dims: tuple[int, ...]
    package: str  # on PyPI
    note: str

    def model(self) -> nn.Module:
        """In evaluation mode, float32."""
        declare_torchvision_ops()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(SEED)
            model = self.build().eval()
            fill_zeros(model)
            set_statistics(model, torch.randn(IMAGES, *self.input_dims))
        return model


def fill_zeros(model: nn.Module) -> None:
    """Draws the weights that are all zeros, as timm's at the end of residual branches: training
    would not leave them so, and a converter that drops x * 0 drops the branch."""
    for name, parameter in model.named_parameters():
        if not name.endswith(("bias", "biases")) and not parameter.any():
            parameter.uniform_(0.5, 1.5)


def _timm(name: str, note: str, dims: tuple[int, ...] = IMAGE) -> Timed:
    return Timed(make("timm:create_model", name, pretrained=False), dims, "timm", note)


def _cv(name: str, note: str, dims: tuple[int, ...] = IMAGE) -> Timed:
    build = make("pytorchcv.model_provider:get_model", name, pretrained=False)
    return Timed(build, dims, "pytorchcv", note)


class _FirstOf(nn.Module):
    """The one result of a model that returns a dict."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model, self.key = model, key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[self.key]


def _vision(name: str, note: str, dims: tuple[int, ...], **settings) -> Timed:
    build = make(f"torchvision.models.segmentation:{name}", weights=None, **settings)
    return Timed(lambda: _FirstOf(build(), "out"), dims, "torchvision", note)


def _segmentation(name: str, encoder: str, note: str, dims: tuple[int, ...]) -> Timed:
    build = make(SEGMENTATION + name, encoder_name=encoder, encoder_weights=None, classes=3)
    return Timed(build, dims, "segmentation-models-pytorch", note)


TIMED = {
    "mobilenetv3_large": _timm("mobilenetv3_large_100", "hard swish, squeeze and excitation"),
    "mobilenetv3_written_out": _cv("mobilenetv3_large_w1", "x * relu6(x + 3) / 6"),
    "efficientnet_b2": _timm("efficientnet_b2", "SiLU, squeeze and excitation", (3, 256, 256)),
    "efficientnetv2_b0": _timm("tf_efficientnetv2_b0", "fused inverted residuals"),
    "mixnet_s": _timm("mixnet_s", "depthwise kernels of several sizes in one layer"),
    "mixnet_s_written_out": _cv("mixnet_s", "the same, other activations"),
    "ghostnet": _timm("ghostnet_100", "features made from features"),
    "regnety_008": _timm("regnety_008", "grouped convolutions of 16 channels"),
    "inception_v3": _timm("inception_v3", "1x7 and 7x1, concats", (3, 299, 299)),
    "xception": _cv("xception", "separable convolutions", (3, 299, 299)),
    "hrnet_w18_small": _timm("hrnet_w18_small", "parallel branches of four sizes"),
    "dla34": _timm("dla34", "trees of blocks"),
    "repvgg_a0": _timm("repvgg_a0", "three branches a layer"),
    "cspdarknet53": _timm("cspdarknet53", "as in YOLO: partial stages, leaky ReLU", (3, 256, 256)),
    "resnet26d": _timm("resnet26d", "a deep stem, pooling in the shortcuts"),
    "seresnext26": _timm("seresnext26d_32x4d", "32 groups, squeeze and excitation"),
    "convnextv2_atto": _timm("convnextv2_atto", "depthwise 7x7, global response norm"),
    "edgenext_x_small": _timm("edgenext_x_small", "convolutions and attention over channels"),
    "mobilevit_xs": _timm("mobilevit_xs", "convolutions and attention", (3, 256, 256)),
    "levit_128s": _timm("levit_128s", "attention with batch norms"),
    "fastvit_t8": _timm("fastvit_t8", "mixing by convolutions", (3, 256, 256)),
    "poolformer_s12": _timm("poolformer_s12", "mixing by pooling, group norm"),
    "vit_tiny": _timm("vit_tiny_patch16_224", "attention only"),
    "deeplabv3": _vision(
        "deeplabv3_mobilenet_v3_large", "dilation", (3, 256, 256), weights_backbone=None
    ),
    "unetplusplus": _segmentation(
        "UnetPlusPlus", "resnet18", "dense skips, upsampling", (3, 256, 256)
    ),
    "fpn": _segmentation("FPN", "mobilenet_v2", "pyramid, group norm", (3, 256, 256)),
    "segresnet3d": Timed(
        make("monai.networks.nets:SegResNet", 3, init_filters=16, in_channels=1, out_channels=2),
        (1, 48, 48, 48),
        "monai",
        "3-D, group norm before convolution",
    ),
    "dynunet3d": Timed(
        make(
            "monai.networks.nets:DynUNet",
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            kernel_size=(3, 3, 3, 3),
            strides=(1, 2, 2, 2),
            upsample_kernel_size=(2, 2, 2),
            filters=(16, 32, 64, 96),
        ),
        (1, 48, 48, 48),
        "monai",
        "3-D, instance norm, leaky ReLU",
    ),
    "super_resolution": Timed(
        make("spandrel.architectures.Compact:Compact", num_feat=32, num_conv=8, upscale=2),
        (3, 128, 128),
        "spandrel",
        "PReLU, pixel shuffle",
    ),
}
