"""What is timed: the package's own models (networks/), those of other packages, as timm:resnet50,
and the user's, named module:factory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import networks, packages
from .packages import NoModel

IMAGE = (3, 224, 224)
SEED, INPUT_SEED = 0, 1


@dataclass(frozen=True)
class Model:
    """A model in evaluation mode and float32, or as it is if its layers differ in dtype. weights: a
    word on them, as "random"."""

    name: str
    module: nn.Module
    weights: str
    input_dims: tuple[int, ...]  # [C, *spatial] of one input

    def random_input(self, batch: int, size: int | None = None) -> Tensor:
        """`batch` seeded random inputs; `size` takes the place of each spatial extent."""
        channels, *spatial = self.input_dims
        dims = (batch, channels, *([size] * len(spatial) if size else spatial))
        return torch.randn(dims, generator=torch.Generator().manual_seed(INPUT_SEED))

    def checked_input(self, batch: int) -> Tensor:
        """As random_input(). Raises NoModel where the model takes no such inputs."""
        input = self.random_input(batch)
        try:
            with torch.no_grad():
                self.module(input)
        except Exception as error:  # whatever a model raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise NoModel(
                f"{self.name!r}: expected --input as the model takes it, got "
                f"{'x'.join(map(str, self.input_dims))}: {reason}"
            ) from None
        return input

    def converted(self, dtype: torch.dtype) -> nn.Module:
        """The module in a dtype; itself if its layers differ, as it converts between them."""
        return self.module if is_mixed(self.module) else self.module.to(dtype)


def is_mixed(module: nn.Module) -> bool:
    """Whether some layers are of another dtype than others."""
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()}
    return len(dtypes) > 1


def known() -> dict[str, str]:
    """Names of the package's own models, with a note on each."""
    return {name: spec.note for name, spec in networks.MODELS.items()}


def factory(name: str) -> Callable[[], nn.Module]:
    """What makes the model of a name with a colon. Raises NoModel."""
    if packages.names_a_package(name):
        return packages.factory(name)
    module_name, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NoModel(f"{name!r}: no module {error.name!r}; is it installed?") from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise NoModel(f"{name!r}: expected a function or class that makes a model, got {found!r}")
    return found


def load(name: str, input_dims: tuple[int, ...] | None = None) -> Model:
    """The model of that name. Raises NoModel if a factory makes something else.

    One of the user's has the weights that its factory gives it, which are random ones with a fixed
    seed unless it says otherwise. One of a package has such ones always."""
    if ":" not in name:
        module, weights = networks.build_model(name)
        return Model(name, module, weights, input_dims or networks.MODELS[name].input_dims)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = factory(name)()
    if not isinstance(module, nn.Module):
        raise NoModel(f"{name!r}: expected a torch.nn.Module, got {type(module).__name__}")
    module.eval()
    if not is_mixed(module):
        module.float()
    if packages.names_a_package(name):
        dims = input_dims or packages.input_dims(name, module)
        return Model(name, module, "random", dims or IMAGE)
    return Model(name, module, "its own", input_dims or IMAGE)
