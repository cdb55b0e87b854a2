"""What the rounding of each layer alone does to the results of a model, and what work a layer is.

A layer that loses much may matter little, because later layers ignore what it loses. So its error
goes through the gradient: times that of a sum of results with random signs, it is on average the
error of the results, squared (Hutchinson, 1990)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_blocked.quantization_accuracy import OnInputsOf, Recorded, tensors
from torch_blocked.recurrent_layers import RECURRENT, weights_of
from torch_blocked.weight_rounding import is_transposed

# Random sums of results, over all cases. With 16 the estimate of an error is off by a fifth.
_SUMS = 16


class _WithGradients(fx.Interpreter):
    """A graph that keeps these nodes' results for torch.autograd.grad()."""

    def __init__(self, module: fx.GraphModule, names: Collection[str]) -> None:
        super().__init__(module)
        self.names = names
        self.made: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name not in self.names:
            return result
        self.made[n.name] = result if result.requires_grad else result.detach().requires_grad_()
        return self.made[n.name].clone()  # which ops in place may overwrite


def squared_effects(
    in_float: fx.GraphModule,
    quantized: fx.GraphModule,
    cases: Sequence[tuple[Any, ...]],
    layers: Collection[str],
) -> dict[str, float]:
    """By the name of a layer, in the same unit for all: the square of what it alone does to the
    results. If these have no gradients, of its own relative error."""
    every = {node.name for node in in_float.graph.nodes if node.op == "call_function"}
    effects, own, values = (dict.fromkeys(layers, 0.0) for _ in range(3))
    signs = torch.Generator().manual_seed(0)
    for case in cases:
        with torch.no_grad():
            float_run = Recorded(in_float, every)
            float_run.run(*case)
            alone = OnInputsOf(quantized, set(layers), float_run.made)
            alone.run(*case)
        errors = {name: alone.made[name] - float_run.made[name] for name in layers}
        for name, error in errors.items():
            own[name] += _squares(error)
            values[name] += _squares(float_run.made[name])
        for slopes in _slopes(in_float, case, layers, -(-_SUMS // len(cases)), signs):
            for name, slope in slopes.items():
                effects[name] += float((slope * errors[name]).double().sum()) ** 2
    if any(effects.values()):
        return effects
    return {name: own[name] / values[name] if values[name] else 0.0 for name in layers}


def _squares(values: Tensor) -> float:
    return float(values.double().square().sum())


def _slopes(
    in_float: fx.GraphModule,
    case: tuple[Any, ...],
    layers: Collection[str],
    count: int,
    signs: torch.Generator,
) -> list[dict[str, Tensor]]:
    """The gradients of `count` sums of results with random signs, by the name of each layer; empty
    if autograd does not reach the layers from the results."""
    found = []
    try:
        with torch.enable_grad():
            run = _WithGradients(in_float, layers)
            results = [each for each in tensors(run.run(*case)) if each.requires_grad]
            for _ in range(count):
                ones = [
                    torch.randint(0, 2, each.shape, generator=signs) * 2.0 - 1 for each in results
                ]
                slopes = torch.autograd.grad(
                    results, list(run.made.values()), ones, retain_graph=True, allow_unused=True
                )
                found.append(
                    {
                        name: slope
                        for name, slope in zip(run.made, slopes, strict=True)
                        if slope is not None
                    }
                )
    except RuntimeError:  # an op without a gradient, or that writes over what gradients need
        return []
    return found


class _Counted(fx.Interpreter):
    """A graph that counts the multiply-adds of layers."""

    def __init__(self, module: fx.GraphModule, layers: Collection[str]) -> None:
        super().__init__(module)
        self.layers = layers
        self.counts: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.layers:
            self.counts[n.name] = self._count(n, result)
        return result

    def _count(self, n: fx.Node, result: Any) -> int:
        if n.target in RECURRENT:
            weights = [self.env[each] for each in itertools.chain(*weights_of(n))]
            return int(result[0].shape[:2].numel() * sum(each.numel() for each in weights))
        source, weights = (self.env[each] for each in n.all_input_nodes[:2])
        pixels = source if is_transposed(n) else result
        return int(pixels.numel() * weights[0].numel())


def multiply_adds(
    in_float: fx.GraphModule, case: tuple[Any, ...], layers: Collection[str]
) -> dict[str, int]:
    """By the name of a layer, for an input of the model."""
    counted = _Counted(in_float, layers)
    with torch.no_grad():
        counted.run(*case)
    return counted.counts
