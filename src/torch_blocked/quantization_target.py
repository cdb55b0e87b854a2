"""The search for the layers that stay in floating point, so that a quantized model is accurate
enough: those that harm the results most for the work that they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_blocked import module_paths, progress
from torch_blocked.calibration import Calibration
from torch_blocked.layer_effects import multiply_adds, squared_effects
from torch_blocked.quantization_accuracy import QuantizationTry, results_error, tensors
from torch_blocked.recurrent_layers import result_of
from torch_blocked.weight_rounding import weight_bytes

_Group = tuple[str, list[str]]  # the path of a module, and the names of its layers


class TargetSearch:
    """convert: gives the graph in which layers of these names stay in floating point. finish: makes
    it what quantize() returns, and gives all paths that it keeps. cases: to compare results on."""

    def __init__(
        self,
        calibrated: Calibration,
        convert: Callable[[Collection[str]], fx.GraphModule],
        finish: Callable[[fx.GraphModule, Sequence[str]], tuple[str, ...]],
        target: float | Callable[[fx.GraphModule], bool],
        cases: Sequence[tuple[Any, ...]],
    ) -> None:
        self.in_float, self.convert, self.finish = calibrated.in_float, convert, finish
        self.target, self.cases = target, cases
        self.tries: list[QuantizationTry] = []
        layers = [node.name for node in self.in_float.graph.nodes if calibrated.is_layer(node)]
        self.work = multiply_adds(self.in_float, cases[0], layers)
        with torch.no_grad():
            self.expected = [tensors(self.in_float(*case)) for case in cases]
        if not callable(target) and not any(self.expected):
            raise ValueError(
                "torch_blocked::quantize: expected results in floating point for a target that is "
                f"a number, got none with {target}; give a function that judges a quantized graph"
            )

    def found(self) -> fx.GraphModule:
        """Halves the number of layers in question with each try. The result is of a try that
        holds."""
        with progress.Bar("torch_blocked: choosing layers to keep") as bar:
            graph = self._tried([], bar)
            if self.tries[-1].holds:
                return graph
            groups = self._by_harm(graph)
            bar.total = 2 + len(groups).bit_length()
            best, fewest, most = None, 0, len(groups)
            while most - fewest > 1:
                middle = (fewest + most) // 2
                graph = self._tried(groups[:middle], bar)
                if self.tries[-1].holds:
                    best, most = graph, middle
                else:
                    fewest = middle
            if best is None:
                best = self._tried(groups, bar)
                self._check_last()
            return best

    def _check_last(self) -> None:
        last = self.tries[-1]
        if not last.holds:
            target = getattr(self.target, "__name__", self.target)
            raise ValueError(
                "torch_blocked::quantize: expected a target that holds with all layers in floating "
                f"point, got {target}; the relative error of results is {last.error:.1e} there, so "
                "ask for less accuracy"
            )

    def _tried(self, kept: Sequence[_Group], bar: progress.Bar) -> fx.GraphModule:
        begin = time.perf_counter()
        graph = self.convert({name for _, names in kept for name in names})
        with torch.no_grad():
            error = results_error(self.expected, graph, self.cases)
        on_bytes = sum(self.work[layer.name] for layer in self._on_bytes(graph))
        share = on_bytes / max(sum(self.work.values()), 1)
        paths = self.finish(graph, [path for path, _ in kept])
        holds = _answer(self.target(graph)) if callable(self.target) else error <= self.target
        self.tries.append(QuantizationTry(paths, error, share, holds, time.perf_counter() - begin))
        bar.update()
        return graph

    def _on_bytes(self, graph: fx.GraphModule) -> list[fx.Node]:
        return [each for each in graph.graph.nodes if each.name in self.work and weight_bytes(each)]

    def _by_harm(self, graph: fx.GraphModule) -> list[_Group]:
        """The modules whose layers are on bytes, the most harmful for their work first. The work of
        an average layer is added to that of each, because a layer of little work costs, too: its
        neighbours pass no bytes to it."""
        layers = self._on_bytes(graph)
        results = {each.name: result_of(each).name for each in layers}
        harm = squared_effects(self.in_float, graph, self.cases, results.values())
        groups: dict[str, list[str]] = {}
        for layer in layers:
            path = module_paths.of_module(layer.meta.get("nn_module_stack"))
            groups.setdefault(path, []).append(layer.name)
        average = max(sum(self.work.values()) / max(len(self.work), 1), 1.0)

        def ratio(group: _Group) -> float:
            found = sum(harm[results[name]] for name in group[1])
            work = sum(map(self.work.__getitem__, group[1]))
            return found / (work + average) if math.isfinite(found) else math.inf

        return sorted(groups.items(), key=ratio, reverse=True)


def _answer(holds: Any) -> bool:
    """What the user's function says. Raises TypeError for the measure itself, say."""
    is_flag = type(holds).__name__ in ("bool", "bool_")  # also numpy's
    if not is_flag and not (isinstance(holds, Tensor) and holds.dtype == torch.bool):
        raise TypeError(
            "torch_blocked::quantize: expected target to return True or False, got "
            f"{type(holds).__name__}; compare what it measures with what you need"
        )
    return bool(holds)
