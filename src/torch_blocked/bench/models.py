"""What is timed: the few models that the package ships (networks/), those of other packages, as
timm:resnet50, and the user's, named module:factory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import networks, packages
from .packages import NoModel

Dims = tuple[int, ...]
IMAGE = (3, 224, 224)
SEED, INPUT_SEED = 0, 1


@dataclass(frozen=True)
class Model:
    """A model in evaluation mode and float32, or as it is if its layers differ in dtype. weights: a
    word on them, as "random"."""

    name: str
    module: nn.Module
    weights: str
    input_dims: Dims  # [C, *spatial] of one input, the first
    other_dims: tuple[Dims, ...] = ()  # of those that follow

    def random_input(self, batch: int, size: int | None = None) -> Tensor:
        """`batch` seeded random inputs; `size` takes the place of each spatial extent. Raises
        NoModel for a model of several."""
        if self.other_dims:
            count = 1 + len(self.other_dims)
            raise NoModel(
                f"{self.name!r}: expected one --input here, got {count}; explain, bench models, "
                "bench layers and bench memory take several"
            )
        return self.random_inputs(batch, size)[0]

    def random_inputs(self, batch: int, size: int | None = None) -> tuple[Tensor, ...]:
        """The same of all arguments of the model."""
        random = torch.Generator().manual_seed(INPUT_SEED)

        def filled(channels: int, *spatial: int) -> Tensor:
            sizes = [size] * len(spatial) if size else spatial
            return torch.randn((batch, channels, *sizes), generator=random)

        return tuple(filled(*dims) for dims in (self.input_dims, *self.other_dims))

    def checked_inputs(self, batch: int, size: int | None = None) -> tuple[Tensor, ...]:
        """As random_inputs(). Raises NoModel where the model takes no such inputs."""
        inputs = self.random_inputs(batch, size)
        try:
            with torch.no_grad():
                self.module(*inputs)
        except Exception as error:  # whatever a model raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            dims = " and ".join("x".join(map(str, each.shape[1:])) for each in inputs)
            raise NoModel(
                f"{self.name!r}: expected --input as the model takes it, got {dims}: {reason}"
            ) from None
        return inputs

    def converted(self, dtype: torch.dtype) -> nn.Module:
        """The module in a dtype; itself if its layers differ, as it converts between them."""
        return self.module if is_mixed(self.module) else self.module.to(dtype)


def is_mixed(module: nn.Module) -> bool:
    """Whether some layers are of another dtype than others."""
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()}
    return len(dtypes) > 1


def known() -> dict[str, str]:
    """The names without a colon, with a note on each."""
    shipped = {name: spec.note for name, spec in networks.MODELS.items()}
    return shipped | {name: f"is {full}" for name, full in packages.SHORT.items()}


def factory(name: str) -> Callable[[], nn.Module]:
    """What makes the model of a name that is none of networks/. Raises NoModel."""
    name = packages.SHORT.get(name, name)
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


def load(name: str, input_dims: Dims | tuple[Dims, ...] | None = None) -> Model:
    """The model of that name. input_dims: of its only input, or of each. Raises NoModel if a
    factory makes something else, or if the model takes another number of inputs.

    One of the user's has the weights that its factory gives it, which are random ones with a fixed
    seed unless it says otherwise. One of a package has such ones always."""
    given = _several(input_dims)
    if name in networks.MODELS:
        module, weights = networks.build_model(name)
        given = given or (networks.MODELS[name].input_dims,)
        return _checked(Model(name, module, weights, given[0], given[1:]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = factory(name)()
    if not isinstance(module, nn.Module):
        raise NoModel(f"{name!r}: expected a torch.nn.Module, got {type(module).__name__}")
    module.eval()
    if not is_mixed(module):
        module.float()
    full = packages.SHORT.get(name, name)
    of_package = packages.names_a_package(full)
    given = given or (of_package and packages.input_dims(full, module) or IMAGE,)
    weights = "random" if of_package else "its own"
    return _checked(Model(name, module, weights, given[0], given[1:]))


def prepared(
    name: str,
    batch: int = 1,
    size: int | None = None,
    input_dims: Dims | tuple[Dims, ...] | None = None,
) -> tuple[Model, tuple[Tensor, ...]]:
    """The model of that name, and inputs that it takes. Raises NoModel."""
    model = load(name, input_dims)
    return model, model.checked_inputs(batch, size)


def _several(dims: Dims | tuple[Dims, ...] | None) -> tuple[Dims, ...]:
    if not dims:
        return ()
    return dims if isinstance(dims[0], tuple) else (dims,)  # type: ignore[return-value]


def _checked(model: Model) -> Model:
    """`model`. Raises NoModel if its forward has another number of arguments."""
    count = 1 + len(model.other_dims)
    try:
        signature = inspect.signature(model.module.forward)
        signature.bind(*[None] * count)
    except TypeError:
        raise NoModel(
            f"{model.name!r}: expected an --input for each argument of forward{signature}, got "
            f"{count}; give --input once for each, in their order"
        ) from None
    except ValueError:  # nobody knows
        pass
    return model
