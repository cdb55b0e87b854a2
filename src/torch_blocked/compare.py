"""`torch_blocked.compare`: how far the steps of a plan are from the model in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_blocked.arguments import check_model, checked_example, name_of
from torch_blocked.calls import Call, dense
from torch_blocked.capture import capture
from torch_blocked.captured import Capture, CaptureError
from torch_blocked.compile import OptimizedParts
from torch_blocked.exact import interpreted
from torch_blocked.optimize import _is_exported
from torch_blocked.optimized_module import OptimizedModule, _Form, _Instead, first_line
from torch_blocked.same_values import BYTES, numbers_of, orders, quantizers, same_values
from torch_blocked.state import check_devices, unchanged
from torch_blocked.text_table import columns

_SHOWN = 30  # rows in the table
_INSTEAD = {
    "dense": "the model's own ops run, which have no plan; tune=False of optimize() keeps the plan",
    "model": "verify=False of optimize() keeps a plan whose results differ",
}
_ABOUT_INF = (
    "inf: infinite or NaN where the exact values are finite, or not 0 where these are all 0"
)


@dataclass(frozen=True)
class LayerError:
    """A value that a plan makes, beside the same value of the model in float64."""

    module: str  # the path of the module that calls the first op of the step
    op: str  # "conv2d + relu"
    dtype: str  # what the step computes in: "float32", "bfloat16" or "int8"
    error: float  # |result - exact| / |exact| in the Euclidean norm
    added: float  # how much larger that is than the largest error of what the step reads
    worst: float  # the largest difference, relative to the largest exact value
    least: float  # the range of the exact values
    most: float
    step: int  # its index in fast.steps()


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. Its text is a table of the first rows."""

    rows: list[LayerError]  # sorted by `added`, then by `error`, largest first
    error: float  # of the results, the largest if there are several; measured as in rows

    def __str__(self) -> str:
        shown = self.rows[:_SHOWN]
        cells = [
            (
                each.module or "(model)",
                each.op,
                each.dtype,
                *(f"{number:.1e}" for number in (each.error, each.added, each.worst)),
                *(f"{number:.3g}" for number in (each.least, each.most)),
                str(each.step),
            )
            for each in shown
        ]
        header = ("module", "op", "dtype", "error", "added", "worst", "least", "most", "step")
        lines = [f"error of the results: {self.error:.1e}", columns(header, cells, "lllrrrrrr")]
        if more := len(self.rows) - len(shown):
            lines.append(f"{more} more steps add no more")
        if math.inf in (self.error, *(each.error for each in shown)):
            lines.append(_ABOUT_INF)
        return "\n".join(lines)


def compare(
    fast: nn.Module,
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...],
    *,
    example_kwargs: dict[str, Any] | None = None,
) -> Comparison:
    """Compares the values that a plan makes in float32, bfloat16 or int8 with those of the model in
    float64, layer by layer, the worst first. It tells which layer to keep in float32.

    Values that lie only in registers, between fused ops, are not compared. Neither are values that
    only a quantized model has. The model's ops run once in float64; the model is not changed.

    fast: what optimize() has returned for `model`, or for what quantize() has made of it.
    model: the model, in evaluation mode.
    example_inputs, example_kwargs: as for optimize(), of any sizes.
    Raises TypeError for another kind of fast, model or inputs. Raises ValueError if fast runs in
    parts or its choice is not "blocked", after release(), and if weights have changed. Raises
    NotImplementedError for a model that draws random numbers or has an op that does not run in
    float64, and whatever the model raises for the inputs."""
    if isinstance(fast, OptimizedParts):
        _refuse_parts(fast._reason)
    if not isinstance(fast, OptimizedModule):
        raise TypeError(
            f"torch_blocked::compare: expected fast from optimize(), got {name_of(fast)}; give "
            "compare(optimize(model, x), model, x)"
        )
    check_model("compare", model)
    if isinstance(model, OptimizedModule | OptimizedParts):
        raise TypeError(
            "torch_blocked::compare: expected the model that was optimized, got one that "
            "optimize() has returned; give compare(optimize(model, x), model, x)"
        )
    args, kwargs = checked_example("compare", model, example_inputs, example_kwargs)
    _check_is_kept(fast)
    if fast._runs() != "blocked":
        raise ValueError(
            "torch_blocked::compare: expected a module that runs its plan, got one whose choice is "
            f"'{fast.choice}' ({fast.reason}); {_INSTEAD[fast.choice]}"
        )
    form, call = fast._form_for(args, kwargs)
    if isinstance(form, _Instead):
        _refuse_call(fast._model, call, form.reason)
    reference = form.captured if model is fast._model else _captured(model, call)
    return compared(fast, form, call, reference)


def _check_is_kept(fast: OptimizedModule) -> None:
    if fast._released:
        raise ValueError(
            "torch_blocked::compare: expected a module with its dense weights, got one after "
            "release(); compare before"
        )


def _refuse_parts(reason: str) -> NoReturn:
    raise ValueError(
        f"torch_blocked::compare: expected a model that is captured whole, got one that runs in "
        f"parts ({reason}); compare the modules in it"
    )


def _refuse_call(model: nn.Module, call: Call, reason: str) -> NoReturn:
    """Raises the model's own error, or says that it takes the inputs only in parts."""
    with unchanged(model), torch.no_grad():
        model(*call.args, **call.kwargs)
    _refuse_parts(reason)


def _captured(model: nn.Module, call: Call) -> Capture:
    if model.training and not _is_exported(model):
        raise ValueError(
            "torch_blocked::compare: expected a model in evaluation mode, got training mode; call "
            "eval()"
        )
    check_devices("compare", model)
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        try:
            return capture(model, call.args, call.kwargs)
        except CaptureError as error:
            _refuse_call(model, call, first_line(error))


def compared(fast: OptimizedModule, form: _Form, call: Call, reference: Capture) -> Comparison:
    """The plan of a form beside the ops of `reference` in float64. Raises as compare() does."""
    _check_is_kept(fast)
    fast._check_weights()
    if form.captured.is_random() or reference.is_random():
        raise NotImplementedError(
            "torch_blocked::compare: expected a model that gives the same results again, got one "
            "that draws random numbers; compare the modules in it"
        )
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        steps = form.compiled.report(call.inputs)
        made, results = form.compiled.results(call.inputs), form.compiled(call.inputs)
        scales, same = quantizers(form.captured), same_values(form.captured, reference)
        waiting: dict[int, list[int]] = {}
        for i, (_, value, _, tensor) in enumerate(made):
            if value in same and (tensor.is_floating_point() or value in scales):
                waiting.setdefault(same[value], []).append(i)
        found: dict[int, tuple[float, float, float, float]] = {}

        def seen(value: int, exact: Any) -> None:
            for i in waiting.get(value, ()) if _is_real(exact) else ():
                numbers = numbers_of(made[i][3], scales.get(made[i][1]))
                if apart := [_apart(numbers, each) for each in orders(exact, numbers)]:
                    found[i] = (*min(apart), *_range(exact))

        inputs = [each for each in dense(call.leaves) if isinstance(each, Tensor)]
        try:
            exact = interpreted(reference, inputs, seen)
        except Exception as raised:
            raise NotImplementedError(
                "torch_blocked::compare: expected a model whose ops run in float64, got one with "
                f"an op that does not ({first_line(raised)}); compare the modules in it"
            ) from raised
        pairs = zip(results, (each for each in exact if isinstance(each, Tensor)), strict=True)
        of_results = [_apart(*pair)[0] for pair in pairs if _is_real(pair[1])]
    modules = {value: node.module for node in reference.nodes for value in node.outputs}
    rows, errors, in_bytes = list[LayerError](), dict[int, float](), set[int]()
    for i, (at, value, reads, tensor) in enumerate(made):
        before = max((errors.get(each, 0.0) for each in reads), default=0.0)
        if tensor.dtype in BYTES and value in scales:
            in_bytes.add(value)
        if i not in found:  # it passes on what it reads, such as a conversion
            errors[value] = before
            continue
        error, worst, least, most = found[i]
        errors[value] = error
        added = max(0.0, error - before) if before < math.inf else 0.0
        module = steps[at].module or modules.get(same[value], "")  # a quantization has none
        op = steps[at].op.replace("aten::", "").replace("quantized_decomposed::", "")
        is_int8 = not in_bytes.isdisjoint((value, *reads))
        dtype = "int8" if is_int8 else str(tensor.dtype).removeprefix("torch.")
        rows.append(LayerError(module, op, dtype, error, added, worst, least, most, at))
    rows.sort(key=lambda each: (-each.added, -each.error))
    return Comparison(rows, max(of_results, default=0.0))


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _apart(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """The relative error in the Euclidean norm, and in the largest value. Where the exact value is
    infinite or NaN, any result is right."""
    finite = exact.isfinite()
    apart = (result.double() - exact).where(finite, 0.0)
    exact = exact.where(finite, 0.0)
    largest = exact.abs().max()
    if not apart.isfinite().all() or (largest == 0 and apart.any()):
        return math.inf, math.inf
    if largest == 0:
        return 0.0, 0.0
    apart, exact = apart / largest, exact / largest  # squares stay finite
    return float(apart.norm() / exact.norm()), float(apart.abs().max())


def _range(exact: Tensor) -> tuple[float, float]:
    numbers = exact[~exact.isnan()]
    return (float(numbers.min()), float(numbers.max())) if numbers.numel() else (math.nan, math.nan)
