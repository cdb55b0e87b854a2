"""The table of models, and what its files share."""

import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Makes a model in evaluation mode, and its arguments.
Make = Callable[[], tuple[nn.Module, tuple[Any, ...]]]

TYPED: dict[str, Make] = {}


def register(name: str, make: Callable[[], nn.Module], *inputs: Any) -> None:
    """Adds a model. inputs: the arguments, of which a tuple stands for random numbers of these
    sizes."""
    assert name not in TYPED, name

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(name.encode()))
            model = make()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.running_mean.normal_()
                    module.running_var.uniform_(0.5, 2)
            args = tuple(torch.randn(each) if isinstance(each, tuple) else each for each in inputs)
        return model.eval(), args

    TYPED[name] = build


def typed(*inputs: Any) -> Callable:
    """Adds the class or the function below, which takes no arguments, under its name."""

    def of(make):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", make.__name__).lower()
        register(name, make, *inputs)
        return make

    return of


class Linears(nn.Module):
    """A linear layer, a function and a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(sizes[-1], sizes[-1])
        self.function = function
        self.last = nn.Linear(function(torch.randn(sizes)).shape[-1], 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Convolutions(nn.Module):
    """A convolution, a function and a convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Conv2d(sizes[1], 17, 3, padding=1)
        self.function = function
        self.last = nn.Conv2d(function(torch.randn(2, 17, *sizes[2:])).shape[1], 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def between_linears(functions: dict[str, Callable[[Tensor], Tensor]], *sizes: int) -> None:
    """Adds a model for each function. sizes: the input's."""
    for name, function in functions.items():
        register(name, partial(Linears, function, sizes), sizes)


def between_convolutions(functions: dict[str, Callable[[Tensor], Tensor]], *sizes: int) -> None:
    for name, function in functions.items():
        register(name, partial(Convolutions, function, sizes), sizes)
