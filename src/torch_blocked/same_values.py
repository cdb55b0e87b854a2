"""Finds the values of one capture in another, and the numbers that a plan's values stand for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from torch_blocked.captured import Capture

BYTES = (torch.uint8, torch.int8)
_SIGNED = 1  # torch.int8, as ATen numbers types
# Ops between numbers and bytes: (input, scale, zero point, least, most, dtype).
_QUANTIZE = "quantized_decomposed::quantize_per_tensor"
_DEQUANTIZE = "quantized_decomposed::dequantize_per_tensor"
_BATCH_NORM = "aten::batch_norm"

# Module, op, which of its calls there, which of its results.
_Place = tuple[str, str, int, int]


def same_values(captured: Capture, reference: Capture) -> dict[int, int]:
    """The value of `reference` for each value that has one: the result of the same op in the same
    call of the same module. A quantization has the value that it reads."""
    in_modules = any(node.module for node in captured.nodes)  # or a trace has lost them
    own, others = (_places(each, in_modules) for each in (captured, reference))
    counts = [Counter(place[:2] for place in set(each.values())) for each in (own, others)]
    values = {place: value for value, place in others.items()}
    for node in reference.nodes:
        if node.name != _BATCH_NORM or counts[0][others[node.outputs[0]][:2]]:
            continue
        if (place := others.get(node.arguments[0][1])) is not None:  # folded into what makes that
            values[place] = node.outputs[0]
    return {
        value: values[place]
        for value, place in own.items()
        if place in values and counts[0][place[:2]] == counts[1][place[:2]]
    }


def _places(captured: Capture, in_modules: bool) -> dict[int, _Place]:
    places = {value: ("", "input", i, 0) for i, value in enumerate(captured.inputs)}
    calls: Counter[tuple[str, str]] = Counter()
    for node in captured.nodes:
        if node.name in (_QUANTIZE, _DEQUANTIZE):
            if (source := node.arguments[0][1]) in places:
                places[node.outputs[0]] = places[source]
            continue
        module = node.module if in_modules else ""
        for i, value in enumerate(node.outputs):
            places[value] = module, node.name, calls[module, node.name], i
        calls[module, node.name] += 1
    return places


def quantizers(captured: Capture) -> dict[int, tuple[float, float]]:
    """The scale and the zero point of each value that may be bytes in a plan: of what quantizations
    make and, because bytes are moved in place of numbers, of what they read."""
    found: dict[int, tuple[float, float]] = {}
    for node in captured.nodes:
        if node.name != _QUANTIZE:
            continue
        scale, zero = (_number(each, captured) for each in node.arguments[1:3])
        if scale is None or zero is None:
            continue
        if node.arguments[5] == _SIGNED:  # a plan's bytes are unsigned
            zero += 128
        found.setdefault(node.arguments[0][1], (scale, zero))
        found[node.outputs[0]] = scale, zero
    return found


def _number(argument: Any, captured: Capture) -> float | None:
    """A number, or a constant of one element; None if it is computed."""
    if not isinstance(argument, list):
        return float(argument)
    constant = captured.constants.get(argument[1])
    return None if constant is None else constant.item()


def numbers_of(tensor: Tensor, quantizer: tuple[float, float] | None) -> Tensor:
    """The numbers that a value of a plan stands for."""
    if tensor.dtype not in BYTES or quantizer is None:
        return tensor
    scale, zero = quantizer
    return (tensor.double() - zero) * scale


def orders(exact: Tensor, result: Tensor) -> list[Tensor]:
    """An exact value in the orders of dims that a plan's value of these sizes may have: where the
    model has channels last, the plan may have an image."""
    moved = exact.movedim(-1, 1) if exact.dim() > 2 else exact
    is_image = moved.shape[:2] == result.shape[:2] and moved.numel() == result.numel()
    as_image = [moved.reshape(result.shape)] if is_image else []
    return as_image + [exact] * (exact.shape == result.shape)
