"""Weights reordered ahead of the first call."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_blocked.calls import run_if_lazy
from torch_blocked.tensor import BlockedTensor

__all__ = ["prepack"]

_Module = TypeVar("_Module", bound=nn.Module)


def prepack(model: _Module, example_input: Tensor | tuple[Any, ...]) -> _Module:
    """Packs the weights of `model` now, so that its first call on a blocked input need not, and
    returns the model.

    In eager mode a convolution reorders its weights at its first call, into the format of the
    kernel that is chosen for the sizes, and keeps them while they do not change. `prepack` runs the
    model once, in eval mode and without an autograd graph. Parameters, buffers, modes and the
    random state stay as they were. `optimize` packs by itself.

    example_input: blocked, or a tuple of positional arguments with a blocked tensor among them, of
        the sizes, dtype and format that calls will have. Other sizes may take another kernel.
    Raises ValueError if no tensor is blocked, since dense inputs have no use for packed weights,
    and whatever the model raises."""
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    if not any(isinstance(argument, BlockedTensor) for argument in arguments):
        raise ValueError(
            "torch_blocked::prepack: expected a blocked example input, got "
            f"{[type(argument).__name__ for argument in arguments]}; pass x.to_blocked()"
        )
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        run_if_lazy(model, arguments, {})
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*arguments)
    finally:
        for module in training:
            module.training = True
    return model
