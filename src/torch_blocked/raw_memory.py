"""Answers to readers of raw memory, for tensors whose values do not lie as their strides say.

Addresses are refused, because readers would read and write in the order of dims and strides. In
C++ the storage refuses by itself (csrc/python/wrapper.cpp: deny_memory)."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor


class ShownStorage(torch.UntypedStorage):
    """The storage that a blocked tensor shows. Its size is that of the physical storage, and
    `resize_(0)` frees that. A caller that restores the size counts the bytes of the dense tensor,
    which may be fewer than those of whole blocks."""

    _physical: torch.UntypedStorage
    _room: int

    def resize_(self, size: int) -> torch.UntypedStorage:
        self._physical.resize_(max(size, self._room) if size else 0)
        return self

    def nbytes(self) -> int:
        return self._physical.nbytes()

    size = nbytes

    def is_shared(self) -> bool:
        return self._physical.is_shared()

    def share_memory_(self) -> torch.UntypedStorage:
        self._physical.share_memory_()
        return self

    def data_ptr(self) -> NoReturn:
        refuse_address("untyped_storage().data_ptr", "a blocked one")


def shown_storage(storage: torch.UntypedStorage, memory: Tensor) -> torch.UntypedStorage:
    """`storage`, which has no data, as the storage of a tensor whose values are in `memory`."""
    physical = memory.untyped_storage()
    shown: Any = storage
    shown.__class__, shown._physical = ShownStorage, physical
    shown._room = max(physical.nbytes(), memory.nbytes)
    return storage


def refuse_address(op: str, got: str) -> NoReturn:
    raise RuntimeError(
        f"torch_blocked::{op}: expected a dense tensor, got {got}, whose values do not lie in "
        "memory as its strides say; call .to_dense() (of a view .clone()), or take the blocked "
        "memory as it lies by torch_blocked.Memory.of"
    )


def as_array(tensor: Tensor, force: bool = False) -> Any:
    """A copy of a dense tensor's values. It is read-only, because writes would not reach the
    blocked tensor."""
    array = tensor.numpy(force=force)
    if not force:
        array.flags.writeable = False
    return array


def array_for_numpy(tensor: Tensor, dtype: Any, copy: bool | None) -> Any:
    """The result of `__array__`. tensor: a dense copy."""
    if copy is False:
        raise ValueError(
            "torch_blocked::__array__: expected permission to copy, got copy=False; call "
            ".to_dense(), whose memory NumPy can share"
        )
    array = as_array(tensor, force=copy is True)
    return array if dtype is None else array.astype(dtype, copy=False)


def capsule(tensor: Tensor, arguments: dict[str, Any]) -> Any:
    """The result of `__dlpack__`. tensor: a dense copy."""
    if arguments.get("copy") is False:
        raise BufferError(
            "torch_blocked::__dlpack__: expected permission to copy, got copy=False; call "
            ".to_dense(), whose memory others can share"
        )
    return tensor.__dlpack__(**arguments)
