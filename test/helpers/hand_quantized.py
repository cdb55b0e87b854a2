"""Pairs of quantize and dequantize in forms that no quantizer of ours writes, at random places of
a float graph: signed bytes with and without a zero point, few bits, scales as tensors, weights with
one scale, one dequantization for all readers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers the ops

OPS = torch.ops.quantized_decomposed
_ATEN = torch.ops.aten
# Layers, and the dim of their weights that outputs lie along.
_LAYERS = {
    _ATEN.conv1d: 0,
    _ATEN.conv2d: 0,
    _ATEN.conv3d: 0,
    _ATEN.linear: 0,
    _ATEN.conv_transpose1d: 1,
    _ATEN.conv_transpose2d: 1,
    _ATEN.conv_transpose3d: 1,
}


@dataclass(frozen=True)
class Form:
    """What bytes there are for numbers of some range."""

    dtype: torch.dtype
    least: int
    most: int
    is_symmetric: bool

    def parameters(self, low: float, high: float) -> tuple[float, int]:
        low, high = min(low, 0.0), max(high, 0.0, 1e-3)
        if self.is_symmetric:
            return max(-low, high) / min(-self.least, self.most), 0
        scale = (high - low) / (self.most - self.least)
        return scale, round(self.least - low / scale)


_FORMS = (
    Form(torch.uint8, 0, 255, False),
    Form(torch.uint8, 0, 127, False),
    Form(torch.int8, -128, 127, False),
    Form(torch.int8, -128, 127, True),
    Form(torch.int8, -127, 127, True),
    Form(torch.int16, -32768, 32767, True),
)
_SCALES, _ZEROS = (torch.float32, torch.float64), (torch.int64, torch.int32)


class _Recorded(fx.Interpreter):
    """What the nodes make."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def _attribute(module: fx.GraphModule, tensor: Tensor) -> fx.Node:
    """A node of a constant."""
    count = sum(name.startswith("_hand") for name, _ in module.named_buffers())
    module.register_buffer(f"_hand{count}", tensor)
    return module.graph.get_attr(f"_hand{count}")


def _pair(module: fx.GraphModule, node: fx.Node, value: Tensor, rng: random.Random) -> None:
    """Readers of the node read bytes of it."""
    graph, users = module.graph, list(node.users)
    form = rng.choice(_FORMS[:-1]) if rng.random() < 0.95 else _FORMS[-1]
    scale, zero = form.parameters(float(value.min()), float(value.max()))
    as_tensors = rng.random() < 0.2
    with graph.inserting_after(node):
        last = graph.call_function(_ATEN.alias.default, (node,))  # a place to insert before
    with graph.inserting_before(last):
        parameters: tuple[Any, ...] = (scale, zero)
        if as_tensors:
            parameters = (
                _attribute(module, torch.tensor(scale, dtype=rng.choice(_SCALES))),
                _attribute(module, torch.tensor(zero, dtype=rng.choice(_ZEROS))),
            )
        name = "tensor" if as_tensors else "default"
        rest = (*parameters, form.least, form.most, form.dtype)
        made = graph.call_function(getattr(OPS.quantize_per_tensor, name), (node, *rest))
        number = getattr(OPS.dequantize_per_tensor, name)
        shared = graph.call_function(number, (made, *rest)) if rng.random() < 0.3 else None
        for user in users:
            user.replace_input_with(node, shared or graph.call_function(number, (made, *rest)))
    graph.erase_node(last)


def _weights(module: fx.GraphModule, layer: fx.Node, weight: Tensor, rng: random.Random) -> None:
    """The layer reads numbers of int8 constants."""
    graph, axis = module.graph, _LAYERS[layer.target.overloadpacket]
    if axis == 1 and len(layer.args) > 6 and layer.args[6] != 1:
        return
    with graph.inserting_before(layer):
        if rng.random() < 0.3:
            scale = float(weight.abs().max()) / 127
            values = _attribute(module, (weight / scale).round().to(torch.int8))
            rest: tuple[Any, ...] = (scale, 0, -127, 127, torch.int8)
            numbers = graph.call_function(OPS.dequantize_per_tensor.default, (values, *rest))
        else:
            others = [dim for dim in range(weight.dim()) if dim != axis]
            scales = weight.abs().amax(others).clamp(min=1e-5) / 127
            shape = [-1 if dim == axis else 1 for dim in range(weight.dim())]
            values = _attribute(module, (weight / scales.view(shape)).round().to(torch.int8))
            zeros = _attribute(module, torch.zeros(len(scales), dtype=torch.int64))
            rest = (_attribute(module, scales), zeros, axis, -127, 127, torch.int8)
            numbers = graph.call_function(OPS.dequantize_per_channel.default, (values, *rest))
    layer.update_arg(1, numbers)


def by_hand(model: nn.Module, calibration: list[Tensor], rng: random.Random) -> fx.GraphModule:
    """The exported model with such pairs at most values, and most weights as int8."""
    exported = torch.export.export(model, (calibration[0],), strict=False)
    module = exported.module(check_guards=False)
    module._forward_pre_hooks.clear()
    recorded = _Recorded(module)
    recorded.run(calibration[0])
    density = rng.choice((0.5, 0.8, 0.95, 1))
    for node, value in list(recorded.values.items()):
        is_number = isinstance(value, Tensor) and value.dtype == torch.float32
        if not is_number or node.op not in ("placeholder", "call_function"):
            continue
        if getattr(node.target, "overloadpacket", None) in _LAYERS:
            weight = recorded.values[node.args[1]]
            if rng.random() < 0.9:
                _weights(module, node, weight, rng)
            # Activations and sums that run with a layer read its numbers.
            if rng.random() < 0.5 and all(user.op != "output" for user in node.users):
                continue
        if rng.random() < density:
            _pair(module, node, value, rng)
    module.recompile()
    return module
