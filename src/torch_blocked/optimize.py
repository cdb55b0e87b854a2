"""`torch_blocked.optimize`: a trained model as one C++ call.

The model is captured (capture.py) and handed to csrc/graph, which folds, fuses, chooses formats and
kernels by measurement, plans memory and runs it (optimized_module.py). The result is compared with
the model (verify.py), and timed against it.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_blocked import _C
from torch_blocked.arguments import check_flag, check_model, check_no_autocast, checked_example
from torch_blocked.calls import dense, named, run_if_lazy
from torch_blocked.captured import CaptureError, Ran
from torch_blocked.compile import OptimizedParts
from torch_blocked.judgement import judgement_of
from torch_blocked.optimized_module import (
    OptimizedModule,
    Tune,
    check_dtype,
    check_tune,
)
from torch_blocked.refusals import whose_defect
from torch_blocked.state import unchanged
from torch_blocked.verify import others_like


def optimize(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] = (),
    *,
    example_kwargs: dict[str, Any] | None = None,
    dynamic: bool = True,
    tune: Tune = True,
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> nn.Module:
    """A module that computes what `model` does, faster.

    example_inputs: a tensor or a tuple of the model's positional arguments; example_kwargs: those
    by name. Tensors may be dense or blocked; for what is no tensor, each value has a capture.
    dynamic: sizes may change from call to call without another capture, where the model does not
    ask for them.
    tune: time the kernels that may be the fastest of each layer, and the result against the model,
    whose ops run on if they are faster; "full": time all that fit, in each format, which takes up
    to four times as long and seldom makes a model faster (benchmarks/tuning.py); False: take
    kernels by estimates.
    dtype: torch.bfloat16 computes in it; results are float32 still.
    verify: compare the results with the model's on the example and at other sizes. Where they
    differ, the model itself runs on, and a warning says which step differs first.
    Lazy modules (nn.LazyConv2d) get their weights by a run of the model on the example.
    A model that cannot be captured as one graph runs in parts (compile.py); its plan() says why.
    Raises ValueError if the model is in training mode, TypeError for what is no module and for
    other example inputs, NotImplementedError for a dtype that the CPU lacks, RuntimeError within
    torch.autocast, and what the model raises for the example."""
    check_model("optimize", model)
    if getattr(model, "training", False) and not _is_exported(model):  # a frozen script has none
        raise ValueError(
            "torch_blocked::optimize: expected a model in evaluation mode, got training mode; "
            "call eval()"
        )
    check_dtype(dtype)
    check_tune(tune)
    check_flag("optimize", "dynamic", dynamic)
    check_flag("optimize", "verify", verify)
    check_no_autocast("optimize")
    args, kwargs = checked_example("optimize", model, example_inputs, example_kwargs)
    run_if_lazy(model, args, kwargs)
    _warn_of_hooks(model)
    with torch.random.fork_rng(devices=[]):
        optimized = _optimized(model, args, kwargs, dynamic, tune, dtype, verify)
    _C.return_idle_memory()
    return optimized


def _optimized(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic: bool,
    tune: Tune,
    dtype: torch.dtype | None,
    verify: bool,
) -> nn.Module:
    parts = functools.partial(OptimizedParts, tune=tune, dtype=dtype)
    optimized = OptimizedModule(model, parts, dynamic=dynamic, tune=tune, dtype=dtype)
    try:
        optimized._prepare(args, kwargs)
    except CaptureError as error:
        in_parts = parts(model, str(error))
        in_parts.settle(*args, **kwargs)  # what the model itself refuses, it says best
        return in_parts
    try:
        if optimized.choice == "blocked":
            _check(optimized, args, kwargs, tune, verify)
    except Warning:  # where the program makes errors of them
        raise
    except Exception as error:
        optimized._give_up(error)
    return optimized


def _check(
    optimized: OptimizedModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tune: Tune,
    verify: bool,
) -> None:
    """Compares with the model and times against it, unless that was done before."""
    keys = optimized.keys()
    if optimized.was_compared(keys):
        optimized._ran = None
        return
    warm = _verify(optimized) if verify else None
    optimized._ran = None
    run_own = functools.partial(_seconds, optimized, args, kwargs)
    times = tune and not torch.are_deterministic_algorithms_enabled()
    if optimized.choice == "blocked" and times and not (warm and warm.is_clear(run_own)):
        if _is_slower(optimized, optimized._model, args, kwargs, warm=warm):
            optimized._choose("dense", "faster")
    if verify and optimized.choice == "blocked":
        optimized.note_compared(keys)


# Two rounds in which one takes so many times as long as the other tell as much as seven.
_CLEARLY = 1.5
# And so does one round of this: two runs of a slow model are a tenth of what optimize takes.
_BEYOND_NOISE = 2.0
# Or the first run of each: that of the model takes up to twice the time, ours up to 1.5 times (with
# plans of small steps, four times). Or the model's first and another of ours.
_BEYOND_FIRST_RUNS, _BEYOND_FIRST_RUN = 3.0, 2.3


@dataclass
class _Warm:
    """Seconds that the optimized model and the model took when they were compared."""

    own: float
    model: float
    is_first_run: bool  # of the model; its ops, watched by the recorder

    def is_clear(self, run_own: Callable[[], float]) -> bool:
        """Whether these tell that ours is faster; run_own: runs it once more, for its seconds."""
        if not self.is_first_run:
            return False
        if self.model > _BEYOND_FIRST_RUNS * self.own:
            return True
        return self.model > _BEYOND_FIRST_RUN * run_own()


def _is_exported(model: nn.Module) -> bool:
    """Whether torch.export made it: its training flag means nothing, and eval() raises."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


def _warn_of_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not _is_known(hook) for hook in hooks):
            warnings.warn(
                f"torch_blocked::optimize: the forward hooks of {name or 'the model'} run in the "
                "capture; their ops are part of the optimized model, what else they do is not",
                stacklevel=3,
            )
            return


def _is_known(hook: object) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return bool(module.startswith(("torch.", "torch_blocked.")))


def _verify(optimized: OptimizedModule) -> _Warm | None:
    """Compares with the model on the example and, if the model takes these, at other sizes.

    Returns what the plan and the model took for the example."""
    form, example, ran = optimized._forms[0], optimized._example, optimized._ran
    if form.captured.is_random():
        return None
    recorded = ran is not None
    ran = ran or _run(optimized, example)
    warm = None
    if ran:
        warm = _Warm(_compare(optimized, example, form.compiled, ran), ran.seconds, recorded)
    for case in others_like(example) if optimized.choice == "blocked" else ():
        if not form.compiled.covers(optimized._call(*case).inputs):
            continue  # captured when it comes
        if ran := _run(optimized, case):
            _compare(optimized, case, form.compiled.by_estimates, ran)
            break
    return warm


def _run(optimized: OptimizedModule, case: tuple[tuple[Any, ...], dict[str, Any]]) -> Ran | None:
    """What the model returns for these arguments, and the time; None if it raises an error."""
    model = optimized._model
    args, kwargs = dense(case)
    keep = (
        unchanged(model)
        if optimized._forms[0].captured.sets_attributes
        else contextlib.nullcontext()
    )
    start = time.perf_counter()
    try:
        with torch.no_grad(), keep:
            results = model(*args, **kwargs)
    except Exception:
        return None
    return Ran(results, time.perf_counter() - start)


def _compare(
    optimized: OptimizedModule,
    case: tuple[tuple[Any, ...], dict[str, Any]],
    run: Callable[[_C.Inputs], list[Tensor]],
    ran: Ran,
) -> float:
    """Compares `run` with what the model returned for one case; where they differ, the model runs
    from now on. Returns the seconds that `run` took."""
    form = optimized._forms[0]
    call = optimized._call(*case)
    start = time.perf_counter()
    result = optimized._results(form.captured, run(call.inputs))
    seconds = time.perf_counter() - start
    judgement = judgement_of(optimized, call, ran.results, result)
    if judgement.what and judgement.is_noise:
        optimized._choose("model", f"rounding decides its results: {judgement.what}")
        warnings.warn(
            "torch_blocked::optimize: the results of the optimized model cannot be compared with "
            f"the model's for {named(call.inputs.metas, call.signature)}: rounding may move the "
            f"model's own by {judgement.moved:.0%}. The model itself runs on; verify=False takes "
            "the optimized one",
            stacklevel=5,
        )
    elif judgement.what:
        step = form.compiled.first_difference(call.inputs, judgement.tolerance)
        optimized._choose("model", f"results differed: {judgement.what}")
        warnings.warn(
            f"torch_blocked::optimize: the optimized model differed from the model for "
            f"{named(call.inputs.metas, call.signature)}: {judgement.what}; first at "
            f"{step or 'the capture'}. The model itself runs on. {whose_defect(step)}",
            stacklevel=5,
        )
    return seconds


def _is_slower(
    model: nn.Module,
    rival: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    warm: _Warm | None = None,
) -> bool:
    """Whether the rival wins most of seven rounds, or of fewer where it is clear. They run in turn,
    so that noise meets both. warm: what both took for the same just now."""
    is_round = warm is not None and not warm.is_first_run
    own, others = ([warm.own], [warm.model]) if warm and is_round else ([], [])
    kwargs = kwargs or {}
    with torch.no_grad():
        for each in () if warm else (model, rival):
            each(*args, **kwargs)  # the first run is not like the others
        while (verdict := _verdict(own, others)) is None:
            others.append(_seconds(rival, args, kwargs))
            own.append(_seconds(model, args, kwargs))
    return verdict


def _verdict(own: list[float], others: list[float]) -> bool | None:
    """Whether the rival is faster by these seconds; None while that is open."""
    losses = sum(a < b for a, b in zip(others, own, strict=True))
    if max(losses, len(own) - losses) == 4:
        return losses == 4
    if own and min(others) > (_CLEARLY if len(own) > 1 else _BEYOND_NOISE) * max(own):
        return False
    if len(own) > 1 and min(own) > _CLEARLY * max(others):
        return True
    return None


def _seconds(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    start = time.perf_counter()
    model(*args, **kwargs)
    return time.perf_counter() - start
