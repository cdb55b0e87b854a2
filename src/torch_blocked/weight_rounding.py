"""int8 weights rounded so that their errors cancel in the sums of a layer.

Rounding each weight to the nearest is best if inputs are independent, but the values of an image
are not. So columns are rounded one after the other, and the columns that are not rounded yet
compensate the error in the layer's results. Source: Frantar et al., GPTQ, 2022, arXiv:2210.17323,
sections 3.1 to 3.3; here with the second moments of convolutions' inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from torch_blocked import progress
from torch_blocked.quantization_accuracy import OnInputsOf, Recorded
from torch_blocked.recurrent_layers import RECURRENT

# The most inputs of an output channel that are treated together, since the time grows with their
# cube. More inputs are cut into parts, each of which compensates its own errors.
_MOST_TOGETHER = 1152
# Columns that compensate each other's errors one by one; columns behind them do so all at once.
_COLUMNS = 64
# The share of the mean second moment that is added to each. Otherwise inputs that are nearly always
# 0 would take all errors.
_DAMPING = 0.01


def round_weights(
    in_float: fx.GraphModule,
    quantized: fx.GraphModule,
    cases: Sequence[tuple[Any, ...]],
    is_layer: Callable[[fx.Node], bool],
    known: dict[Hashable, Tensor],
) -> None:
    """Rounds the int8 weights of the quantized graph's layers again, with the same scales, for
    inputs that are the float graph's values. Nodes have the same names in both graphs.

    known: weights of earlier calls for these graphs and cases, by readers(); gets the new ones."""
    every = {node.name for node in in_float.graph.nodes if node.op == "call_function"}
    real: dict[str, Any] = {
        node.name: _constant(in_float, node.args[1])
        for node in in_float.graph.nodes
        if is_layer(node)
    }
    all_layers: list[Any] = [
        node
        for node in quantized.graph.nodes
        if is_layer(node) and weight_bytes(node) and real.get(node.name) is not None
    ]
    keys = readers(all_layers)
    layers = [node for node in all_layers if keys[node.name] not in known]
    inputs = {node.args[0].name for node in layers}
    moments: dict[str, list[Tensor]] = {}  # by weight, which several layers may share
    if layers:
        for case in progress.each("torch_blocked: rounding", cases):
            float_run = Recorded(in_float, every)
            float_run.run(*case)
            alone = OnInputsOf(quantized, inputs, float_run.made)
            alone.run(*case)
            for node in layers:
                x = alone.made[node.args[0].name]
                _add_moments(moments.setdefault(weight_bytes(node).target, []), node, x)
    for node in all_layers:
        stored = weight_bytes(node)
        if parts := moments.pop(stored.target, None):
            known[keys[node.name]] = _rounded(quantized, node, real[node.name], parts)
        _constant(quantized, stored).copy_(known[keys[node.name]])


def readers(layers: Sequence[Any]) -> dict[str, Hashable]:
    """By the name of each layer: the layers that share its weights, and what rounds their inputs.
    If both are equal in two graphs, so are the best bytes for the weights."""
    shared: dict[Any, list[Hashable]] = {}
    for layer in layers:
        shared.setdefault(_weights_of(layer), []).append((layer.name, *input_rounding(layer)))
    return {layer.name: tuple(shared[_weights_of(layer)]) for layer in layers}


def _weights_of(layer: Any) -> str:
    stored = weight_bytes(layer)
    return str(stored.target) if stored else layer.name


def input_rounding(layer: Any) -> tuple[Hashable, ...]:
    """Scales and zero points that the input of a layer is rounded to."""
    found, node = list[Hashable](), layer.args[0]
    while node.op == "call_function" and "quantize_per_tensor" in str(node.target):
        found += node.args[1:]
        node = node.args[0]
    return tuple(found)


def weight_bytes(layer: Any) -> Any:
    """The node of a layer's int8 weights, of a recurrent layer's for its state; None if it has
    none."""
    numbers = layer.args[2][1] if layer.target in RECURRENT else layer.args[1]
    is_quantized = (
        isinstance(numbers, fx.Node)
        and "dequantize_per_channel" in str(numbers.target)
        and numbers.args[3] == int(is_transposed(layer))
    )
    return numbers.args[0] if is_quantized and numbers.args[0].op == "get_attr" else None


def _constant(module: fx.GraphModule, node: Any) -> Any:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, last = str(node.target).rpartition(".")
    return getattr(module.get_submodule(owner), last).detach()


def is_transposed(layer: Any) -> bool:
    return "conv_transpose" in str(layer.target)


# The places of a convolution's arguments: (input, weight, bias, ...).
_ORDINARY = {"stride": 3, "padding": 4, "dilation": 5, "groups": 6}
_TRANSPOSED = {"stride": 3, "padding": 4, "output_padding": 5, "groups": 6, "dilation": 7}


@dataclass(frozen=True)
class _Geometry:
    """The numbers of a convolution for each spatial dim. A transposed convolution counts as an
    ordinary one with reversed taps, over pixels that are `spread` apart with zeros between them."""

    stride: list[int]
    ends: list[tuple[int, int]]  # padding at both
    dilation: list[int]
    groups: int
    spread: list[int]

    @classmethod
    def of(cls, layer: Any, kernel: torch.Size) -> _Geometry:
        places = _TRANSPOSED if is_transposed(layer) else _ORDINARY
        given = dict(enumerate(layer.args))

        def of_each(name: str, default: int) -> list[int]:
            values = given.get(places[name], [default]) if name in places else [default]
            values = [values] if isinstance(values, int) else list(values)
            return values * len(kernel) if len(values) == 1 else values

        stride, dilation, ones = of_each("stride", 1), of_each("dilation", 1), [1] * len(kernel)
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        groups = given.get(places["groups"], 1)
        padding = given.get(places["padding"], [0])
        if isinstance(padding, str):
            spans = [span * (padding == "same") for span in spans]
            ends = [(span // 2, span - span // 2) for span in spans]
        elif is_transposed(layer):
            more = zip(spans, of_each("padding", 0), of_each("output_padding", 0), strict=True)
            ends = [(span - p, span - p + last) for span, p, last in more]
            return cls(ones, ends, dilation, groups, stride)
        else:
            ends = [(p, p) for p in of_each("padding", 0)]
        return cls(stride, ends, dilation, groups, ones)


def _spread(x: Tensor, steps: list[int]) -> Tensor:
    """The pixels of x, this many steps apart, with zeros between them."""
    if all(step == 1 for step in steps):
        return x
    sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], steps, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    wide[(slice(None), slice(None), *(slice(None, None, step) for step in steps))] = x
    return wide


def _taps(x: Tensor, layer: Any, kernel: torch.Size) -> Iterator[Tensor]:
    """[N, C, *spatial] -> for each tap of the kernel the pixels that it reads, [N, C, *outputs]."""
    of = _Geometry.of(layer, kernel)
    x = functional.pad(_spread(x, of.spread), [p for end in reversed(of.ends) for p in end])
    reach = [d * (k - 1) + 1 for d, k in zip(of.dilation, kernel, strict=True)]
    outputs = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, of.stride, strict=True)]
    taps = torch.cartesian_prod(*(torch.arange(k) for k in kernel)).reshape(-1, len(kernel))
    for tap in taps.flip(0) if is_transposed(layer) else taps:
        places = [
            slice(int(t) * d, int(t) * d + s * (n - 1) + 1, s)
            for t, d, s, n in zip(tap, of.dilation, of.stride, outputs, strict=True)
        ]
        yield x[(slice(None), slice(None), *places)]


def _seen(x: Tensor, layer: Any, shape: torch.Size) -> Tensor:
    """The inputs of a layer with weights of `shape` -> [groups, inputs of a weight's row, sums]."""
    if len(shape) == 2:
        return x.reshape(-1, shape[1]).T[None]
    kernel = shape[2:]
    if x.dim() == len(shape) - 1:
        x = x[None]  # without a batch
    groups = _Geometry.of(layer, kernel).groups
    taps = torch.stack(list(_taps(x, layer, kernel)), 2)  # [N, C, taps, *outputs]
    columns = taps.flatten(3).permute(1, 2, 0, 3).flatten(2)  # [C, taps, sums]
    return columns.reshape(groups, -1, columns.shape[-1])


def _parts(inputs: int) -> list[slice]:
    count = -(-inputs // _MOST_TOGETHER)
    return [slice(i * inputs // count, (i + 1) * inputs // count) for i in range(count)]


def _add_moments(moments: list[Tensor], layer: Any, x: Tensor) -> None:
    stored = layer.args[1].args[0]
    shape = _constant(layer.graph.owning_module, stored).shape
    seen = _seen(x, layer, shape)
    for i, part in enumerate(_parts(seen.shape[1])):
        columns = seen[:, part]
        more = columns @ columns.transpose(1, 2)
        if i == len(moments):
            moments.append(more)
        else:
            moments[i] += more


def _rounded(module: fx.GraphModule, layer: Any, real: Tensor, moments: list[Tensor]) -> Tensor:
    """The weights as multiples of their scales, [OC, inputs, *kernel]."""
    _, scales, _, _, least, most, _ = layer.args[1].args
    groups = moments[0].shape[0]
    axis = int(is_transposed(layer))
    scale = _constant(module, scales).to(torch.float64).view(-1, *[1] * (real.dim() - 1 - axis))
    # [groups, outputs, inputs, *kernel]; transposed weights have inputs before outputs.
    each = (real.to(torch.float64) / scale).unflatten(0, (groups, -1))
    ordered = each.transpose(1, 2) if axis else each
    rows = ordered.flatten(2)
    parts = [
        _rounded_part(rows[:, :, part], moment.to(torch.float64), least, most)
        for part, moment in zip(_parts(rows.shape[2]), moments, strict=True)
    ]
    rounded = torch.cat(parts, 2).reshape(ordered.shape)
    return (rounded.transpose(1, 2) if axis else rounded).reshape(real.shape)


def _rounded_part(rows: Tensor, moments: Tensor, least: int, most: int) -> Tensor:
    """rows [groups, outputs, inputs], moments [groups, inputs, inputs]."""
    if not moments.isfinite().all():  # inputs are not finite, so there is nothing to compensate
        return rows.round().clamp(least, most)
    mean = moments.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
    damped = moments + torch.diag_embed((_DAMPING * mean)[:, None].expand(-1, moments.shape[1]))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True)
    rows, rounded = rows.to(torch.float32, copy=True), torch.empty_like(rows)
    factor = factor.to(torch.float32)
    count = rows.shape[2]
    for begin in range(0, count, _COLUMNS):
        end = min(begin + _COLUMNS, count)
        apart = torch.empty_like(rows[:, :, begin:end])
        for i in range(begin, end):
            column = rows[:, :, i]
            rounded[:, :, i] = column.round().clamp(least, most)
            taken = (column - rounded[:, :, i]) / factor[:, i, i, None]
            rows[:, :, i + 1 : end] -= taken[:, :, None] * factor[:, None, i, i + 1 : end]
            apart[:, :, i - begin] = taken
        rows[:, :, end:] -= apart @ factor[:, begin:end, end:]
    return rounded
