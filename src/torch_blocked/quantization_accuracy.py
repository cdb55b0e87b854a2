"""The accuracy that a model loses by quantization: in all, and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_blocked import module_paths, progress
from torch_blocked.recurrent_layers import result_of
from torch_blocked.text_table import columns

_SHOWN = 10  # layers in the table
_NAMED = 3  # paths in a row of the table of tries


@dataclass(frozen=True)
class LayerLoss:
    """Relative errors of a layer's result, |bytes - float32| / |float32| in the Euclidean norm."""

    path: str  # of its module, or of the module around an op that has none of its own
    op: str  # "conv2d"
    own: float  # with inputs that are the float model's values, rounded to bytes
    in_all: float  # with all layers before it on bytes too


@dataclass(frozen=True)
class QuantizationTry:
    """What quantize() has tried for a target: the accuracy with these layers in floating point."""

    kept: tuple[str, ...]  # paths of their modules
    error: float  # relative error of the results
    on_bytes: float  # share of all layers' multiply-adds
    holds: bool  # whether the target holds
    seconds: float

    def row(self, fewer: tuple[str, ...]) -> tuple[str, ...]:
        """fewer: what the row above keeps."""
        more = [each or "(the model)" for each in self.kept if each not in fewer]
        rest = f" and {len(more) - _NAMED} more" if len(more) > _NAMED else ""
        return (
            str(len(self.kept)),
            f"{self.error:.3g}",
            f"{self.on_bytes:.1%}",
            "yes" if self.holds else "no",
            f"{self.seconds:.1f}",
            ", ".join(more[:_NAMED]) + rest,
        )


@dataclass(frozen=True)
class QuantizationAccuracy:
    """A quantized model beside its float model, on `cases` inputs. Its text is a table."""

    cases: int
    error: float  # relative error of the results, measured as for layers
    agreement: float | None  # share of rows with the same largest entry; None if there are no rows
    layers: list[LayerLoss]  # sorted by `own`, largest first
    tries: tuple[QuantizationTry, ...] = ()  # for a target, sorted by the number of layers kept

    def __str__(self) -> str:
        percent = "" if self.agreement is None else f", first class equal: {self.agreement:.1%}"
        rows = [
            (each.path or "(the model)", each.op, f"{each.own:.4f}", f"{each.in_all:.4f}")
            for each in self.layers[:_SHOWN]
        ]
        table = columns(("layer", "op", "own error", "in all"), rows, "llrr")
        more = len(self.layers) - len(rows)
        rest = f"\n{more} layers lose less" if more else ""
        head = f"relative error of results: {self.error:.4f}{percent} ({self.cases} inputs)"
        return f"{head}\n{table}{rest}{self._tries()}"

    def _tries(self) -> str:
        header = ("kept", "error", "on bytes", "holds", "seconds", "in floating point, too")
        above = [(), *(each.kept for each in self.tries)]
        rows = [each.row(fewer) for each, fewer in zip(self.tries, above, strict=False)]
        return f"\n\n{columns(header, rows, 'rrrlrl')}" if rows else ""


class Recorded(fx.Interpreter):
    """A graph that keeps copies of these nodes' results, which in-place ops may overwrite."""

    def __init__(self, module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names = names
        self.made: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.names and isinstance(result, Tensor):
            self.made[n.name] = result.clone()
        return result


class OnInputsOf(Recorded):
    """A graph whose nodes read the results of nodes with the same names in another graph."""

    def __init__(self, module: fx.GraphModule, names: set[str], others: dict[str, Tensor]) -> None:
        super().__init__(module, names)
        self.others = others

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return self.others[n.name].clone() if n.name in self.others else result


class _Sums:
    """Relative errors over several inputs: sums of squares of differences and of numbers."""

    def __init__(self) -> None:
        self.apart, self.all = 0.0, 0.0

    def add(self, result: Tensor, expected: Tensor) -> None:
        self.apart += float((result - expected).double().square().sum())
        self.all += float(expected.double().square().sum())

    def error(self) -> float:
        return (self.apart / self.all) ** 0.5 if self.all else 0.0


def results_error(
    expected: Sequence[Sequence[Tensor]],
    quantized: fx.GraphModule,
    cases: Sequence[tuple[Any, ...]],
) -> float:
    """expected: the float graph's results for each case."""
    sums = _Sums()
    for case, results in zip(cases, expected, strict=True):
        for each, other in zip(tensors(quantized(*case)), results, strict=True):
            sums.add(each, other)
    return sums.error()


def compare(
    in_float: fx.GraphModule,
    quantized: fx.GraphModule,
    cases: Sequence[tuple[Any, ...]],
    is_layer: Callable[[fx.Node], bool],
) -> QuantizationAccuracy:
    """in_float: the float graph, whose nodes have the same names as in the quantized one."""
    every = {node.name for node in in_float.graph.nodes if node.op == "call_function"}
    layers = [node for node in quantized.graph.nodes if is_layer(node) and node.name in every]
    results = {node.name: result_of(node).name for node in layers}
    names = set(results.values())
    own, in_all = ({name: _Sums() for name in names} for _ in range(2))
    outputs, firsts = _Sums(), list[Tensor]()
    with torch.no_grad(), progress.Bar("torch_blocked: comparing", len(cases)) as bar:
        for case in cases:
            float_run = Recorded(in_float, every)
            expected = tensors(float_run.run(*case))
            byte_run = Recorded(quantized, names)
            result = tensors(byte_run.run(*case))
            alone = OnInputsOf(quantized, names, float_run.made)
            alone.run(*case)
            for name in names:
                own[name].add(alone.made[name], float_run.made[name])
                in_all[name].add(byte_run.made[name], float_run.made[name])
            for each, other in zip(result, expected, strict=True):
                outputs.add(each, other)
                if other.dim() == 2 and other.shape[1] > 1:
                    firsts.append(each.argmax(1) == other.argmax(1))
            bar.update()
    losses = [
        LayerLoss(
            module_paths.of_node(node.meta.get("nn_module_stack")),
            str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2],
            own[results[node.name]].error(),
            in_all[results[node.name]].error(),
        )
        for node in layers
    ]
    return QuantizationAccuracy(
        len(cases),
        outputs.error(),
        float(torch.cat(firsts).double().mean()) if firsts else None,
        sorted(losses, key=lambda each: -each.own),
    )


def tensors(results: Any) -> list[Tensor]:
    """Those of floating point among the results of a model."""
    leaves = torch.utils._pytree.tree_leaves(results)
    return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]
