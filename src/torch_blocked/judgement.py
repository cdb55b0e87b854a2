"""Whether an optimized model computes what the model does, but for rounding."""

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
    """Of what it made of a call, beside what the model returned for that.

    What differs by more than rounding does at sight, and all results of few digits, are compared
    with the same ops in float64, and with what rounding makes of these."""
    captured = optimized._forms[0].captured
    if what := difference(expected, result, float("inf")):  # another type, say
        return Judgement(what, TOLERANCE, 0.0, False)
    if optimized._dtype is not None:
        run = optimized._forms[0].compiled
        by_ops = optimized._results(captured, run.by_ops(call.inputs))
        return judged(expected, [by_ops], result, lambda _: LEAST_IN_BFLOAT16)
    tolerance = partial(tolerance_of, in_steps=captured.rounds())
    what = difference(expected, result, tolerance)
    if not what:
        return Judgement("", TOLERANCE, 0.0, False)
    least = partial(least_of, in_steps=captured.rounds())
    results, own = structure.flatten(result)[0], structure.flatten(expected)[0]
    inputs = [each for each in dense(call.leaves) if isinstance(each, Tensor)]
    exact = _exactly(captured, inputs)
    if exact is None:  # an op does not compute in float64
        exact, others = own, _by_nudges(optimized, call)
    else:
        found = judged(exact, [own], results, least)
        if not found.what and not found.is_noise:
            return found
        step = _step(captured, own)
        rounded = _exactly(captured, inputs, step=step, shift=step < _COARSE)
        others = [own] if rounded is None else [own, rounded]
    return judged(exact, others, results, least)


def _exactly(captured: Capture, inputs: list[Tensor], **rounding: Any) -> list[Any] | None:
    results = in_float64(captured, inputs, **rounding)
    if results is None:
        return None
    for place, channels in captured.blocked.items():
        results[place] = BlockedTensor(results[place].float(), channels).to_dense().double()
    return results


def _by_nudges(optimized: OptimizedModule, call: Call) -> list[list[Any]]:
    """The model's ops on these inputs, and on others that rounding could have made of them."""
    form, leaves = optimized._forms[0], structure.flatten((call.args, call.kwargs))[0]
    nudge = max(NUDGE_IN_STEPS if form.captured.rounds() else NUDGE, _step(form.captured, leaves))
    calls = call, optimized._call(*nudged((call.args, call.kwargs), nudge))
    runs = [form.compiled.by_ops(each.inputs) for each in calls]
    return [structure.flatten(optimized._results(form.captured, each))[0] for each in runs]


def _types(captured: Capture, results: list[Any]) -> set[torch.dtype]:
    """Those of the floating-point numbers that it computes with."""
    tensors = [
        each for each in (*captured.constants.values(), *results) if isinstance(each, Tensor)
    ]
    types = {each.dtype for each in tensors} | {dtype for _, dtype in captured.input_metas}
    types |= {dtype for node in captured.nodes for dtype in types_named(node)}
    return {each for each in types if each.is_floating_point}


def _step(captured: Capture, results: list[Any]) -> float:
    """How far one rounding moves a number of the coarsest type, relative to it."""
    return max(
        (torch.finfo(each).eps / 2 for each in _types(captured, results)), default=_COARSE / 1e3
    )


# A step from which on the results' few digits hide what else rounding does: that all numbers of a
# result are off by the same.
_COARSE = 1e-4
