"""Conversions of a float graph to bytes, for one set of calibration inputs.

Several conversions keep different layers in floating point. What they have in common is computed
once: a range for each value, bytes for the weights of each layer, and a correction of each bias."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import FixedQParamsObserver, HistogramObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from torch_blocked import bias_correction, progress, weight_rounding


class _NoQuantizer(Quantizer):  # type: ignore[misc]
    """With it torchao only folds batch norms into layers."""

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Does nothing: there are no annotations."""


class Calibration:
    """A graph of torch.export, and the inputs that conversions of it are calibrated with."""

    def __init__(
        self,
        exported: fx.GraphModule,
        cases: Sequence[tuple[Any, ...]],
        is_layer: Callable[[fx.Node], bool],
    ) -> None:
        self._meta = dict(exported.meta)
        self.in_float: fx.GraphModule = prepare_pt2e(exported, _NoQuantizer())
        self.cases, self.is_layer = cases, is_layer
        self._observers: dict[Hashable, nn.Module] = {}
        self._weights: dict[Hashable, Tensor] = {}
        self._biases: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def converted(self, quantizer: Quantizer) -> fx.GraphModule:
        """The graph with int8 layers where the quantizer wants them. Nodes that are in `in_float`
        have the same names there."""
        module = fx.GraphModule(self.in_float, copy.deepcopy(self.in_float.graph))
        module.meta.update(self._meta)
        prepared = prepare_pt2e(module, quantizer)
        self._observe(prepared)
        result = cast(fx.GraphModule, convert_pt2e(prepared))
        arguments = self.in_float, result, self.cases, self.is_layer
        weight_rounding.round_weights(*arguments, self._weights)
        bias_correction.correct(*arguments, self._biases)
        return result

    def _observe(self, prepared: fx.GraphModule) -> None:
        """Gives the observers of values the ranges that are known, and finds the others."""
        places: dict[nn.Module, list[fx.Node]] = {}
        for node in prepared.graph.nodes:
            if node.op == "call_module":
                places.setdefault(prepared.get_submodule(node.target), []).append(node)
        keys = {observer: _observed(observer, nodes) for observer, nodes in places.items()}
        for observer, nodes in places.items():
            _put(self._observers.get(keys[observer], observer), nodes)
        if all(key in self._observers for key in keys.values()):
            return
        for case in progress.each("torch_blocked: calibrating", self.cases):
            prepared(*case)
        for observer, nodes in places.items():
            if keys[observer] not in self._observers:
                self._observers[keys[observer]] = _with_its_range(observer)
                _put(self._observers[keys[observer]], nodes)


def _observed(observer: Any, nodes: Sequence[fx.Node]) -> Hashable:
    """Equal for observers that see the same values in the same order."""
    values = []
    for node in nodes:
        while node.op == "call_module":
            node = cast(fx.Node, node.args[0])
        values.append(node.name)
    return type(observer), getattr(observer, "ch_axis", None), *values


def _put(observer: nn.Module, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        setattr(node.graph.owning_module, str(node.target), observer)


def _with_its_range(observer: nn.Module) -> nn.Module:
    """An observer that gives the same scale and zero point, without another search."""
    if not isinstance(observer, HistogramObserver):
        return observer
    scale, zero = observer.calculate_qparams()
    return cast(
        nn.Module,
        FixedQParamsObserver(
            float(scale),
            int(zero),
            observer.dtype,
            observer.qscheme,
            observer.quant_min,
            observer.quant_max,
        ),
    )
