"""Copies, conversions and factories that follow a blocked tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.descriptor import blocked_dims
from torch_blocked.dispatch import DIRECT, DIRECT_BYTES
from torch_blocked.ops.contract import expect, implements
from torch_blocked.ops.operands import clear_tail, to_blocked_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

_KEEP = (None, torch.preserve_format)
_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}  # with their numbers of dims
_OPTIONS = "input: blocked, device: cpu, layout: strided, pin_memory: unpinned"


def _expect_rank(memory_format, input) -> None:
    rank = _CHANNELS_LAST.get(memory_format, input.dim())
    expect(rank == input.dim(), "a memory format of its rank")


@implements(aten.detach.default, aten.alias.default, takes="input: blocked")
def alias(func, input):
    return BlockedTensor(func(input._physical), input._channels)


# Autograd detaches every result that it saves. Only the values of a physical tensor ever change, so
# two blocked tensors may hold the same one.
DIRECT[aten.detach.default] = (lambda physical: physical, True)


@implements(aten.clone.default, takes="input: blocked")
def clone(func, input, memory_format=None):
    physical = input._physical
    if memory_format not in _KEEP:
        _expect_rank(memory_format, input)
        return _tb.to_dense(
            physical, input._channels, channels_last=memory_format in _CHANNELS_LAST
        )
    if type(physical) is Tensor and physical.nbytes >= DIRECT_BYTES:
        # Uses memory of the pool: in every step autograd clones values that hardtanh_ overwrites.
        return BlockedTensor(_tb.empty_like(physical).copy_(physical), input._channels)
    return BlockedTensor(physical.clone(), input._channels)


@implements(aten._to_copy.default, takes=_OPTIONS)
def to_copy(
    func,
    input,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    non_blocking=False,
    memory_format=None,
):
    if memory_format in _KEEP:
        return BlockedTensor(func(input._physical, dtype=dtype), input._channels)
    _expect_rank(memory_format, input)
    return _tb.to_dense(
        input._physical,
        input._channels,
        channels_last=memory_format in _CHANNELS_LAST,
        dtype=dtype,
    )


@implements(aten.copy_.default)
def copy_(func, input, source, non_blocking=False):
    if not isinstance(input, BlockedTensor):
        return func(input, _tb.to_dense(source._physical, source._channels))
    expect(source.shape == input.shape, "a source of the same dims")
    input._physical.copy_(to_blocked_like(source, input)._physical)
    return input


@implements(aten.zero_.default, takes="input: blocked")
def zero_(func, input):
    func(input._physical)
    return input


@implements(aten.empty_like.default, aten.zeros_like.default, takes=_OPTIONS)
def zeros_like(
    func, input, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None
):
    """empty_like gives zeros too: its tail must be zero, and the rest may be."""
    if memory_format not in _KEEP:
        return _dense_like(func, input, dtype, memory_format)
    return BlockedTensor(torch.zeros_like(input._physical, dtype=dtype), input._channels)


@implements(aten.ones_like.default, aten.full_like.default, takes=_OPTIONS)
def full_like(
    func, input, *value, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None
):
    if memory_format not in _KEEP:
        return _dense_like(func, input, dtype, memory_format, *value)
    return clear_tail(func(input._physical, *value, dtype=dtype), input._channels)


def _dense_like(func, input, dtype, memory_format, *value):
    """A dense tensor, for calls that name a memory format of torch. It has no values yet."""
    like = input._physical.new_empty(()).expand(input.shape)
    return func(like, *value, dtype=dtype, memory_format=memory_format)


@implements(
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    takes=_OPTIONS,
)
def new(func, input, size, *value, dtype=None, layout=None, device=None, pin_memory=None):
    """Blocked like `input` if the result has the same rank, else dense."""
    if len(size) != input.dim():
        return func(input._physical, size, *value, dtype=dtype)
    physical_shape = blocked_dims(size, input.block)
    if func in (aten.new_empty.default, aten.new_zeros.default):
        return BlockedTensor(input._physical.new_zeros(physical_shape, dtype=dtype), size[1])
    return clear_tail(func(input._physical, physical_shape, *value, dtype=dtype), size[1])


@implements(aten.new_empty_strided.default, takes="input: blocked")
def new_empty_strided(func, input, size, stride, **options):
    """Blocked if the strides are contiguous, which is what a blocked tensor shows."""
    contiguous = torch.empty(size, device="meta").stride()
    expect(tuple(stride) == tuple(contiguous), "the strides of a contiguous tensor")
    return new(aten.new_empty.default, input, size, **options)
