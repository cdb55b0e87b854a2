"""Copies, conversions and factories that follow a blocked tensor."""

from __future__ import annotations

import torch

from torch_blocked.ops.table import DIRECT, clear_tail, implements, to_blocked_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

_KEEP = (None, torch.preserve_format)
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@implements(aten.detach.default, aten.alias.default)
def alias(func, input):
    return BlockedTensor(func(input._physical), input._channels)


# Autograd detaches every result that it saves. Nothing changes a physical tensor but its values,
# so two blocked tensors may hold the same one.
DIRECT[aten.detach.default] = (lambda physical: physical, True)


@implements(aten.clone.default)
def clone(func, input, memory_format=None):
    if memory_format in _KEEP:
        return BlockedTensor(input._physical.clone(), input._channels)
    return _tb.to_dense(
        input._physical, input._channels, channels_last=memory_format in _CHANNELS_LAST
    )


@implements(aten._to_copy.default)
def to_copy(func, input, *, dtype=None, memory_format=None, device=None, **rest):
    if device is not None and torch.device(device).type != "cpu":
        return NotImplemented
    if memory_format in _KEEP:
        return BlockedTensor(func(input._physical, dtype=dtype), input._channels)
    return _tb.to_dense(
        input._physical,
        input._channels,
        channels_last=memory_format in _CHANNELS_LAST,
        dtype=dtype,
    )


@implements(aten.copy_.default)
def copy_(func, input, source, non_blocking=False):
    if not isinstance(input, BlockedTensor) or source.shape != input.shape:
        return NotImplemented
    input._physical.copy_(to_blocked_like(source, input)._physical)
    return input


@implements(aten.zero_.default)
def zero_(func, input):
    func(input._physical)
    return input


@implements(aten.empty_like.default, aten.zeros_like.default)
def zeros_like(func, input, *, memory_format=None, **options):
    """empty_like too: its tail must be zero, and the rest may as well."""
    if memory_format not in _KEEP or options.get("device") not in (None, torch.device("cpu")):
        return NotImplemented
    dtype = options.get("dtype")
    return BlockedTensor(torch.zeros_like(input._physical, dtype=dtype), input._channels)


@implements(aten.ones_like.default, aten.full_like.default)
def full_like(func, input, *value, memory_format=None, **options):
    if memory_format not in _KEEP or options.get("device") not in (None, torch.device("cpu")):
        return NotImplemented
    return clear_tail(func(input._physical, *value, dtype=options.get("dtype")), input._channels)
