"""Rows of the tables of models of other packages, and how a table's text is read."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import inputs
from zoo.inputs import Inputs

Size = tuple[int, ...]
# Their forwards draw random numbers, which differ between types.
DRAWING = ("snac/snac_noise",)


@dataclass(frozen=True)
class Row:
    """A model of another package.

    build: the model with random weights, after a fixed seed. inputs: arguments of a size, after a
    fixed seed. sizes: the example's, then others; the dense model takes all of them. reference:
    what the dense model computes in."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    sizes: tuple[Size, ...]
    reference: torch.dtype = torch.float64

    @property
    def package(self) -> str:
        """Its name on PyPI, which third_party.txt pins."""
        return self.name.split("/")[0]


def rows(path: Path) -> Iterator[Row]:
    """The rows of a table: name | inputs | sizes | what makes it."""
    for name, words, sizes, text in cells(path):
        word, *numbers = words.split()
        made = getattr(inputs, word)(*map(int, numbers))
        reference = torch.float32 if name in DRAWING else torch.float64
        yield Row(name, call(text), made, sizes_of(sizes), reference)


def cells(path: Path) -> Iterator[list[str]]:
    """Those of each row of a text. Indented lines continue the row above."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\n    ", " ")
    for line in joined.splitlines():
        yield [cell.strip() for cell in line.split("|")]


def call(text: str) -> Callable[[], nn.Module]:
    """What runs "module:name(arguments)"; the arguments are literals."""
    path, _, arguments = text.partition("(")
    parsed = ast.parse(f"f({arguments}", mode="eval").body
    assert isinstance(parsed, ast.Call), text
    named = {each.arg: ast.literal_eval(each.value) for each in parsed.keywords if each.arg}
    return make(path, *map(ast.literal_eval, parsed.args), **named)


def make(path: str, *args: Any, **keywords: Any) -> Callable[[], nn.Module]:
    """A factory that imports "module:name" and calls it when it is called."""
    module, names = path.split(":")

    def build() -> nn.Module:
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        return found(*args, **keywords)

    return build


def dims(text: str) -> Size:
    """`3x224x224`"""
    return tuple(map(int, text.split("x")))


def sizes_of(text: str) -> tuple[Size, ...]:
    first, *others = text.split()
    if first == "squares":
        example, *sides = map(int, others)
        return (
            (1, example, example),
            (2, example, example),
            *((1 + i % 2, side, side) for i, side in enumerate(sides)),
        )
    if first == "batches":
        return tuple((batch, *dims(others[0])) for batch in (1, 2, 3, 5))
    return tuple(map(dims, text.split()))


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
