"""A row of the table of third-party models, and the words that rows are written in."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Positional arguments, or keyword arguments.
Inputs = tuple | dict[str, Any]
Size = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A model of another package.

    build: the model with random weights, after a fixed seed. inputs: arguments of a size, after a
    fixed seed. sizes: the example's, then others; the dense model takes all of them. reference:
    what the dense model computes in; float32 where a forward draws random numbers, which differ
    between types."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    sizes: tuple[Size, ...]
    reference: torch.dtype = torch.float64

    @property
    def package(self) -> str:
        """Its name on PyPI, which third_party.txt pins."""
        return self.name.split("/")[0]


def make(path: str, *args, **keywords) -> Callable[[], nn.Module]:
    """A factory that imports "module:name" and calls it when it is called."""
    module, name = path.split(":")

    def build() -> nn.Module:
        return getattr(importlib.import_module(module), name)(*args, **keywords)

    return build


def images(channels: int) -> Callable[..., Inputs]:
    """One image tensor [N, channels, *spatial] for a size (N, *spatial)."""
    return lambda batch, *spatial: (torch.randn(batch, channels, *spatial),)


def pixels(**more: Callable[..., Tensor]) -> Callable[..., Inputs]:
    """The same by keyword, RGB, as transformers calls it."""
    return lambda batch, *spatial: {"pixel_values": torch.randn(batch, 3, *spatial)}


def squares(example: int, *others: int) -> tuple[Size, ...]:
    """Images of `example` squared: one, then two, and then one and two of the other sizes."""
    return (
        (1, example, example),
        (2, example, example),
        *((1 + i % 2, size, size) for i, size in enumerate(others)),
    )


def batches(*size: int) -> tuple[Size, ...]:
    """For models that take one size only: other batches."""
    return tuple((batch, *size) for batch in (1, 2, 3, 5))


@functools.cache
def declare_torchvision_ops() -> torch.library.Library | None:
    """Lets the Python of torchvision import beside a torch that its library does not load with, as
    PyPI's does beside one without CUDA; else None.

    The import stops at two ops, whose schemas are given here. Nothing is imported."""
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            for path in Path(folder).glob("_C*.so"):
                torch.ops.load_library(path)
                return None
        except OSError:
            continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # which the cache keeps: the schemas live as long as it does


def torchvision_without_library() -> None:
    """The same, and gives detectors the ops that they call, in Python, if it has no others. Its own
    roi_align in Python has torch.compile compile it at the first call, for a minute; not here."""
    is_installed = importlib.util.find_spec("torchvision") is not None
    if declare_torchvision_ops() is not None and is_installed:
        for module in ("torchvision.ops.boxes", "torchvision.ops"):
            importlib.import_module(module).nms = nms
        align = importlib.import_module("torchvision.ops.roi_align")
        align._roi_align = align._roi_align.__wrapped__


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """What torchvision.ops.nms gives: the best box, then the best of those that overlap no better
    one by more than the threshold."""
    left, kept = scores.argsort(descending=True, stable=True), []
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    while left.numel():
        best, left = left[0], left[1:]
        kept.append(best)
        corners = torch.maximum(boxes[best, :2], boxes[left, :2])
        common = (torch.minimum(boxes[best, 2:], boxes[left, 2:]) - corners).clamp(min=0).prod(1)
        left = left[common <= iou_threshold * (areas[best] + areas[left] - common)]
    return torch.stack(kept) if kept else left
