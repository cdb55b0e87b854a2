"""Captures as the plain data of a saved model, and the checks of a file's data.

A file may come from anybody. torch.load(weights_only=True) reads it, which makes only plain data
and tensors. Then the data is checked here, by structure.py (names of types), and by
csrc/graph/capture/well_formed.cpp and loadable.cpp (ops, their arguments, numbers of values,
sizes). Nothing is believed without a check.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_blocked import _C, structure
from torch_blocked.calls import hashable
from torch_blocked.captured import CONSTANTS, VALUE, Capture, Node
from torch_blocked.remembered import steps_of

KIND, VERSION = "torch_blocked.optimize", 5

# Says whether a value has the right type and bounds.
_Rule = Callable[[Any], bool]


def to_data(signature: tuple[Any, Any], captured: Capture) -> dict[str, Any]:
    """A capture, and the signature of the calls that it serves, as data for torch.save, which later
    calls do not change."""
    names = [each.name for each in fields(Capture) if each.name != "ran"]
    data = {name: getattr(captured, name) for name in names}
    data["also"] = list(captured.also)  # later calls add to it and take from it
    # A file for others must not reveal folders of this machine.
    data["nodes"] = [vars(node) | {"line": os.path.basename(node.line)} for node in captured.nodes]
    data["out_spec"] = structure.dumps(captured.out_spec)
    spec, constants = signature
    return {
        "capture": data,
        "spec": spec if isinstance(spec, int) else structure.dumps(spec),
        "constants": [each for _, each in constants],
    }


def of_data(data: dict[str, Any]) -> tuple[tuple[Any, Any], Capture]:
    """The signature and the capture that to_data() was given, from checked data. Raises ValueError
    if parts of it contradict each other."""
    spec = data["spec"] if isinstance(data["spec"], int) else structure.loads(data["spec"])
    constants = tuple((type(each), each) for each in data["constants"])
    captured = dict(data["capture"])
    captured["nodes"] = [Node(**node) for node in captured["nodes"]]
    captured["out_spec"] = structure.loads(captured["out_spec"])
    capture = Capture(**captured)
    _check_counts(spec, constants, capture)
    return (spec, hashable(constants)), capture


def save(data: dict[str, Any], path: str | os.PathLike[str] | IO[bytes]) -> None:
    whole = signed(data | {"kind": KIND, "version": VERSION})
    if not isinstance(path, (str, os.PathLike)):
        _write(whole, path)
    elif os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
        with open(path, "wb") as file:
            _write(whole, file)
    else:
        _replace(whole, os.path.realpath(path))


def _replace(data: dict[str, Any], path: str) -> None:
    """Writes a file beside the one at `path`, and puts it there when it is complete. A full disk or
    the end of the process leaves the older file as it was."""
    part = os.path.join(os.path.dirname(path), f".torch_blocked-{secrets.token_hex(8)}")
    try:
        with open(part, "xb") as file:
            if os.path.exists(path):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            _write(data, file)
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):  # it names the file that the caller knows
            raise OSError(error.errno, error.strerror, path) from error
        raise


def _write(data: dict[str, Any], file: IO[bytes]) -> None:
    sink = _Sink(file)
    torch.save(data, cast("IO[bytes]", sink))
    if sink.error:
        raise sink.error
    file.flush()


class _Sink:
    """A file for torch.save, which raises another error after that of a file, without the reason.
    So the first error waits here."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: Exception | None = None

    def write(self, content: Any) -> int:
        try:
            return len(content) if self.error else self._file.write(content)
        except Exception as error:
            self.error = error
            return len(content)

    def flush(self) -> None:
        """_write() does it."""


def signed(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with a checksum, which reveals bits that a disk or a network has changed. It does not
    protect against intent: whoever changes a file can make another checksum."""
    data = {name: each for name, each in data.items() if name != "checksum"}
    return data | {"checksum": _checksum(data)}


def read(path: str | os.PathLike[str] | IO[bytes]) -> dict[str, Any]:
    """The data of a file that save() wrote, with types and bounds checked. Raises OSError if there
    is no file, and other exceptions for any other content."""
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as file:  # OSError for a missing file, before errors of content
            bytes_ = _checked_size(file)
    else:
        bytes_ = _checked_size(path)
    data = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ValueError("a file of another kind")
    if data.get("version") != VERSION:
        raise ValueError(f"a file of version {data.get('version')}, not {VERSION}")
    _check_tensors(data, bytes_)
    if data.get("checksum") != _checksum({k: v for k, v in data.items() if k != "checksum"}):
        raise ValueError("content that does not match its checksum")
    _check(data, _FILE, "the file")
    for form in data["forms"]:
        _check(form, _FORM, "a form")
        _check(form["capture"], _CAPTURE, "a capture")
        for node in form["capture"]["nodes"]:
            _check(node, _NODE, "an op")
    return data


def example_of(data: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the model was optimized for."""
    args, kwargs = structure.unflatten(data["example"], structure.loads(data["example_spec"]))
    if not (isinstance(args, tuple) and isinstance(kwargs, dict)):
        raise ValueError("an example that is no call")
    return args, kwargs


def refusal_of(data: dict[str, Any], more: set[str]) -> str:
    """Why the file is not loaded, if it calls an op that it may not; else "". `more`: names of ops
    that it may call in addition to the list for all files."""
    calls = sorted(ops_of(data))
    refused = [name for name, overload in calls if not _C.is_loadable(name, overload)]
    if not (refused := [name for name in refused if name not in more]):
        return ""
    return (
        f"torch_blocked::load: expected ops that do nothing but compute their results, got "
        f"{', '.join(refused)}; if you trust who wrote the file, load it with ops={refused}"
    )


def ops_of(data: dict[str, Any]) -> set[tuple[str, str]]:
    """The ops that its captures call, by name and overload."""
    captures = [form["capture"] for form in data["forms"]]
    return {(node["name"], node["overload"]) for each in captures for node in each["nodes"]}


# ---- types --------------------------------------------------------------------------------------


def _is(*types: type) -> _Rule:
    return lambda value: type(value) in types


def _list(of: _Rule) -> _Rule:
    return lambda value: type(value) in (list, tuple) and all(of(each) for each in value)


def _tuple(*of: _Rule) -> _Rule:
    return lambda value: (
        type(value) in (list, tuple)
        and len(value) == len(of)
        and all(rule(each) for rule, each in zip(of, value, strict=True))
    )


def _dict(keys: _Rule, values: _Rule) -> _Rule:
    return lambda value: (
        type(value) is dict and all(keys(key) and values(each) for key, each in value.items())
    )


def _one_of(*values: Any) -> _Rule:
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def _is_time(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0


def _is_constant(value: Any) -> bool:
    return type(value) in CONSTANTS


def _is_argument(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_argument(each) for each in value)
    if type(value) is int:
        return _int(value)
    return type(value) in (*CONSTANTS, torch.layout, torch.memory_format)


def _is_tensor(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _is_value(value: Any) -> bool:
    return type(value) is list and _tuple(_one_of(VALUE), _int)(value)


def _int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


_text, _ints = _is(str), _list(_int)
_dtype = _is(torch.dtype)
_meta = _tuple(_ints, _dtype)
_metas = _list(_meta)

_FILE: dict[str, _Rule] = {
    "kind": _text,
    "version": _int,
    "checksum": _text,
    "forms": lambda value: _list(_is(dict))(value) and len(value) > 0,
    "example": _list(lambda value: _is_tensor(value) or type(value) not in (list, tuple, dict)),
    "example_spec": _text,
    "tune": _one_of(True, False, "full"),
    "dtype": _one_of(None, torch.float32, torch.bfloat16),
    "keep": _list(_text),
    "choice": _one_of("blocked", "dense"),
    "cpu": _text,
    "measured_with": _text,
    "times": _dict(_text, _tuple(_text, _is_time)),
}
_FORM: dict[str, _Rule] = {
    "capture": _is(dict),
    "spec": _is(int, str),
    "constants": _list(lambda value: not isinstance(value, Tensor)),
}
_CAPTURE: dict[str, _Rule] = {
    "nodes": _list(_is(dict)),
    "inputs": _ints,
    "outputs": _list(lambda value: _is_constant(value) or _is_value(value)),
    "constants": _dict(_int, _is_tensor),
    "lifted": _ints,
    "input_metas": _metas,
    "also": _list(_metas),
    "metas": _dict(_int, _meta),
    "questions": _list(_tuple(_int, _int, _ints)),
    "fixed_sizes": _is(bool),
    "blocked": _dict(_int, _int),
    "out_spec": _text,
    "notice": _text,
    "sets_attributes": _is(bool),
}
_NODE: dict[str, _Rule] = {
    "name": _text,
    "overload": _text,
    "arguments": _list(_is_argument),
    "outputs": _ints,
    "module": _text,
    "line": _text,
}


def _check(record: dict[str, Any], rules: dict[str, _Rule], of: str) -> None:
    if record.keys() != rules.keys():
        raise ValueError(f"other entries of {of}: {sorted(map(str, record.keys() ^ rules.keys()))}")
    for name, rule in rules.items():
        if not rule(record[name]):
            raise ValueError(f"{of} whose {name} is of another type")


def _check_counts(spec: Any, constants: tuple[Any, ...], capture: Capture) -> None:
    leaves = spec if isinstance(spec, int) else spec.num_leaves
    if leaves != len(capture.inputs) + (0 if isinstance(spec, int) else len(constants)):
        raise ValueError("a call of more or fewer arguments than its graph has")
    if capture.out_spec.num_leaves != len(capture.outputs):
        raise ValueError("more or fewer results than its graph has")
    if not set(capture.lifted) <= capture.constants.keys():
        raise ValueError("constants that are not there")
    for place, channels in capture.blocked.items():
        is_there = 0 <= place < len(capture.outputs)
        if not is_there or not _is_value(capture.outputs[place]) or channels < 1:
            raise ValueError("a blocked result that is not there")


# ---- content ------------------------------------------------------------------------------------


def _checked_size(file: IO[bytes]) -> int:
    """The size of a file whose records are not compressed. Raises otherwise: a small compressed
    file could fill the memory."""
    begin = file.tell()
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    size = file.seek(0, os.SEEK_END)
    file.seek(begin)
    is_packed = any(each.compress_type != zipfile.ZIP_STORED for each in records)
    if is_packed or sum(each.file_size for each in records) > size:
        raise ValueError("compressed records")
    return size


def _tensors(value: Any) -> Iterable[Tensor]:
    """The tensors in plain data, as often as they occur."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _check_tensors(data: dict[str, Any], size: int) -> None:
    """Raises ValueError for a tensor that its memory, in a file of this size, cannot hold."""
    held: dict[int, int] = {}
    for tensor in _tensors(data):
        plain = _is_tensor(tensor) and tensor.layout == torch.strided and tensor.is_cpu
        if not plain:
            raise ValueError("tensors that are not of the CPU or not strided")
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((n - 1) * step for n, step in steps)
        if tensor.numel() and (last + 1) * tensor.element_size() > storage.nbytes():
            raise ValueError("a tensor that ends beyond its memory")
    if sum(held.values()) > size:
        raise ValueError("tensors without content")


def _checksum(data: dict[str, Any]) -> str:
    """A checksum of plain data by its text, and of tensors by their memory, which some may
    share."""
    hashes: dict[int, int] = {}

    def content(tensor: Tensor) -> tuple[Any, ...]:
        if tensor.layout != torch.strided or not tensor.is_cpu:  # save() never writes such a tensor
            return str(tensor.dtype), str(tensor.device), str(tensor.layout)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in hashes:
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            hashes[storage.data_ptr()] = _C.content_hash(memory)
        form = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        flags = tensor.is_conj(), tensor.is_neg(), steps_of(tensor)
        return str(tensor.dtype), form, flags, hashes[storage.data_ptr()]

    plain = pytree.tree_map_only(Tensor, content, data)
    return hashlib.sha256(repr(plain).encode()).hexdigest()
