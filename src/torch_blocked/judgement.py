"""Judges whether an optimized model and the model agree up to rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_blocked import structure
from torch_blocked.calls import Call, dense
from torch_blocked.captured import Capture
from torch_blocked.exact import in_float64, types_named
from torch_blocked.optimized_module import OptimizedModule
from torch_blocked.tensor import BlockedTensor
from torch_blocked.verify import (
    ALIKE,
    LEAST_IN_BFLOAT16,
    NUDGE,
    NUDGE_IN_STEPS,
    TOLERANCE,
    Judgement,
    difference,
    judged,
    least_of,
    nudged,
    tolerance_of,
)


def judgement_of(optimized: OptimizedModule, call: Call, expected: Any, result: Any) -> Judgement:
    """Judges an optimized model's `result` of a call; the model returned `expected`.

    float32 results are compared directly first. If they differ by more than rounding explains, and
    for types of few digits, both are compared with the same ops in float64, and with these ops
    after random rounding."""
    captured = optimized._forms[0].captured
    if what := difference(expected, result, float("inf")):  # another type or size, say
        return Judgement(what, TOLERANCE, 0.0, False)
    if optimized.in_bfloat16():
        return _judgement_in_bfloat16(optimized, call, expected, result)
    tolerance = partial(tolerance_of, in_steps=captured.rounds())
    what = difference(expected, result, tolerance)
    if not what:
        return Judgement("", TOLERANCE, 0.0, False)
    least = partial(least_of, in_steps=captured.rounds())
    results, own = structure.flatten(result)[0], structure.flatten(expected)[0]
    inputs = [each for each in dense(call.leaves) if isinstance(each, Tensor)]
    by_ops = _by_ops(optimized, call)

    def verdict(exact: Any, others: list[Any]) -> Judgement:
        """Judges the model's own results first. If these differ, the reason is not rounding but a
        capture that does not do what the model does."""
        of_model = judged(exact, others, own, least)
        return of_model if of_model.what else judged(exact, others, results, least)

    exact = _exactly(captured, inputs)
    if exact is None:  # an op does not compute in float64
        return verdict(by_ops, [by_ops, _by_nudge(optimized, call)])
    found = verdict(exact, [by_ops])
    if not found.what and not found.is_noise:
        return found
    step = _step(captured, own)
    rounded = _exactly(captured, inputs, step=step, shift=step < _COARSE)
    found = verdict(exact, [by_ops] if rounded is None else [by_ops, rounded])
    if found.is_noise and not difference(expected, result, ALIKE):
        return Judgement("", found.tolerance, found.moved, True)
    return found


def _judgement_in_bfloat16(
    optimized: OptimizedModule, call: Call, expected: Any, result: Any
) -> Judgement:
    """The model is in float32, and the result was computed in bfloat16: how far that may be off
    shows in float64 with all results of ops moved as far as bfloat16 rounds."""

    def least(_: torch.dtype) -> float:
        return LEAST_IN_BFLOAT16

    if not difference(expected, result, least):
        return Judgement("", LEAST_IN_BFLOAT16, 0.0, False)
    captured = optimized._forms[0].captured
    results, own = structure.flatten(result)[0], structure.flatten(expected)[0]
    inputs = [each for each in dense(call.leaves) if isinstance(each, Tensor)]
    step = torch.finfo(torch.bfloat16).eps / 2
    rounded = _exactly(captured, inputs, step=step)  # each number rounds on its own: no shift
    if rounded is None:
        rounded = _by_nudge(optimized, call, step)
    found = judged(own, [rounded], results, least)
    # bfloat16 moves results of an EfficientNet-Lite0 on small images by a fifth, and that is what
    # was asked for. Noise counts as wrong only from half of the largest value on.
    bound = LEAST_IN_BFLOAT16 + 2 * found.moved
    if (
        found.is_noise
        and found.moved <= ALIKE
        and not difference(expected, result, lambda _: bound)
    ):
        return Judgement("", bound, found.moved, True)
    return found


def _exactly(captured: Capture, inputs: list[Tensor], **rounding: Any) -> list[Any] | None:
    results = in_float64(captured, inputs, **rounding)
    if results is None:
        return None
    for place, channels in captured.blocked.items():
        results[place] = BlockedTensor(results[place].float(), channels).to_dense().double()
    return results


def _by_ops(optimized: OptimizedModule, call: Call) -> list[Any]:
    """The results of the captured ops in ATen."""
    form = optimized._forms[0]
    results = optimized._results(form.captured, form.compiled.by_ops(call.inputs))
    return structure.flatten(results)[0]


def _by_nudge(optimized: OptimizedModule, call: Call, least: float = 0.0) -> list[Any]:
    """The same on inputs that are changed as little as rounding could change them, but by `least`
    at least."""
    captured, leaves = optimized._forms[0].captured, structure.flatten((call.args, call.kwargs))[0]
    nudge = max(NUDGE_IN_STEPS if captured.rounds() else NUDGE, _step(captured, leaves), least)
    return _by_ops(optimized, optimized._call(*nudged((call.args, call.kwargs), nudge)))


def _types(captured: Capture, results: list[Any]) -> set[torch.dtype]:
    """The types of the floating-point numbers that the capture computes with."""
    tensors = [
        each for each in (*captured.constants.values(), *results) if isinstance(each, Tensor)
    ]
    types = {each.dtype for each in tensors} | {dtype for _, dtype in captured.input_metas}
    types |= {dtype for node in captured.nodes for dtype in types_named(node)}
    return {each for each in types if each.is_floating_point}


def _step(captured: Capture, results: list[Any]) -> float:
    """The largest relative change by one rounding in the coarsest type."""
    return max(
        (torch.finfo(each).eps / 2 for each in _types(captured, results)), default=_COARSE / 1e3
    )


# From this step on, all numbers of a result may be off by the same amount, which rounding of single
# numbers would not show.
_COARSE = 1e-4
