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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_blocked import _C
from torch_blocked.arguments import (
    check_flag,
    check_model,
    check_no_autocast,
    checked_example,
    checked_modules,
    checked_paths,
)
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
    keep: Iterable[str] = (),
    verify: bool = True,
) -> nn.Module:
    """Makes a module that computes what `model` does, faster.

    example_inputs: a tensor or a tuple of the model's positional arguments. Tensors may be dense or
    blocked. Other arguments may have any value, but each value has a capture of its own.
    example_kwargs: the named arguments.
    dynamic: one capture serves all sizes for which the model runs the same ops. If False, each size
    is captured.
    tune: if True, time the kernels that may be the fastest of each layer, and the plan against the
    model's own ops, which run if they are faster. "full" times all kernels that fit, in each
    format; it takes up to four times as long and seldom makes a model faster. False chooses by
    estimates.
    dtype: torch.bfloat16 computes in bfloat16 where that is faster; results stay float32.
    keep: paths of modules that stay in float32 all the same. compare() finds them.
    verify: compare the results with the model's, on the example and at other sizes. If they differ,
    the model itself runs, and a warning names the first step that differs.

    Lazy modules (nn.LazyConv2d) get their weights by a run of the model on the example. A model
    that cannot be captured as one graph runs in parts (compile.py), and its plan() says why.
    Raises ValueError if the model is in training mode, TypeError for another kind of model or
    example inputs, NotImplementedError for a dtype that the CPU lacks, RuntimeError within
    torch.autocast, and whatever the model raises for the example."""
    check_model("optimize", model)
    if getattr(model, "training", False) and not _is_exported(model):  # a frozen script has none
        raise ValueError(
            "torch_blocked::optimize: expected a model in evaluation mode, got training mode; "
            "call eval()"
        )
    check_dtype(dtype)
    # The paths in an exported graph are those of the model that it was made from.
    exported = _is_exported(model)
    keep = checked_paths("optimize", keep) if exported else checked_modules("optimize", model, keep)
    check_tune(tune)
    check_flag("optimize", "dynamic", dynamic)
    check_flag("optimize", "verify", verify)
    check_no_autocast("optimize")
    args, kwargs = checked_example("optimize", model, example_inputs, example_kwargs)
    run_if_lazy(model, args, kwargs)
    _warn_of_hooks(model)
    with torch.random.fork_rng(devices=[]):
        optimized = _optimized(model, args, kwargs, dynamic, tune, dtype, keep, verify)
    _C.return_idle_memory()
    return optimized


def _optimized(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic: bool,
    tune: Tune,
    dtype: torch.dtype | None,
    keep: Sequence[str],
    verify: bool,
) -> nn.Module:
    parts = functools.partial(OptimizedParts, tune=tune, dtype=dtype, keep=keep)
    optimized = OptimizedModule(model, parts, dynamic=dynamic, tune=tune, dtype=dtype, keep=keep)
    try:
        optimized._prepare(args, kwargs)
    except CaptureError as error:
        in_parts = parts(model, str(error))
        in_parts.settle(*args, **kwargs)  # raises the model's own error if it refuses the example
        return in_parts
    try:
        if optimized.choice == "blocked":
            _check(optimized, args, kwargs, tune, verify)
    except Warning:  # if the program turns warnings into errors
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
    ran = optimized._ran
    warm = _verify(optimized) if verify else None
    if optimized.choice == "model" and optimized.in_bfloat16():
        optimized._stay_in_float32(optimized.reason)
        optimized._ran, keys = ran, optimized.keys()
        warm = _verify(optimized)
    optimized._ran = None
    run_own = functools.partial(_seconds, optimized, args, kwargs)
    times = tune and not torch.are_deterministic_algorithms_enabled()
    if optimized.choice == "blocked" and times and not (warm and warm.is_clear(run_own)):
        if _is_slower(optimized, optimized._model, args, kwargs, warm=warm):
            optimized._choose("dense", "faster")
    if verify and optimized.choice == "blocked":
        optimized.note_compared(keys)


# If one takes this many times as long as the other, two rounds tell as much as seven.
_CLEARLY = 1.5
# And at this factor one round is enough: two runs of a slow model are a tenth of optimize's time.
_BEYOND_NOISE = 2.0
# At these factors the first runs are enough, or the model's first run and a second one of ours. A
# first run takes longer: up to twice the time for the model, up to 1.5 times for ours (for plans of
# small steps four times).
_BEYOND_FIRST_RUNS, _BEYOND_FIRST_RUN = 3.0, 2.3


@dataclass
class _Warm:
    """Seconds that the optimized model and the model took when they were compared."""

    own: float
    model: float
    is_first_run: bool  # `model` is the time of its ops in their first run, under the recorder

    def is_clear(self, run_own: Callable[[], float]) -> bool:
        """Whether these times show that ours is faster. run_own: runs ours again, returns
        seconds."""
        if not self.is_first_run:
            return False
        if self.model > _BEYOND_FIRST_RUNS * self.own:
            return True
        return self.model > _BEYOND_FIRST_RUN * run_own()


def _is_exported(model: nn.Module) -> bool:
    """Whether torch.export made it. Then its training flag means nothing, and eval() raises."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


def _warn_of_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not _is_known(hook) for hook in hooks):
            warnings.warn(
                f"torch_blocked::optimize: the forward hooks of {name or 'the model'} run in the "
                "capture; their ops are part of the optimized model, their other effects are not",
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
            continue  # these sizes are captured when they come
        if ran := _run(optimized, case):
            _compare(optimized, case, form.compiled.by_estimates, ran)
            break
    return warm


def _run(optimized: OptimizedModule, case: tuple[tuple[Any, ...], dict[str, Any]]) -> Ran | None:
    """The model's results for these arguments, and the time; None if it raises an error."""
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
    """Compares `run` with the model's results for one case. If they differ, the model runs from now
    on. Returns the seconds that `run` took."""
    form = optimized._forms[0]
    call = optimized._call(*case)
    start = time.perf_counter()
    result = optimized._results(form.captured, run(call.inputs))
    seconds = time.perf_counter() - start
    judgement = judgement_of(optimized, call, ran.results, result)
    if judgement.what and optimized.in_bfloat16():  # float32 is tried next
        optimized._choose("model", f"bfloat16 changes its results: {judgement.what}")
    elif judgement.what and judgement.is_noise:
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
    """Whether the rival wins most of seven rounds, or of fewer if the result is clear. They run in
    turn, so that noise affects both. warm: the times of both for the same arguments just before."""
    is_round = warm is not None and not warm.is_first_run
    own, others = ([warm.own], [warm.model]) if warm and is_round else ([], [])
    kwargs = kwargs or {}
    with torch.no_grad():
        for each in () if warm else (model, rival):
            each(*args, **kwargs)  # the first run takes longer and does not count
        while (verdict := _verdict(own, others)) is None:
            others.append(_seconds(rival, args, kwargs))
            own.append(_seconds(model, args, kwargs))
    return verdict


def _verdict(own: list[float], others: list[float]) -> bool | None:
    """Whether the rival is faster by these seconds; None if that is still open."""
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
