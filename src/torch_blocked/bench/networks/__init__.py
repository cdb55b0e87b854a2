"""The few models that the package ships, in plain torch, for where only torch is installed: one
table, one file for each family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from .efficientnet import efficientnet_lite0, imagenet_weights
from .hifigan import hifigan
from .mobilenet import mobilenet_v2
from .resnet import resnet18, resnet50, resnext50_32x4d
from .unet import unet
from .unet3d import unet3d
from .weights import random_model

SEED = 0


@dataclass(frozen=True)
class ModelSpec:
    """How to build one model.

    constructor returns it with its ordinary initial weights.
    input_dims are [C, *spatial] of one image, calibration_dims [N, C, *spatial] of the random batch
    that sets the statistics of its batch norms (see weights.py).
    load_weights returns a public state dict, or None where no installed package ships one.
    """

    constructor: Callable[[], nn.Module]
    input_dims: tuple[int, ...]
    calibration_dims: tuple[int, ...]
    note: str
    load_weights: Callable[[], dict[str, Tensor] | None] = lambda: None


IMAGE = (3, 224, 224)
SMALL = (2, 3, 128, 128)

MODELS: dict[str, ModelSpec] = {
    "resnet18": ModelSpec(resnet18, IMAGE, SMALL, "3x3 convolutions with shortcuts"),
    "resnet50": ModelSpec(resnet50, IMAGE, SMALL, "v1.5: bottlenecks, 1x1 and 3x3"),
    "mobilenet_v2": ModelSpec(mobilenet_v2, IMAGE, SMALL, "depthwise 3x3, ReLU6"),
    "efficientnet_lite0": ModelSpec(
        efficientnet_lite0,
        IMAGE,
        SMALL,
        "depthwise 3x3 and 5x5, uneven padding",
        imagenet_weights,
    ),
    "unet": ModelSpec(unet, (3, 256, 256), SMALL, "32 channels, transposed convolutions, skips"),
    "resnext50_32x4d": ModelSpec(resnext50_32x4d, IMAGE, SMALL, "3x3 in 32 groups of 4 and more"),
    "hifigan": ModelSpec(hifigan, (80, 64), (2, 80, 32), "1-D: speech from a spectrogram"),
    "unet3d": ModelSpec(unet3d, (1, 32, 48, 48), (2, 1, 16, 32, 32), "3-D: volumes, 16 channels"),
}


def build_model(name: str) -> tuple[nn.Module, str]:
    """The model of that name in evaluation mode, float32, and a word on its weights.

    Raises KeyError for a name that is not in MODELS."""
    return build(MODELS[name])


def build(spec: ModelSpec) -> tuple[nn.Module, str]:
    """The same of any such table's row: public weights where an installed package ships them, else
    random ones with a fixed seed."""
    weights = spec.load_weights()
    if weights is None:
        return random_model(spec.constructor, spec.calibration_dims, SEED), "random"
    model = spec.constructor()
    model.load_state_dict(weights)
    return model.eval(), "ImageNet"
