"""The module that `torch_blocked.optimize` returns: which capture serves a call, files, copies."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import IO, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_blocked import _C, progress, remembered, structure
from torch_blocked.capture import capture, capture_sizes
from torch_blocked.captured import VALUE, Capture, CaptureError, Node, Ran
from torch_blocked.environment import cpu_name, measured_with, tuning_file
from torch_blocked.shadow import DenseView
from torch_blocked.state import unchanged
from torch_blocked.tensor import BlockedTensor
from torch_blocked.text_table import columns
from torch_blocked.watched import WatchedTensor

# How many captures are kept, and of how many inputs it is known which capture serves them.
_FORMS, _SERVED = 8, 4096

_FILE_KIND, _FILE_VERSION = "torch_blocked.optimize", 3

# What is timed: what estimates leave open, nothing, or all that could run.
Tune = bool | Literal["full"]


@dataclass
class _Call:
    """The arguments of a call. A capture holds for their structure and for what is no tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    constants: tuple[Any, ...]
    spec: Any
    inputs: _C.Inputs

    @property
    def signature(self) -> tuple[Any, Any]:
        return self.spec, self.constants


@dataclass
class _Form:
    """A capture and what runs it, for calls with this signature."""

    signature: tuple[Any, Any]
    captured: Capture
    compiled: _C.Compiled


@dataclass
class _InParts:
    """In place of a form where there is no capture: the model runs in parts, for `reason`."""

    reason: str


class OptimizedModule(nn.Module):
    """The forward of a model in evaluation mode, for inference: results need no gradients.

    It takes and returns what the model does, blocked tensors too; inputs of other sizes are planned
    when they first come. `choice` says what runs: "blocked"; "dense" if the model's own ops were
    measured to be faster; "model" if the two did not agree, which is a defect to report. The
    weights are those the model had; calls from several threads run side by side."""

    _model: Any  # the model; None if a file was loaded, or after release()

    def __init__(
        self,
        model: nn.Module | None,
        in_parts: Callable[[nn.Module, str], nn.Module] | None = None,
        *,
        dynamic: bool = True,
        tune: Tune = True,
        dtype: torch.dtype | None = None,
        times: dict[str, tuple[str, float]] | None = None,
    ) -> None:
        """in_parts: called with the model and a reason, makes what runs where there can be no
        capture; None without a model, as from load()."""
        super().__init__()
        object.__setattr__(self, "_model", model)  # no submodule: its parameters stay its own
        self._in_parts = in_parts
        self._dynamic, self._tune, self._dtype = dynamic, tune, dtype
        self._times = times or {}
        self._weights = _C.Weights()
        self._converted: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._forms: list[_Form] = []
        self._served: OrderedDict[tuple[Any, ...], _Form | _InParts] = OrderedDict()
        self._direct = _C.DirectCalls()  # those of _served that need nothing of what follows
        self._lock = threading.RLock()
        self._released = False
        self._parts: nn.Module | None = None
        self._ran: Ran | None = None  # by the model for the example, when it was captured
        self._example: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._example_key = ""  # made before its capture, which leaves the model as it was
        self.choice, self.reason = "blocked", ""
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's. Raises what the model raises for arguments that it does not take, and
        TypeError for tensors without memory of their own (meta, fake, sparse, ...)."""
        if self.choice == "blocked" and not kwargs:
            result = self._direct(args)
            if result is not None:
                return result
        if self.choice == "model" or (self._model is not None and _C.Recorder.is_running()):
            with torch.no_grad():
                return self._model(*args, **kwargs)
        refuse_tracing()
        call = self._call(args, kwargs)
        form = self._served.get((call.signature, call.inputs.key))
        if form is None:
            form = self._find(call)
        if isinstance(form, _InParts):
            return self._parts_for(form)(*args, **kwargs)
        if form.captured.is_one_tensor() and isinstance(call.spec, int) and self._dtype is None:
            self._direct.add(args, form.compiled)
        by_ops = self.choice == "dense" or _C.Recorder.is_running()
        results = (form.compiled.by_ops if by_ops else form.compiled)(call.inputs)
        return self._results(form.captured, results)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # it is compiled already

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        spec: Any
        if kwargs or not all(isinstance(each, Tensor) for each in args):
            leaves, spec = structure.flatten((args, kwargs))
        else:
            leaves, spec = list(args), len(args)
        constants = tuple((type(each), each) for each in leaves if not isinstance(each, Tensor))
        inputs = checked_inputs(leaves, self._dtype)
        return _Call(args, kwargs, leaves, _hashable(constants), spec, inputs)

    def _results(self, captured: Capture, results: list[Tensor]) -> Any:
        values = iter(results)
        outputs = [next(values) if _is_value(each) else each for each in captured.outputs]
        if self._dtype is not None:
            outputs = [
                each.float() if isinstance(each, Tensor) and each.dtype == self._dtype else each
                for each in outputs
            ]
        for place, channels in captured.blocked.items():
            outputs[place] = BlockedTensor(outputs[place], channels)
        return structure.unflatten(outputs, captured.out_spec)

    def _find(self, call: _Call) -> _Form | _InParts:
        """The form for a call like none before: one that was shown to hold for it, or a new one."""
        with self._lock:
            form: _Form | _InParts = next(
                (
                    each
                    for each in self._forms
                    if each.signature == call.signature and each.compiled.covers(call.inputs)
                ),
                None,
            ) or self._captured(call)
            self._served[call.signature, call.inputs.key] = form
            if len(self._served) > _SERVED:
                self._served.popitem(last=False)
                self._direct.clear()
            return form

    def _captured(self, call: _Call) -> _Form | _InParts:
        if self._model is None:
            known = [named(form.captured.input_metas, form.signature) for form in self._forms]
            raise ValueError(
                f"torch_blocked::optimize: expected inputs like those of before "
                f"({'; '.join(known)}), got {named(call.inputs.metas, call.signature)}; optimize "
                "the model for them"
            )
        with torch.random.fork_rng(devices=[]):  # the numbers that it draws are the call's
            try:
                captured = self._remembered(call) or capture(
                    self._model, call.args, call.kwargs, dynamic=self._dynamic
                )
            except CaptureError as error:
                if not self._forms or self._dtype is not None:
                    raise
                with torch.no_grad(), unchanged(self._model):
                    self._model(*call.args, **call.kwargs)  # what it refuses, it says best
                return _InParts(str(error))
        if captured.notice:
            warnings.warn(f"torch_blocked::optimize: {captured.notice}", stacklevel=4)
        for form in self._forms:
            same = form.signature == call.signature and captured.same_as(form.captured)
            if same and form.compiled.add_covered(call.inputs):
                form.captured.also.append(captured.input_metas)
                return form
        return self._add(call.signature, captured)

    @functools.cached_property
    def _compared(self) -> remembered.Compared:
        return remembered.Compared()

    def _remembered(self, call: _Call) -> Capture | None:
        """The capture for a call, if a run without values tells that it was compared before."""
        key = self._key_of(call)
        if not self._forms:
            self._example_key = key
        if key not in self._compared:
            return None
        captured = capture_sizes(self._model, call.args, call.kwargs, dynamic=self._dynamic)
        if captured and remembered.key_of_capture(self._model, key, captured) in self._compared:
            return captured
        return None

    def _key_of(self, call: _Call) -> str:
        settings = self._dtype, self._tune, self._dynamic
        return remembered.key_of_call(self._model, (call.signature, call.inputs.metas), settings)

    def keys(self) -> list[str]:
        """Of the example call, its capture and its plan, in this order, each "" if it has none: of
        random results."""
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

    def _parts_for(self, form: _InParts) -> Any:
        """The model in parts, for inputs for which it cannot be captured whole."""
        with self._lock:
            if self._parts is None and self._in_parts is not None:
                self._parts = self._in_parts(self._model, form.reason)
            return self._parts

    def _add(self, signature: tuple[Any, Any], captured: Capture) -> _Form:
        path = tuning_file()
        with contextlib.suppress(OSError):  # without a file each process measures anew
            path.parent.mkdir(parents=True, exist_ok=True)
        times = dict(self._times)
        for form in self._forms:
            times |= form.compiled.times()
        computed = captured if self._dtype is None else self._converted_from(captured)
        compiled = _C.Compiled(
            computed, self._tune, str(path), times, self._weights, progress.tuning
        )
        try:
            compiled.check_sizes()
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CaptureError(f"sizes depend on values: {reason[0]}") from error
        self._ran, captured.ran = None if self._forms else captured.ran, None
        form = _Form(signature, captured, compiled)
        self._forms.append(form)
        if len(self._forms) > _FORMS:
            gone = self._forms.pop(0)
            self._direct.clear()
            for key in [key for key, each in self._served.items() if each is gone]:
                del self._served[key]
        return form

    def _converted_from(self, captured: Capture) -> Capture:
        """`captured`, with floating-point numbers in the dtype to compute in. Each constant is
        converted once, for all captures."""
        self._weights.check_unchanged(list(captured.constants.values()))

        def converted(each: Tensor) -> Tensor:
            if not each.is_floating_point():
                return each
            place = (each.data_ptr(), each.shape, each.stride())
            if place not in self._converted:
                self._converted[place] = (each, each.to(self._dtype))
            return self._converted[place][1]

        def in_dtype(metas: list[Any]) -> list[Any]:
            return [(d, self._dtype if dtype.is_floating_point else dtype) for d, dtype in metas]

        return replace(
            captured,
            constants={value: converted(each) for value, each in captured.constants.items()},
            input_metas=in_dtype(captured.input_metas),
            also=[in_dtype(each) for each in captured.also],
            metas={},
        )

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures and plans for the example inputs."""
        example = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))
        self._example = example
        call = self._call(args, kwargs)
        form = self._find(call)
        if isinstance(form, _Form):  # the first call either has one or raises CaptureError
            form.compiled.prepare(call.inputs)

    def _choose(self, choice: str, reason: str) -> None:
        self.choice, self.reason = choice, reason
        if choice != "blocked":
            for form in self._forms:
                form.compiled.forget_plans()

    def train(self, mode: bool = True) -> OptimizedModule:
        """Only train(False), which does nothing. Raises NotImplementedError otherwise."""
        if mode:
            refuse_training()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OptimizedModule:
        """Only what changes nothing. Raises NotImplementedError for other types and devices."""
        probe = fn(torch.zeros(1))
        if probe.dtype != torch.float32 or probe.device.type != "cpu":
            raise NotImplementedError(
                f"torch_blocked::optimize: expected float32 on the CPU, got {probe.dtype} on "
                f"{probe.device}; convert the model and optimize it again"
            )
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError: the weights are folded and packed."""
        raise NotImplementedError(
            "torch_blocked::state_dict: expected a model with parameters, got an optimized one, "
            "whose weights are folded and packed; use the model's state_dict(), or save(path)"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError, as state_dict()."""
        self.state_dict()

    def steps(self, *args: Any, **kwargs: Any) -> list[_C.StepReport]:
        """What runs for inputs like these (none: the example), timed in one run. Raises ValueError
        where the model runs in parts."""
        form, call = self._form_for(args, kwargs)
        if isinstance(form, _InParts):
            raise ValueError(
                "torch_blocked::optimize: expected a model that is captured whole, got one that "
                f"runs in parts ({form.reason}); plan() shows these"
            )
        return form.compiled.report(call.inputs)

    def _form_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Form | _InParts, _Call]:
        if not args and not kwargs:
            args, kwargs = self._example
        call = self._call(args, kwargs)
        return self._find(call), call

    def plan(self, *args: Any, **kwargs: Any) -> str:
        """A table of what runs for inputs like these (none: the example): each step with its
        output, format, implementation, time in microseconds and why."""
        form, call = self._form_for(args, kwargs)
        if isinstance(form, _InParts):
            return str(self._parts_for(form).plan())
        compiled = form.compiled
        rows = [
            (step.op, step.output, step.implementation, f"{step.microseconds:.1f}", step.why)
            for step in compiled.report(call.inputs)
        ]
        table = columns(("op", "output", "implementation", "us", "why"), rows, "lllrl")
        packed = self._weights.packed_bytes() / 2**20
        arena = compiled.arena_bytes(call.inputs) / 2**20
        memory = f"packed weights {packed:.1f} MiB, activations {arena:.1f} MiB"
        why = f" ({self.reason})" if self.reason else ""
        return f"runs: {self.choice}{why}; {memory}\n{table}"

    def release(self) -> None:
        """Lets go of the dense weights and of the model; packed weights stay. From now on only
        inputs of sizes that ran before are taken, others raise ValueError, as does save().

        Raises ValueError if it is the model or its own ops that run."""
        if self.choice != "blocked":
            raise ValueError(
                f"torch_blocked::optimize: expected choice 'blocked', got '{self.choice}'; there "
                "is nothing to release, the model's own weights run"
            )
        object.__setattr__(self, "_model", None)
        self._released, self._parts = True, None
        for key in [key for key, form in self._served.items() if isinstance(form, _InParts)]:
            del self._served[key]
        self._converted = {}
        for form in self._forms:
            form.captured.constants = {}
        gc.collect()  # torch.export leaves cycles that hold the parameters
        for form in self._forms:
            form.compiled.release()

    def save(self, path: str | os.PathLike[str] | IO[bytes]) -> None:
        """Writes the graphs, their dense weights and what was measured; load() reads them, on any
        CPU. Sizes that ran before will run then, and all others that the captures hold for.

        Raises ValueError after release(), NotImplementedError where the model itself or a part of
        it runs, for any sizes so far, or arguments and results have types of their own."""
        if self._released:
            raise ValueError(
                "torch_blocked::optimize: expected dense weights to save, got a module after "
                "release(); save it before"
            )
        if self.choice == "model":
            raise NotImplementedError(
                f"torch_blocked::optimize: expected an optimized model, got one that runs itself "
                f"({self.reason}); save the model"
            )
        parts = next((each for each in self._served.values() if isinstance(each, _InParts)), None)
        if parts is not None:
            raise NotImplementedError(
                "torch_blocked::optimize: expected a model that is captured whole, got one that "
                f"runs in parts for inputs that it has seen ({parts.reason}); save the model"
            )
        self._weights.check_unchanged(
            [each for form in self._forms for each in form.captured.constants.values()]
        )
        times: dict[str, tuple[str, float]] = {}
        for form in self._forms:
            times |= form.compiled.times()
        example = pytree.tree_map_only(Tensor, torch.empty_like, dense(self._example))
        leaves, spec = structure.flatten(example)
        torch.save(
            {
                "kind": _FILE_KIND,
                "version": _FILE_VERSION,
                "forms": [_form_to_data(form) for form in self._forms],
                "example": leaves,
                "example_spec": structure.dumps(spec),
                "tune": self._tune,
                "dtype": self._dtype,
                "choice": self.choice,
                "cpu": cpu_name(),
                "measured_with": measured_with(),
                "times": times,
            },
            path,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled as save() and load() do it."""
        file = io.BytesIO()
        self.save(file)
        return _from_bytes, (file.getvalue(),)


def _from_bytes(content: bytes) -> OptimizedModule:
    return load(io.BytesIO(content))


def dense(value: Any) -> Any:
    return pytree.tree_map_only(BlockedTensor, BlockedTensor.to_dense, value)


def checked_inputs(leaves: list[Any], dtype: torch.dtype | None = None) -> _C.Inputs:
    """The tensors among the arguments of a call, their floating-point numbers in `dtype`. Raises
    TypeError for one without memory of its own: meta, fake, sparse, nested, of torch.func."""
    return _C.Inputs(leaves, dtype, BlockedTensor, DenseView, WatchedTensor)


def refuse_tracing() -> None:
    """Raises inside a tracer: it does not see our kernels, so results would become constants."""
    keys = torch._C._TorchDispatchModeKey
    modes = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    if torch._C._get_tracing_state() is None and not (
        torch._C._len_torch_dispatch_stack()
        and any(torch._C._get_dispatch_mode(each) is not None for each in modes)
    ):
        return
    raise NotImplementedError(
        "torch_blocked::optimize: expected a call, got one that torch.export, make_fx or "
        "torch.jit.trace records; trace the model that was optimized"
    )


def named(metas: list[Any], signature: tuple[Any, Any]) -> str:
    """Tensors and other arguments in words: "float32 [1, 3, 8, 8], 2, by name or nested"."""
    tensors = [f"{str(dtype).removeprefix('torch.')} {list(dims)}" for dims, dtype in metas]
    spec, constants = signature
    more = [] if isinstance(spec, int) else ["by name or nested"]
    return ", ".join([*tensors, *(repr(each)[:40] for _, each in constants), *more]) or "none"


def _hashable(constants: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        hash(constants)
    except TypeError:
        return tuple((kind, repr(each)) for kind, each in constants)
    return constants


def refuse_training() -> NoReturn:
    raise NotImplementedError(
        "torch_blocked::optimize: expected inference, got train(); train the model that was "
        "optimized, on x.to_blocked(), and optimize it again"
    )


def _form_to_data(form: _Form) -> dict[str, Any]:
    names = [each.name for each in fields(Capture) if each.name != "ran"]
    data = {name: getattr(form.captured, name) for name in names}
    # A file that others get tells nothing of the folders of this machine.
    data["nodes"] = [
        vars(node) | {"line": os.path.basename(node.line)} for node in form.captured.nodes
    ]
    data["out_spec"] = structure.dumps(form.captured.out_spec)
    spec, constants = form.signature
    return {
        "capture": data,
        "spec": spec if isinstance(spec, int) else structure.dumps(spec),
        "constants": [each for _, each in constants],
    }


def _form_of_data(data: dict[str, Any]) -> tuple[tuple[Any, Any], Capture]:
    spec = data["spec"] if isinstance(data["spec"], int) else structure.loads(data["spec"])
    constants = tuple((type(each), each) for each in data["constants"])
    fields = dict(data["capture"])
    fields["nodes"] = [Node(**node) for node in fields["nodes"]]
    fields["out_spec"] = structure.loads(fields["out_spec"])
    return (spec, _hashable(constants)), Capture(**fields)


def load(path: str | os.PathLike[str] | IO[bytes]) -> OptimizedModule:
    """What `OptimizedModule.save` wrote, planned for this CPU. Nothing in the file is executed.

    path: a file's name, or an open binary file.
    Raises OSError if it cannot be read, ValueError if it is none of ours, or broken."""
    try:
        data = torch.load(path, weights_only=True)
        if data["kind"] != _FILE_KIND or data["version"] != _FILE_VERSION:
            raise ValueError(f"kind {data['kind']}, version {data['version']}")
        forms = [_form_of_data(each) for each in data["forms"]]
        args, kwargs = structure.unflatten(data["example"], structure.loads(data["example_spec"]))
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"torch_blocked::load: expected a file written by save(), got {path} "
            f"({str(error).splitlines()[0]}); save the optimized module again"
        ) from error
    check_dtype(data["dtype"])
    same = (data["cpu"], data.get("measured_with")) == (cpu_name(), measured_with())
    loaded = OptimizedModule(
        None,
        tune=data["tune"],
        dtype=data["dtype"],
        times=data["times"] if same else None,
    )
    for signature, captured in forms:
        loaded._add(signature, captured)
    if data["choice"] == "blocked":
        loaded._prepare(args, kwargs)
        _C.return_idle_memory()
    else:
        loaded._example = (args, kwargs)
        loaded._choose(data["choice"], "faster where it was saved")
    return loaded


def check_tune(tune: Tune) -> None:
    if not isinstance(tune, bool) and tune != "full":
        raise ValueError(
            f"torch_blocked::optimize: expected tune as True, False or 'full', got {tune!r}"
        )


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise NotImplementedError(
            f"torch_blocked::optimize: expected dtype float32 or bfloat16, got {dtype}"
        )
    if dtype == torch.bfloat16 and not has_bfloat16():
        raise NotImplementedError(
            "torch_blocked::optimize: expected a CPU with avx512_bf16 for bfloat16, got one "
            "without; leave dtype out"
        )


def has_bfloat16() -> bool:
    """True if the CPU, within its limits (TORCH_BLOCKED_MAX_ISA), multiplies bfloat16."""
    return _C.isa() in ("avx512", "amx") and torch.cpu._is_avx512_bf16_supported()


def _is_value(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] == VALUE
