"""Blocked tensors inside torch.export, which traces above autograd.

There, an op asks the tracing modes before the tensor, and takes a mode's "not mine, ask the tensor"
for the answer. So a blocked tensor steps past the modes, and lets them see what its handler does
with the physical tensor: the exported program holds ops on plain tensors only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_blocked import tensor
from torch_blocked.tensor import BlockedTensor

_KEY = torch._C.DispatchKey.PreDispatch


class ExportedTensor(BlockedTensor):
    """A blocked tensor while torch.export traces. Ops on one give another."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> Any:
        with torch._C.DisableTorchFunctionSubclass(), _modes_seen(False):
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        types = [BlockedTensor if t is ExportedTensor else t for t in types]
        with _modes_seen(torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0):
            result = tensor.dispatch(func, types, args, kwargs or {})
        return pytree.tree_map_only(BlockedTensor, exported, result)


def exported(value: BlockedTensor) -> ExportedTensor:
    """`value`, as torch.export can trace it."""
    if isinstance(value, ExportedTensor):
        return value
    return ExportedTensor(value._physical, value._channels)


@contextmanager
def _modes_seen(seen: bool) -> Iterator[None]:
    """Whether ops reach the modes of torch.export before the tensor they are called on."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, seen)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not seen)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)
