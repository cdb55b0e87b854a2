"""The module that `torch_blocked.optimize` returns. It finds the capture for a call, and saves."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_blocked import _C, forks, progress, remembered, saved, structure
from torch_blocked.arguments import checked_dtype
from torch_blocked.calls import Call, call_of, dense, named, refuse_tracing
from torch_blocked.capture import capture, capture_part, capture_sizes
from torch_blocked.captured import VALUE, Capture, CaptureError, Ran
from torch_blocked.environment import cpu_name, make_folder, measured_with, tuning_file
from torch_blocked.refusals import (
    is_asked_for,
    is_out_of_memory,
    refuse_conversion,
    refuse_in_parts,
    refuse_state_dict,
    refuse_training,
)
from torch_blocked.state import check_devices
from torch_blocked.tensor import BlockedTensor
from torch_blocked.text_table import columns

# How many captures are kept, and for how many kinds of inputs the serving capture is remembered.
_FORMS, _SERVED = 8, 4096

# What is timed: kernels that estimates leave open, nothing, or all kernels that could run.
Tune = bool | Literal["full"]


@dataclass
class _Form:
    """A capture and its compiled plans, for calls with this signature."""

    signature: tuple[Any, Any]
    captured: Capture
    compiled: _C.Compiled


@dataclass
class _Instead:
    """Stands in for a form: the model runs in parts, or itself, for `reason`."""

    reason: str
    in_parts: bool = True

    def how(self) -> str:
        return "in parts" if self.in_parts else "as it is"


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class OptimizedModule(nn.Module):
    """The forward of a model in evaluation mode, for inference: results need no gradients.

    It takes and returns what the model does, blocked tensors too. Inputs of other sizes are planned
    when they first come. `choice` says what runs: "blocked" for the plan; "dense" if the model's
    own ops were measured to be faster; "model" if the model itself runs, because its results differ
    or cannot be compared, or because the plan failed. `reason` says why. Weights are those that the
    model had. Calls from several threads run side by side."""

    _model: Any  # the model; None if a file was loaded, or after release()
    # What computes in bfloat16 if it is asked for: what is faster, by estimates that a CPU gains
    # (fastest) or by times alone (timed), or all that has kernels (narrow).
    _computes: Literal["fastest", "timed", "narrow"] = "fastest"
    _of_bytes: Callable[[bytes], OptimizedModule]  # makes copies (loading.py)

    def __init__(
        self,
        model: nn.Module | None,
        in_parts: Callable[[nn.Module, str], nn.Module] | None = None,
        *,
        dynamic: bool = True,
        tune: Tune = True,
        dtype: torch.dtype | None = None,
        keep: Sequence[str] = (),
        times: dict[str, tuple[str, float]] | None = None,
        path: str | None = None,
    ) -> None:
        """in_parts: called with the model and a reason if there can be no capture, makes the module
        that runs then; None runs the model itself. path: the path in a larger model, of which this
        module is a part."""
        super().__init__()
        object.__setattr__(self, "_model", model)  # no submodule: its parameters stay its own
        self._in_parts, self._path = in_parts, path
        self._dynamic, self._tune, self._dtype, self._keep = dynamic, tune, dtype, list(keep)
        self._times = times or {}
        self._weights = _C.Weights()
        self._forms: list[_Form] = []
        self._served: OrderedDict[tuple[Any, ...], _Form | _Instead] = OrderedDict()
        self._direct = _C.DirectCalls()  # the calls in _served that C++ can run on its own
        self._lock = forks.lock()
        self._released, self._plan_at_release = False, ""
        self._parts: nn.Module | None = None
        self._told = False  # whether a warning said that the model runs in parts, or itself
        self._ran: Ran | None = None  # the model's run on the example, from its capture
        self._example: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._known: remembered.Compared | None = None
        self._example_key = ""  # made before its capture, which leaves the model as it was
        self.choice, self.reason = "blocked", ""
        self._float32 = ""  # why it stays in float32 although bfloat16 was asked for
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns what the model's forward does. Raises what the model raises for wrong
        arguments, and TypeError for tensors without memory of their own (meta, fake, sparse,
        ...)."""
        if self.choice == "blocked" and not kwargs:
            try:
                if (result := self._direct(args)) is not None:
                    return result
            except Exception:  # it will fail again below, where the model takes over
                self._direct.clear()
        model = self._model  # until another thread releases it
        if self.choice == "model" or (model is not None and _C.Recorder.is_running()):
            with torch.no_grad():
                return model(*args, **kwargs)
        refuse_tracing()
        call = self._call(args, kwargs)
        try:
            form = self._served.get((call.signature, call.inputs.key)) or self._find(call)
            if isinstance(form, _Form):
                return self._run(form, call)
        except Exception as error:
            form = self._without_plan(call, error)
        return self._run_instead(form, call)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # it is compiled already

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return call_of(args, kwargs, torch.float32 if self._widens() else None)

    def _widens(self) -> bool:
        """Whether inputs in bfloat16 are taken, too: the model takes float32."""
        if self._dtype is None or not self._forms:
            return False
        types = {dtype for _, dtype in self._forms[0].captured.input_metas}
        return not any(each.is_floating_point and each != torch.float32 for each in types)

    def _run(self, form: _Form, call: Call) -> Any:
        by_ops = self._runs() == "dense" or _C.Recorder.is_running()
        results = (form.compiled.by_ops if by_ops else form.compiled)(call.inputs)
        if form.captured.is_one_tensor() and isinstance(call.spec, int):
            self._direct.add(call.args, form.compiled)
        return self._results(form.captured, results)

    def _runs(self) -> str:
        """The choice; but a choice by times does not count under deterministic algorithms."""
        by_times = self.choice == "dense" and torch.are_deterministic_algorithms_enabled()
        return "blocked" if by_times else self.choice

    def _without_plan(self, call: Call, error: Exception) -> _Instead:
        """The model itself, for a call that our plan failed to run. Raises the error instead if it
        is a documented one: for inputs without a model, for weights that have changed, or for
        something that the user has forbidden."""
        if self._model is None or is_asked_for(error):
            raise error
        self._check_weights()
        return _Instead(f"{type(error).__name__}: {first_line(error)}", in_parts=False)

    def _check_weights(self) -> None:
        """Raises ValueError if the model's weights are not those of the capture."""
        self._weights.check_unchanged(
            [each for form in self._forms for each in form.captured.constants.values()]
        )

    def _run_instead(self, instead: _Instead, call: Call) -> Any:
        model = self._parts_for(instead) or self._model
        if model is None:  # another thread has released it meanwhile
            self._refuse_new(call)
        with torch.no_grad():
            results = model(*call.args, **call.kwargs)
        self._serve(call, instead)  # the model has taken the inputs
        if not self._told:
            self._told = True
            warnings.warn(
                f"torch_blocked::optimize: the model runs {instead.how()} for "
                f"{named(call.inputs.metas, call.signature)}, because {instead.reason}",
                stacklevel=5,
            )
        return results

    def _results(self, captured: Capture, results: list[Tensor]) -> Any:
        values = iter(results)
        outputs = [next(values) if _is_value(each) else each for each in captured.outputs]
        for place, channels in captured.blocked.items():
            outputs[place] = BlockedTensor(outputs[place], channels)
        return structure.unflatten(outputs, captured.out_spec)

    def _find(self, call: Call) -> _Form | _Instead:
        """The form for a new kind of call: a known one that was shown to serve it, or a new one."""
        with self._lock:
            for form in self._forms:
                if form.signature == call.signature and form.compiled.covers(call.inputs):
                    return self._serve(call, form)
            found = self._captured(call)
            return self._serve(call, found) if isinstance(found, _Form) else found

    def _serve(self, call: Call, form: _Form | _Instead) -> _Form | _Instead:
        """Remembers which form serves calls like this one."""
        with self._lock:
            self._served[call.signature, call.inputs.key] = form
            if len(self._served) > _SERVED:
                self._served.popitem(last=False)
                self._direct.clear()
        return form

    def _captured(self, call: Call) -> _Form | _Instead:
        if self._model is None:
            self._refuse_new(call)
        check_devices("optimize", self._model)
        # Random numbers belong to the call, and types to the model.
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            try:
                captured = self._remembered(call) or self._capture(call)
                form = self._form_of(captured, call)
            except CaptureError as error:
                if not self._forms:
                    raise
                return _Instead(first_line(error), in_parts=self._in_parts is not None)
        if captured.notice:
            warnings.warn(f"torch_blocked::optimize: {captured.notice}", stacklevel=5)
        return form

    def _refuse_new(self, call: Call) -> NoReturn:
        """Raises ValueError: there is no model to capture, or after release() no dense weights."""
        known = [named(form.captured.input_metas, form.signature) for form in self._forms]
        got = named(call.inputs.metas, call.signature)
        remedy = "optimize the model for them"
        if self._released and any(
            form.signature == call.signature and form.captured.input_metas == call.inputs.metas
            for form in self._forms
        ):
            got += (
                f" on {torch.get_num_threads()} threads, deterministic algorithms "
                f"{'on' if torch.are_deterministic_algorithms_enabled() else 'off'}"
            )
            remedy = "run them once in this setting before release(), or set it as it was"
        raise ValueError(
            f"torch_blocked::optimize: expected inputs like earlier ones ({'; '.join(known)}), "
            f"got {got}; {remedy}"
        )

    def _capture(self, call: Call) -> Capture:
        model, args, kwargs = self._model, call.args, call.kwargs
        if self._path is not None:
            return capture_part(model, args, kwargs, self._path, dynamic=self._dynamic)
        return capture(model, args, kwargs, dynamic=self._dynamic)

    def _form_of(self, captured: Capture, call: Call) -> _Form:
        """A known form, if the run has recorded the same capture, or a new one."""
        for form in self._forms:
            same = form.signature == call.signature and captured.same_as(form.captured)
            if same and form.compiled.add_covered(call.inputs):
                form.captured.also.append(captured.input_metas)
                del form.captured.also[:-_SERVED]
                return form
        return self._add(call.signature, captured)

    @property
    def _compared(self) -> remembered.Compared:
        if self._known is None:
            self._known = remembered.Compared()
        return self._known

    def _remembered(self, call: Call) -> Capture | None:
        """The capture for a call, from a run for sizes only, if it was compared before."""
        if self._path is not None:
            return None
        key = self._key_of(call)
        if not self._forms:
            self._example_key = key
        if key not in self._compared:
            return None
        captured = capture_sizes(self._model, call.args, call.kwargs, dynamic=self._dynamic)
        if captured and remembered.key_of_capture(self._model, key, captured) in self._compared:
            return captured
        return None

    def _key_of(self, call: Call) -> str:
        settings: tuple[Any, ...] = self._dtype, self._tune, self._dynamic, *self._keep
        if torch.are_deterministic_algorithms_enabled():  # it is not timed against the model
            settings += ("deterministic",)
        return remembered.key_of_call(self._model, (call.signature, call.inputs.metas), settings)

    def keys(self) -> list[str]:
        """The keys of the example call, its capture and its plan, in this order. A key is "" if
        there is none, as for random results."""
        call, form = self._call(*self._example), self._forms[0]
        key = "" if form.captured.is_random() else self._example_key
        captured = remembered.key_of_capture(self._model, key, form.captured)
        outline = form.compiled.outline(call.inputs)
        return [key, captured, remembered.key_of_plan(captured, outline)]

    def was_compared(self, keys: list[str]) -> bool:
        """Whether the plan with these keys was compared with the model before."""
        return keys[-1] in self._compared

    def note_compared(self, keys: list[str]) -> None:
        self._compared.note(*keys)

    def _parts_for(self, instead: _Instead) -> Any:
        """The model in parts, for inputs for which it cannot be captured whole; None if the model
        itself runs."""
        if not instead.in_parts:
            return None
        with self._lock:
            if self._parts is None and self._in_parts is not None:
                self._parts = self._in_parts(self._model, instead.reason)
            return self._parts

    def _add(self, signature: tuple[Any, Any], captured: Capture) -> _Form:
        file = tuning_file()
        path = str(file) if make_folder(file) else ""  # without a file each process measures anew
        times = dict(self._times)
        for form in self._forms:
            times |= form.compiled.times()
        asks = self._dtype == torch.bfloat16 and not self._float32
        computes = self._computes if asks else "captured"
        try:
            compiled = _C.Compiled(
                captured,
                self._tune,
                path,
                times,
                self._weights,
                progress.tuning,
                computes,
                self._keep,
            )
            compiled.check_sizes()
        except Exception as error:
            if is_asked_for(error):
                raise
            if is_out_of_memory(error):
                raise
            raise CaptureError(f"sizes depend on values: {first_line(error)}") from error
        self._ran, captured.ran = None if self._forms else captured.ran, None
        form = _Form(signature, captured, compiled)
        self._forms.append(form)
        if len(self._forms) > _FORMS:
            gone = self._forms.pop(0)
            self._direct.clear()
            for key in [key for key, each in self._served.items() if each is gone]:
                del self._served[key]
        return form

    def in_bfloat16(self) -> bool:
        """Whether plans may compute in bfloat16."""
        gains = self._computes != "fastest" or _C.gains_by_bfloats()
        return self._dtype == torch.bfloat16 and not self._float32 and gains

    def _stay_in_float32(self, reason: str) -> None:
        """Plans anew in float32, because results in bfloat16 were not right."""
        self._float32 = f"in float32, because {reason}"
        self.choice, self.reason = "blocked", ""
        self._direct.clear()
        for form in self._forms:
            form.compiled.compute_as_captured()

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures and plans for the example inputs."""
        example = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))
        self._example = example
        call = self._call(args, kwargs)
        form = self._find(call)
        if not isinstance(form, _Form):  # the first call either has a form or raises CaptureError
            return
        try:
            form.compiled.prepare(call.inputs)
        except Exception as error:
            if self._model is None:
                raise
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Lets the model itself run from now on, because something of ours failed. Raises errors
        that the user's settings ask for."""
        if is_asked_for(error):
            raise error
        self._choose("model", f"ours failed: {type(error).__name__}: {first_line(error)}")
        warnings.warn(
            f"torch_blocked::optimize: the model itself runs, because {self.reason}. Please report "
            "this with the model, it is a defect of torch_blocked",
            stacklevel=5,
        )

    def _choose(self, choice: str, reason: str) -> None:
        self.choice, self.reason = choice, reason
        if choice != "blocked":
            for form in self._forms:
                form.compiled.forget_plans()

    def train(self, mode: bool = True) -> OptimizedModule:
        """train(False) does nothing. train(True) raises NotImplementedError."""
        if mode:
            refuse_training()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OptimizedModule:
        """Allows only calls that change nothing. Raises NotImplementedError for other types and
        devices."""
        refuse_conversion(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError: the weights are folded and packed."""
        refuse_state_dict()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError, as state_dict() does."""
        refuse_state_dict()

    def steps(self, *args: Any, **kwargs: Any) -> list[_C.StepReport]:
        """The steps for inputs like these (without arguments: the example), timed in one run.
        Raises ValueError if the model runs in parts."""
        form, call = self._form_for(args, kwargs)
        if isinstance(form, _Instead):
            refuse_in_parts(form.reason, "plan() shows these", ValueError)
        return form.compiled.report(call.inputs)

    def _form_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Form | _Instead, Call]:
        if not args and not kwargs:
            args, kwargs = self._example
        call = self._call(args, kwargs)
        return self._served.get((call.signature, call.inputs.key)) or self._find(call), call

    def plan(self, *args: Any, **kwargs: Any) -> str:
        """A table of the steps for inputs like these (without arguments: the example), each with
        its output, format, implementation, time in microseconds and reason. After release(), if the
        example has no plan any more, it is the table from before."""
        try:
            form, call = self._form_for(args, kwargs)
        except ValueError:
            if args or kwargs or not self._plan_at_release:
                raise
            return self._plan_at_release
        if isinstance(form, _Instead):
            parts = self._parts_for(form)
            itself = f"runs: the model itself, because {form.reason}"
            return itself if parts is None else str(parts.plan())
        compiled = form.compiled
        rows = [
            (step.op, step.output, step.implementation, f"{step.microseconds:.1f}", step.why)
            for step in compiled.report(call.inputs)
        ]
        table = columns(("op", "output", "implementation", "us", "why"), rows, "lllrl")
        packed = self._weights.packed_bytes() / 2**20
        arena = compiled.arena_bytes(call.inputs) / 2**20
        memory = f"packed weights {packed:.1f} MiB, activations {arena:.1f} MiB"
        why = f" ({self.reason})" if self.reason and self._runs() == self.choice else ""
        types = self._float32 or compiled.types(call.inputs)
        return f"runs: {self._runs()}{why}{types and f', {types}'}; {memory}\n{table}"

    def release(self) -> None:
        """Drops the dense weights and the model; packed weights stay. From now on only inputs of
        sizes that ran before are taken. Others, and save(), raise ValueError.

        Raises ValueError if the model or its own ops run, because then there is nothing to drop."""
        if self.choice != "blocked":
            raise ValueError(
                f"torch_blocked::optimize: expected choice 'blocked', got '{self.choice}'; there "
                "is nothing to release, the model's own weights run"
            )
        if not self._released:
            with contextlib.suppress(ValueError):  # a size without a plan, and weights have changed
                self._plan_at_release = self.plan()
        with self._lock:  # another thread may be capturing the model for a new size
            object.__setattr__(self, "_model", None)
            self._released, self._parts = True, None
            for key in [key for key, form in self._served.items() if isinstance(form, _Instead)]:
                del self._served[key]
            for form in self._forms:
                form.captured.constants = {}
            gc.collect()  # torch.export leaves cycles that hold the parameters
            for form in self._forms:
                form.compiled.release()

    def save(self, path: str | os.PathLike[str] | IO[bytes]) -> None:
        """Writes the graphs, their dense weights and the measured times. load() reads them, on any
        CPU. The loaded module runs every size that the captures serve. Warns of ops that load()
        must be told to allow, such as ops of other libraries.

        path: a file's name, or an open binary file.
        Raises OSError if the file cannot be written; an older one stays as it was.
        Raises ValueError after release(). Raises NotImplementedError if the model itself or a part
        of it ran for any sizes so far, and for arguments or results of the program's own types."""
        with self._lock:  # other threads may release the forms, or call for new sizes
            self._check_savable()
            forms = [saved.to_data(form.signature, form.captured) for form in self._forms]
        self._check_weights()
        self._tell_of_ops()
        times: dict[str, tuple[str, float]] = {}
        for form in self._forms:
            times |= form.compiled.times()
        # Only the example's sizes count. Fresh memory could hold private data, so write zeros.
        example = pytree.tree_map_only(Tensor, torch.zeros_like, dense(self._example))
        leaves, spec = structure.flatten(example)
        saved.save(
            {
                "forms": forms,
                "example": leaves,
                "example_spec": structure.dumps(spec),
                "tune": self._tune,
                "dtype": None if self._float32 else self._dtype,
                "keep": self._keep,
                "choice": self.choice,
                "cpu": cpu_name(),
                "measured_with": measured_with(),
                "times": times,
            },
            path,
        )

    def _check_savable(self) -> None:
        """Raises ValueError or NotImplementedError if save() cannot write what runs."""
        if self.choice == "model":
            raise NotImplementedError(
                f"torch_blocked::optimize: expected an optimized model, got one that runs itself "
                f"({self.reason}); save the model"
            )
        parts = next((each for each in self._served.values() if isinstance(each, _Instead)), None)
        if parts is not None:
            raise NotImplementedError(
                "torch_blocked::optimize: expected a model that is captured whole, got one that "
                f"runs in parts or itself for inputs that it has seen ({parts.reason}); save the "
                "model"
            )
        if self._released:
            raise ValueError(
                "torch_blocked::optimize: expected dense weights to save, got a module after "
                "release(); save it before"
            )

    def _tell_of_ops(self) -> None:
        nodes = [node for form in self._forms for node in form.captured.nodes]
        more = sorted({n.name for n in nodes if not _C.is_loadable(n.name, n.overload)})
        if more:
            warnings.warn(
                f"torch_blocked::save: the model calls ops that load() must be told to allow: load "
                f"it by load(file, ops={more})",
                stacklevel=3,
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles by save() and load()."""
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of_bytes() allows all ops
            self.save(file)
        return self._of_bytes, (file.getvalue(),)


def check_tune(tune: Tune) -> None:
    if not isinstance(tune, bool) and tune != "full":
        raise ValueError(
            f"torch_blocked::optimize: expected tune as True, False or 'full', got {tune!r}"
        )


def check_dtype(dtype: torch.dtype | None) -> None:
    if checked_dtype("optimize", dtype) not in (None, torch.float32, torch.bfloat16):
        raise NotImplementedError(
            f"torch_blocked::optimize: expected dtype float32 or bfloat16, got {dtype}"
        )


def _is_value(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] == VALUE
