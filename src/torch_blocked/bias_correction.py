"""Corrects biases for the error that rounding adds to the mean of each output channel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_blocked.quantization_accuracy import OnInputsOf, Recorded
from torch_blocked.weight_rounding import readers

# The dim of output channels, from the end: batches may be missing.
_CHANNEL = {
    "linear": -1,
    **{f"conv{transposed}{n}d": -1 - n for n in (1, 2, 3) for transposed in ("", "_transpose")},
}


def correct(
    in_float: fx.GraphModule,
    quantized: fx.GraphModule,
    cases: Sequence[tuple[Any, ...]],
    is_layer: Callable[[fx.Node], bool],
    known: dict[Hashable, Tensor],
) -> None:
    """Replaces the biases of the quantized graph's layers. With the float graph's values as inputs,
    rounded to bytes, each layer's result then has the mean that it has in the float graph. Nodes
    have the same names in both graphs.

    known: corrections of earlier calls for these graphs and cases; gets the new ones."""
    every = {node.name for node in in_float.graph.nodes if node.op == "call_function"}
    of_weights = readers([node for node in quantized.graph.nodes if is_layer(node)])
    layers = [n for n in quantized.graph.nodes if is_layer(n) and n.name in every and _bias(n)]
    keys = {node.name: (node.name, of_weights[node.name]) for node in layers}
    asked = [node for node in layers if keys[node.name] not in known]
    names = {node.name for node in asked}
    for case in cases if asked else ():
        float_run = Recorded(in_float, every)
        float_run.run(*case)
        alone = OnInputsOf(quantized, names, float_run.made)
        alone.run(*case)
        for node in asked:
            channel = _CHANNEL[node.target.overloadpacket.__name__]
            lost = (float_run.made[node.name] - alone.made[node.name]).movedim(channel, 0)
            mean = lost.flatten(1).mean(1) / len(cases)
            key = keys[node.name]
            known[key] = known.get(key, torch.zeros_like(mean)) + mean
    for index, node in enumerate(layers):
        bias, name = _bias(node), f"_corrected_bias_{index}"
        owner, _, last = bias.target.rpartition(".")
        value = getattr(quantized.get_submodule(owner), last).detach()
        quantized.register_buffer(name, value + known[keys[node.name]])
        with quantized.graph.inserting_before(node):
            corrected = quantized.graph.get_attr(name)
        corrected.meta = dict(bias.meta)
        node.replace_input_with(bias, corrected)
    quantized.graph.eliminate_dead_code()
    quantized.recompile()


def _bias(node: fx.Node) -> Any:
    bias = node.args[2] if len(node.args) > 2 else None
    return bias if isinstance(bias, fx.Node) and bias.op == "get_attr" else None
