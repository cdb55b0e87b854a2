"""Models of other packages by name, as timm:resnet50: random weights, nothing is downloaded."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

Dims = tuple[int, ...]
FRAMES = 16  # of a video: the most that a model of torchvision insists on


class NoModel(ValueError):
    """A name that does not lead to a model."""


@dataclass(frozen=True)
class Package:
    """names(module): those of its models. make(module, name): the model with random weights.
    input_dims(module, name, model): [C, *spatial] that it was made for; None if nothing tells."""

    module: str
    names: Callable[[ModuleType], Collection[str]]
    make: Callable[[ModuleType, str], nn.Module]
    input_dims: Callable[[ModuleType, str, nn.Module], Dims | None]


def _torchvision(models: ModuleType, name: str) -> nn.Module:
    """Some take the weights of their backbone apart, and would download these."""
    takes = inspect.signature(models.get_model_builder(name)).parameters
    none = {each: None for each in ("weights", "weights_backbone") if each in takes}
    return models.get_model(name, **none)


def _torchvision_dims(models: ModuleType, name: str, model: nn.Module) -> Dims | None:
    """What the transforms of its weights crop: a side of images, or both sides of videos."""
    best = models.get_model_weights(name).DEFAULT
    crop = getattr(best.transforms, "keywords", {}).get("crop_size")
    if crop is None:
        return None
    return (3, crop, crop) if isinstance(crop, int) else (3, FRAMES, *crop)


def _timm_dims(timm: ModuleType, name: str, model: Any) -> Dims | None:
    return tuple(model.pretrained_cfg["input_size"])


def _pytorchcv_dims(provider: ModuleType, name: str, model: Any) -> Dims | None:
    size = getattr(model, "in_size", None)
    return (getattr(model, "in_channels", 3), *size) if size else None


# By the word before the colon, which is also what pip installs.
PACKAGES = {
    "timm": Package(
        "timm",
        names=lambda timm: timm.list_models(),
        make=lambda timm, name: timm.create_model(name, pretrained=False),
        input_dims=_timm_dims,
    ),
    "torchvision": Package(
        "torchvision.models",
        names=lambda models: models.list_models(),
        make=_torchvision,
        input_dims=_torchvision_dims,
    ),
    "pytorchcv": Package(
        "pytorchcv.model_provider",
        names=lambda provider: [name for name in vars(provider) if not name.startswith("_")],
        make=lambda provider, name: provider.get_model(name, pretrained=False),
        input_dims=_pytorchcv_dims,
    ),
}
FORMS = " or ".join([", ".join(f"{word}:NAME" for word in PACKAGES), "module:factory"])


# Public models by a short name, and who has them.
SHORT = {
    "vgg16": "torchvision:vgg16",
    "mobilenet_v3_large": "torchvision:mobilenet_v3_large",
    "efficientnet_b0": "torchvision:efficientnet_b0",
    "densenet121": "torchvision:densenet121",
    "shufflenet_v2": "torchvision:shufflenet_v2_x1_0",
    "convnext_tiny": "torchvision:convnext_tiny",
}


def names_a_package(name: str) -> bool:
    """Whether it is one of package:model, not module:factory."""
    return name.partition(":")[0] in PACKAGES


def found(name: str) -> tuple[Package, ModuleType, str]:
    """The package of a name package:model, what is imported of it, and the model's name there.
    Raises NoModel."""
    word, _, model = name.partition(":")
    package = PACKAGES[word]
    try:
        module = importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        raise NoModel(f"{name!r}: no module {error.name!r}; pip install {word}") from None
    except Exception as error:  # built for another torch, say
        reason = (str(error).strip().splitlines() or [""])[0]
        raise NoModel(
            f"{name!r}: {word} cannot be imported: {reason}; is it built for torch "
            f"{torch.__version__}?"
        ) from None
    # timm's names may be followed by which weights: resnet50.a1_in1k.
    if model.partition(".")[0] not in (known := package.names(module)):
        near = difflib.get_close_matches(model, known, 3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see its documents"
        raise NoModel(f"{name!r}: {word} has no model {model!r}; {hint}")
    return package, module, model


def factory(name: str) -> Callable[[], nn.Module]:
    """What makes the model of a name package:model. Raises NoModel."""
    package, module, model = found(name)
    return lambda: package.make(module, model)


def input_dims(name: str, model: nn.Module) -> Dims | None:
    """[C, *spatial] that the package made the model of that name for, if it tells."""
    package, module, short = found(name)
    return package.input_dims(module, short, model)
