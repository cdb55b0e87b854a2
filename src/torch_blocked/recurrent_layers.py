"""Recurrent ops in graphs of torch.export, for quantize(): LSTM, GRU and RNN.

torch.export works out the results of such an op step by step, so its graph would serve one length.
During a trace whole ops of the same arguments stand for them."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten

RECURRENT = {
    _aten.lstm.input,
    _aten.gru.input,
    _aten.rnn_tanh.input,
    _aten.rnn_relu.input,
}


# The places of the arguments (input, hx, params, has_biases, num_layers, dropout, train,
# bidirectional, batch_first).
_HX, _PARAMS, _HAS_BIASES, _LAYERS, _BIDIRECTIONAL = 1, 2, 3, 4, 7


def _sizes_of_results(
    source: Tensor,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Tensors of the sizes and strides that ATen's results have."""
    states = hx if isinstance(hx, list | tuple) else [hx]
    features = states[0].shape[-1] * (2 if bidirectional else 1)
    if batch_first:  # ATen returns a view
        batch, steps = source.shape[:2]
        result = source.new_empty((steps, batch, features)).transpose(0, 1)
    else:
        result = source.new_empty((*source.shape[:2], features))
    return result, *(each.new_empty(each.shape) for each in states)


def _whole(op: Any) -> Any:
    """An op of the same arguments. Only traces call it: it has no kernel."""
    name = f"torch_blocked_trace::{op._schema.name.removeprefix('aten::')}"
    torch.library.define(name, re.sub(r"^[^(]*", "", str(op._schema)))
    torch.library.register_fake(name)(_sizes_of_results)
    return getattr(torch.ops.torch_blocked_trace, name.partition("::")[2]).default


_WHOLE = {op: _whole(op) for op in RECURRENT}
_FUNCTIONS = {getattr(torch, op._schema.name.removeprefix("aten::")): op for op in RECURRENT}


class WholeLayers(TorchFunctionMode):
    """Traces recurrent layers as whole ops."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = _FUNCTIONS.get(func)
        has_params = len(args) > 2 and isinstance(args[2], list | tuple)  # else packed sequences
        if op is not None and has_params:
            return _WHOLE[op](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def name_whole_layers(graph: fx.Graph) -> None:
    """Gives whole ops of a trace the names that ATen has for them."""
    of_whole = {whole: op for op, whole in _WHOLE.items()}
    for node in graph.nodes:
        node.target = of_whole.get(node.target, node.target)


def is_plain(node: Any) -> bool:
    """Whether a recurrent op has no projections, which have no kernel."""
    count: int = node.args[_LAYERS] * _directions(node) * _parameters(node)
    return len(node.args[_PARAMS]) == count


def weights_of(node: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """The weights that meet the inputs, and those that meet the states, of a plain recurrent op of
    one layer, in each direction."""
    params, count = list(node.args[_PARAMS]), _parameters(node)
    return params[::count], params[1::count]


def _directions(node: Any) -> int:
    return 2 if node.args[_BIDIRECTIONAL] else 1


def _parameters(node: Any) -> int:
    """Of one direction of a layer: (weight_ih, weight_hh, bias_ih, bias_hh)."""
    return 4 if node.args[_HAS_BIASES] else 2


def result_of(layer: fx.Node) -> fx.Node:
    """The node of a layer's result: of a recurrent one, the first of its results that is read."""
    if layer.target not in RECURRENT:
        return layer
    return min(layer.users, key=lambda user: cast(int, user.args[1]))


def is_recurrent_result(node: fx.Node) -> bool:
    return node.target is operator.getitem and cast(fx.Node, node.args[0]).target in RECURRENT


def split_layers(module: fx.GraphModule) -> None:
    """Replaces each recurrent op of several layers by one op for each layer, so that what one layer
    gives the next can be bytes."""
    for node in list(module.graph.nodes):
        if node.target in RECURRENT and node.args[_LAYERS] > 1:
            with module.graph.inserting_before(node):
                _replace(node, list(_made(node)))
    module.graph.eliminate_dead_code()
    module.recompile()


def _made(node: Any) -> Iterator[fx.Node]:
    """The ops of one layer each, in order."""
    layers = node.args[_LAYERS]
    params, directions = list(node.args[_PARAMS]), _directions(node)
    count = len(params) // layers
    hx, has_many = node.args[_HX], isinstance(node.args[_HX], list | tuple)
    source = node.args[0]
    for layer in range(layers):
        states = [
            _call(node, _aten.narrow.default, each, 0, layer * directions, directions)
            for each in (hx if has_many else [hx])
        ]
        arguments = list(node.args)
        arguments[0], arguments[_HX] = source, states if has_many else states[0]
        arguments[_PARAMS] = params[layer * count : (layer + 1) * count]
        arguments[_LAYERS] = 1
        one = node.graph.call_function(node.target, tuple(arguments))
        result, *last = node.meta["val"]
        one.meta = {**node.meta, "val": (result, *(each[:directions] for each in last))}
        source = _call(node, operator.getitem, one, 0)
        yield one


def _replace(node: fx.Node, ones: list[fx.Node]) -> None:
    for user in list(node.users):
        index = user.args[1]
        parts = [_call(node, operator.getitem, one, index) for one in ones]
        new = parts[-1] if index == 0 else _call(node, _aten.cat.default, parts, 0)
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _call(like: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    """A node of the same module as `like`, with a value like those that tracing notes."""
    node = like.graph.call_function(target, arguments)
    value = target(*fx.node.map_arg(arguments, lambda each: each.meta["val"]))
    node.meta = {**like.meta, "val": value}
    return node
