"""Inputs of models of other packages, by the word that the table (models.txt) has for them.

Each takes the numbers behind its word, and then a batch and what follows of a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Positional arguments, or keyword arguments.
Inputs = tuple | dict[str, Any]


def images(channels: int) -> Callable[..., Inputs]:
    """One image tensor [N, channels, *spatial] for a size (N, *spatial)."""
    return lambda batch, *spatial: (torch.randn(batch, channels, *spatial),)


def pixels() -> Callable[..., Inputs]:
    """The same by keyword, RGB, as transformers calls it."""
    return lambda batch, *spatial: {"pixel_values": torch.randn(batch, 3, *spatial)}


def gray() -> Callable[..., Inputs]:
    def inputs(batch: int, *spatial: int) -> Inputs:
        grays = torch.rand(batch, 1, *spatial).expand(-1, 3, -1, -1)
        return {"pixel_values": grays.contiguous()}

    return inputs


def frames() -> Callable[..., Inputs]:
    return lambda batch, frames, *spatial: {"pixel_values": torch.randn(batch, frames, 3, *spatial)}


def flow() -> Callable[..., Inputs]:
    """Two images in [0, 1]."""
    return lambda batch, *spatial: tuple(torch.rand(batch, 3, *spatial) for _ in range(2))


def step(channels: int) -> Callable[..., Inputs]:
    """Of diffusion: sample and timestep."""
    return lambda batch, *spatial: (torch.randn(batch, channels, *spatial), torch.tensor(7))


def conditioned(channels: int, width: int) -> Callable[..., Inputs]:
    """The same, and five states of `width` to attend to."""

    def inputs(batch: int, *spatial: int) -> Inputs:
        sample = torch.randn(batch, channels, *spatial)
        return sample, torch.tensor(7), torch.randn(batch, 5, width)

    return inputs


def diffusion_transformer() -> Callable[..., Inputs]:
    return lambda batch, *spatial: {
        "hidden_states": torch.randn(batch, 4, *spatial),
        "timestep": torch.full((batch,), 7),
        "class_labels": torch.arange(batch) % 10,
    }


def waves(channels: int = 0) -> Callable[..., Inputs]:
    """Sound, with a dim of channels where these are given."""
    dims = (channels,) if channels else ()
    return lambda batch, length: {"input_values": 0.5 * torch.randn(batch, *dims, length)}


def spectrum() -> Callable[..., Inputs]:
    return lambda batch, length: {
        "input_features": torch.randn(batch, 16, length),
        "decoder_input_ids": torch.randint(3, 90, (batch, 5)),
    }


def input_ids() -> Callable[..., Inputs]:
    return lambda batch, length: {"input_ids": torch.randint(3, 90, (batch, length))}


def tokens() -> Callable[..., Inputs]:
    return lambda batch, length: (torch.randint(0, 50, (batch, length)),)


def sequence() -> Callable[..., Inputs]:
    return lambda batch, length: (torch.randn(batch, length, 32),)


def converted(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """With `change` applied to each tensor of floating point."""

    def apply(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(inputs, dict):
        return {name: apply(value) for name, value in inputs.items()}
    return tuple(map(apply, inputs))
