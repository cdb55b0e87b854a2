"""`torch_blocked.optimize`: a trained model as one C++ call.

The model is captured (capture.py) and handed to csrc/graph, which folds, fuses, chooses formats and
kernels by measurement, plans memory and runs it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_blocked import _C
from torch_blocked.capture import VALUE, Capture, CaptureError, Node, capture
from torch_blocked.environment import env

# Captures for sizes that the first one does not cover.
_CAPTURES = 8

_FILE_KIND, _FILE_VERSION = "torch_blocked.optimize", 2


def tuning_file() -> Path:
    """Where measurements of kernels are kept, by version and CPU; safe to delete."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    environment = env()
    name = "-".join(("tuning", environment["torch_blocked"], environment["cpu"]))
    return Path(root) / "torch_blocked" / (re.sub(r"[^\w.-]+", "_", name) + ".tsv")


class OptimizedModule(nn.Module):
    """The forward of a model in evaluation mode, for inference: results need no gradients.

    It takes and returns what the model does; inputs of other sizes are planned when they first
    come. `choice` says what runs: "blocked", or "dense" if the model itself was measured to be
    faster. The weights are those the model had; calls from several threads run side by side."""

    def __init__(
        self,
        model: nn.Module | None,
        example: tuple,
        *,
        dynamic: bool,
        tune: bool,
        dtype: torch.dtype | None,
        captured: Capture | None = None,
        times: dict[str, tuple[str, float]] | None = None,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)  # no submodule: its parameters stay its own
        self._example = example
        self._dynamic, self._tune, self._dtype = dynamic, tune, dtype
        self._times = times or {}
        self._captures: OrderedDict[int, tuple[Capture, _C.Compiled]] = OrderedDict()
        self._released = False
        self.choice = "blocked"
        super().train(False)
        self._add(captured or self._captured(example), example)

    def _captured(self, args: tuple) -> Capture:
        try:
            if self._model is None:
                raise CaptureError("the model is gone")
            captured = capture(self._model, args, self._dynamic)
        except CaptureError as error:
            if not self._captures:
                raise
            wanted = next(iter(self._captures.values()))[0].input_dims
            raise ValueError(
                f"torch_blocked::optimize: expected inputs of sizes {wanted} (-1: any), got "
                f"{[list(each.shape) for each in _tensors(args)]}; optimize the model for them"
            ) from error
        if self._dtype is not None:
            captured.constants = {
                value: each.to(self._dtype) if each.is_floating_point() else each
                for value, each in captured.constants.items()
            }
        return captured

    def _add(self, captured: Capture, args: tuple) -> tuple[Capture, _C.Compiled]:
        path = tuning_file()
        with contextlib.suppress(OSError):  # without a file each process measures anew
            path.parent.mkdir(parents=True, exist_ok=True)
        tensors = self._inputs(args)
        compiled = _C.Compiled(captured, tensors, self._tune, str(path), self._times)
        compiled.prepare(tensors)
        self._captures[id(captured)] = (captured, compiled)
        if len(self._captures) > _CAPTURES:
            self._captures.popitem(last=False)
        return captured, compiled

    def _compiled_for(self, args: tuple) -> tuple[Capture, _C.Compiled]:
        tensors = _tensors(args)
        for found in self._captures.values():
            if _covers(found[0], tensors):
                return found
        return self._add(self._captured(args), args)

    def _inputs(self, args: tuple) -> list[Tensor]:
        tensors = [
            each.to_dense() if each.layout != torch.strided else each for each in _tensors(args)
        ]
        if self._dtype is None:
            return tensors
        return [each.to(self._dtype) if each.is_floating_point() else each for each in tensors]

    def forward(self, *args):
        """As the model's."""
        if self.choice == "dense":
            with torch.no_grad():
                return self._model(*args)
        captured, compiled = self._compiled_for(args)
        results = iter(compiled(self._inputs(args)))
        outputs = [next(results) if _is_value(each) else each for each in captured.outputs]
        if self._dtype is not None:
            outputs = [
                each.float() if isinstance(each, Tensor) and each.dtype == self._dtype else each
                for each in outputs
            ]
        return pytree.tree_unflatten(outputs, pytree.treespec_loads(captured.out_spec))

    def train(self, mode: bool = True) -> OptimizedModule:
        """Only train(False), which does nothing. Raises NotImplementedError otherwise."""
        if mode:
            refuse_training()
        return self

    def plan(self, *args) -> str:
        """A table of what runs for inputs like `args` (none: the example): each step with its
        output, format, implementation, time in microseconds and why."""
        args = args or self._example
        _, compiled = self._compiled_for(args)
        rows = [("op", "output", "implementation", "us", "why")]
        for step in compiled.report(self._inputs(args)):
            rows.append(
                (step.op, step.output, step.implementation, f"{step.microseconds:.1f}", step.why)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
            ).rstrip()
            for row in rows
        ]
        packed = compiled.packed_bytes() / 2**20
        arena = compiled.arena_bytes(self._inputs(args)) / 2**20
        memory = f"packed weights {packed:.1f} MiB, activations {arena:.1f} MiB"
        return "\n".join([f"runs: {self.choice}; {memory}", *lines])

    def release(self) -> None:
        """Lets go of the dense weights and of the model; packed weights stay. From now on only
        inputs of sizes that ran before are taken, others raise ValueError, as does save().

        Raises ValueError if it is the model itself that runs, having been faster."""
        if self.choice == "dense":
            raise ValueError(
                "torch_blocked::optimize: expected choice 'blocked', got 'dense'; there is nothing "
                "to release, the model itself runs"
            )
        object.__setattr__(self, "_model", None)
        self._released = True
        for captured, _ in self._captures.values():
            captured.constants = {}
        gc.collect()  # torch.export leaves cycles that hold the parameters
        for _, compiled in self._captures.values():
            compiled.release()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the graph, its dense weights and what was measured; load() reads them, on any
        CPU."""
        if self._released:
            raise ValueError(
                "torch_blocked::optimize: expected dense weights to save, got a module after "
                "release(); save it before"
            )
        captured, compiled = next(iter(self._captures.values()))
        torch.save(
            {
                "kind": _FILE_KIND,
                "version": _FILE_VERSION,
                "capture": asdict(captured),
                "example": [torch.empty_like(each) for each in _tensors(self._example)],
                "in_spec": captured.in_spec,
                "tune": self._tune,
                "dtype": self._dtype,
                "cpu": env()["cpu"],
                "times": compiled.times(),
            },
            path,
        )


def optimize(
    model: nn.Module,
    example_inputs: Tensor | tuple,
    *,
    dynamic: bool = True,
    tune: bool = True,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A module that computes what `model` does, faster.

    example_inputs: a tensor or a tuple of the model's positional arguments.
    dynamic: sizes other than the channels may change from call to call.
    tune: time the kernels that fit on each layer, and the result against the model, which runs on
    if it is faster; False: take kernels by estimates.
    dtype: torch.bfloat16 computes in it; results are float32 still.
    A model that cannot be captured as one graph runs in parts (compile.py); its plan() says why.
    Raises ValueError if the model is in training mode, TypeError for other example inputs,
    NotImplementedError for a dtype that the CPU lacks, what the model raises for the example."""
    if model.training:
        raise ValueError(
            "torch_blocked::optimize: expected a model in evaluation mode, got training mode; "
            "call eval()"
        )
    _check_dtype(dtype)
    if not isinstance(example_inputs, Tensor | tuple):
        raise TypeError(
            "torch_blocked::optimize: expected example_inputs as a tensor or a tuple of arguments, "
            f"got {type(example_inputs).__name__}; put the model's arguments into a tuple"
        )
    example = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    try:
        optimized = OptimizedModule(model, example, dynamic=dynamic, tune=tune, dtype=dtype)
    except CaptureError as error:
        if dtype is not None:
            raise
        return _in_parts(model, example, error)
    if tune and _is_slower(optimized, model, example):
        optimized.choice = "dense"
    return optimized


def _in_parts(model: nn.Module, example: tuple, error: CaptureError) -> nn.Module:
    from torch_blocked.compile import OptimizedParts

    reason = str(error.__cause__ or error).strip().splitlines()[0]
    with torch.no_grad():
        model(*example)  # what the model itself refuses, it says best
    return OptimizedParts(model, reason)


def refuse_training() -> NoReturn:
    raise NotImplementedError(
        "torch_blocked::optimize: expected inference, got train(); train the model that was "
        "optimized, on x.to_blocked(), and optimize it again"
    )


def load(path: str | os.PathLike) -> OptimizedModule:
    """What OptimizedModule.save wrote, planned for this CPU. Nothing in the file is executed.

    Raises ValueError if the file is none of ours, or broken."""
    try:
        data = torch.load(path, weights_only=True)
        if data["kind"] != _FILE_KIND or data["version"] != _FILE_VERSION:
            raise ValueError(f"kind {data['kind']}, version {data['version']}")
        fields = data["capture"]
        captured = Capture(**{**fields, "nodes": [Node(**node) for node in fields["nodes"]]})
        example = pytree.tree_unflatten(data["example"], pytree.treespec_loads(data["in_spec"]))[0]
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"torch_blocked::load: expected a file written by save(), got {path} "
            f"({str(error).splitlines()[0]}); save the optimized module again"
        ) from error
    _check_dtype(data["dtype"])
    return OptimizedModule(
        None,
        example,
        dynamic=False,
        tune=data["tune"],
        dtype=data["dtype"],
        captured=captured,
        times=data["times"] if data["cpu"] == env()["cpu"] else None,
    )


def _check_dtype(dtype: torch.dtype | None) -> None:
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
    return _C.isa() == "avx512" and torch.cpu._is_avx512_bf16_supported()


def _is_slower(model: nn.Module, rival: nn.Module, args: tuple) -> bool:
    """Whether the rival wins most of seven rounds; in turn, so that noise meets both."""
    wins, losses = 0, 0
    with torch.no_grad():
        for each in (model, rival):
            each(*args)  # the first run is not like the others
        while wins < 4 and losses < 4:
            if _seconds(rival, args) < _seconds(model, args):
                losses += 1
            else:
                wins += 1
    return losses > wins


def _seconds(model: nn.Module, args: tuple) -> float:
    start = time.perf_counter()
    model(*args)
    return time.perf_counter() - start


def _is_value(entry) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] == VALUE


def _tensors(args: tuple) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(args) if isinstance(each, Tensor)]


def _covers(captured: Capture, tensors: list[Tensor]) -> bool:
    return len(tensors) == len(captured.input_dims) and all(
        len(dims) == tensor.dim()
        and all(wanted in (-1, size) for wanted, size in zip(dims, tensor.shape, strict=True))
        for dims, tensor in zip(captured.input_dims, tensors, strict=True)
    )
