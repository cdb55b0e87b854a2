"""Remembers what `optimize` has compared with its model on this machine, to do it only once.

If a graph with its weights and plan was found right and faster than the model, it will be so again:
the same kernels give the same bits for the same numbers. A file keeps hashes of three kinds: of a
call (a model, its weights and the sizes of its inputs), of its capture, and of its plan.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_blocked import _C
from torch_blocked.captured import Capture
from torch_blocked.environment import ISA_LIMITS, append_lines, read_lines, tuning_file


def compared_file() -> Path | None:
    """A file with one hash a line, by version, kernels and CPU like the tuning file. It is safe to
    delete."""
    file = tuning_file()
    return file and file.with_name(file.name.replace("tuning", "compared", 1))


class Compared:
    """The hashes in the file at the time of construction, and those noted since."""

    def __init__(self) -> None:
        self._file = compared_file()
        self._known = set(read_lines(self._file))

    def __contains__(self, key: str) -> bool:
        return bool(key) and key in self._known

    def note(self, *keys: str) -> None:
        new = [key for key in keys if key and key not in self._known]
        self._known.update(new)
        append_lines(self._file, new)  # without a file each process compares anew


def key_of_call(model: nn.Module, arguments: Any, settings: Any) -> str:
    """The key of a model with its weights, the kinds and sizes of its arguments, the settings and
    the machine; "" if a weight has no strided memory of its own."""
    weights = _weights_of(model)
    if not all(_is_strided(each) for _, each in weights):
        return ""
    contents = [(name, *_content(each)) for name, each in weights]
    kind = type(model).__module__, type(model).__qualname__
    return _hash(kind, contents, arguments, settings, _machine())


def key_of_capture(model: nn.Module, call: str, captured: Capture) -> str:
    """The key of a capture for a call with this key; "" for a call without a key."""
    constants = captured.constants
    if not call or not all(_is_strided(each) for each in constants.values()):
        return ""
    names = {_place(each): name for name, each in _weights_of(model)}
    nodes = [(each.name, each.overload, each.arguments, each.outputs) for each in captured.nodes]
    rest = (
        [(value, names.get(_place(each)) or _content(each)) for value, each in constants.items()],
        captured.inputs,
        captured.outputs,
        captured.lifted,
        captured.input_metas,
        captured.questions,
        captured.fixed_sizes,
        captured.blocked,
        captured.out_spec,
        captured.notice,
        captured.sets_attributes,
    )
    return _hash(call, nodes, rest)


def key_of_plan(captured: str, outline: str) -> str:
    """The key of a plan for a capture with this key; "" for a capture without a key."""
    return captured and _hash(captured, outline)


def _weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _is_strided(tensor: Tensor) -> bool:
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout == torch.strided and not tensor.is_meta and not is_wrapper


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _content(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, steps_of(tensor), _C.content_hash(tensor.detach())


def steps_of(tensor: Tensor) -> Any:
    """Scales and zero points: the meaning of a quantized tensor's bytes."""
    if not tensor.is_quantized:
        return None
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.q_scale(), tensor.q_zero_point()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return scales.tolist(), zeros.tolist(), tensor.q_per_channel_axis()


def _machine() -> tuple[Any, ...]:
    limits = [os.environ.get(name) for name in ISA_LIMITS]
    kernels = torch.backends.cpu.get_cpu_capability()
    return _build(), torch.__version__, torch.get_num_threads(), _C.isa(), kernels, limits


def _build() -> tuple[int, int]:
    """Identifies the build of the extension. The file's name depends on kernels only, but another
    build may also simplify a graph in another way."""
    file = os.stat(_C.__file__)
    return file.st_size, file.st_mtime_ns


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
