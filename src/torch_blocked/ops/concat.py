"""Concatenation over any dim, and its reverse, slices; over the channels at any offset."""

from __future__ import annotations

import itertools

import torch

from torch_blocked.descriptor import blocked_dims, blocks_of
from torch_blocked.ops.contract import expect, implements, wrapped_dim
from torch_blocked.ops.operands import to_blocked_like
from torch_blocked.shadow import channel_view
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


@implements(aten.cat.default)
def cat(func, tensors, dim=0):
    like = next(t for t in tensors if isinstance(t, BlockedTensor))
    dim = wrapped_dim(dim, like.dim())
    expect(_are_alike(tensors, like), "tensors of one rank and dtype")
    blocked = [to_blocked_like(t, like) for t in tensors]
    channels = [t._channels for t in blocked]
    physicals = [t._physical for t in blocked]
    if dim == 1:
        out = torch.ops.torch_blocked.concat_channels(physicals, channels)
        return BlockedTensor(out, sum(channels))
    expect(len(set(channels)) == 1, "tensors of as many channels")
    return BlockedTensor(func(physicals, dim), channels[0])


def _are_alike(tensors, like: BlockedTensor) -> bool:
    return all(t.dim() == like.dim() and t.dtype == like.dtype for t in tensors)


@implements(aten.stack.default)
def stack(func, tensors, dim=0):
    """Along a new spatial dim. With a new dim before C, or a sixth, the result is dense."""
    like = next(t for t in tensors if isinstance(t, BlockedTensor))
    rank = like.dim() + 1
    place = wrapped_dim(dim, rank)
    if place < 2 or rank > 5:
        return func([t.to_dense() if isinstance(t, BlockedTensor) else t for t in tensors], dim)
    alike = all(t.shape == like.shape and t.dtype == like.dtype for t in tensors)
    expect(alike, "tensors of one shape and dtype")
    physicals = [to_blocked_like(t, like)._physical for t in tensors]
    return BlockedTensor(func(physicals, place), like._channels)


@torch.library.register_fake("torch_blocked::concat_channels")
def _(inputs, channels):
    n, _, *spatial, block = inputs[0].shape
    return inputs[0].new_empty(blocked_dims((n, sum(channels), *spatial), block))


@implements(aten.slice.Tensor, takes="input: blocked, dim: dim")
def slice_(func, input, dim=0, start=None, end=None, step=1):
    """A view, but channels that are not whole blocks are copied."""
    if dim != 1:  # [N, C/b, *spatial, b] has N and the spatial dims in the same places
        return BlockedTensor(func(input._physical, dim, start, end, step), input._channels)
    first, last, _ = slice(start, end).indices(input._channels)
    expect(step == 1, "step 1 over the channels")
    return _channels(input, first, max(last - first, 0))


@implements(aten.split.Tensor, aten.unsafe_split.Tensor, takes="input: blocked, dim: dim")
def split(func, input, size, dim=0):
    total = input.shape[dim]
    expect(size > 0, "a size above 0")
    sizes = [min(size, total - start) for start in range(0, max(total, 1), size)]
    return split_with_sizes(func, input, sizes, dim)


@implements(
    aten.split_with_sizes.default,
    aten.unsafe_split_with_sizes.default,
    takes="input: blocked, dim: dim",
)
def split_with_sizes(func, input, sizes, dim=0):
    expect(sum(sizes) == input.shape[dim], "sizes that add up to that of the dim")
    starts = [0, *itertools.accumulate(sizes)][:-1]
    return [
        slice_(aten.slice.Tensor, input, dim, start, start + size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _channels(input: BlockedTensor, start: int, length: int) -> BlockedTensor:
    """Channels [start, start + length) of `input`."""
    block = input.block
    if start % block == 0 and (length % block == 0 or start + length == input._channels):
        physical = input._physical.narrow(1, start // block, blocks_of(length, block))
        return BlockedTensor(physical, length)
    return channel_view(input, start, length)


@implements(aten.slice_backward.default, takes="grad_output: blocked, dim: dim")
def slice_backward(func, grad_output, input_sizes, dim, start, end, step):
    """The gradient of a slice: zeros around it."""
    physical, channels = grad_output._physical, grad_output._channels
    if dim != 1:
        sizes = [*physical.shape]
        sizes[dim] = input_sizes[dim]
        return BlockedTensor(func(physical, sizes, dim, start, end, step), channels)
    expect(step == 1, "step 1 over the channels")
    first, _, _ = slice(start, end).indices(input_sizes[1])
    counts = [first, channels, input_sizes[1] - first - channels]
    n, _, *spatial, block = physical.shape
    parts = [physical.new_zeros(blocked_dims((n, count, *spatial), block)) for count in counts]
    parts[1] = physical
    return BlockedTensor(_tb.concat_channels(parts, counts), input_sizes[1])


@implements(aten.slice_scatter.default, takes="input: blocked, src: alike, dim: dim")
def slice_scatter(func, input, src, dim=0, start=None, end=None, step=1):
    placed, channels = to_blocked_like(src, input), input._channels
    if dim != 1:
        expect(placed._channels == channels, "src of as many channels")
        out = func(input._physical, placed._physical, dim, start, end, step)
        return BlockedTensor(out, channels)
    first, last, _ = slice(start, end).indices(channels)
    fits = placed._channels == last - first and placed.shape[2:] == input.shape[2:]
    expect(step == 1 and fits, "step 1 over the channels, and src of the dims of the slice")
    counts = [first, last - first, channels - last]
    parts = [_tb.slice_channels(input._physical, channels, *part)
             for part in ((0, first), (last, channels - last))]  # fmt: skip
    parts.insert(1, placed._physical)
    return BlockedTensor(_tb.concat_channels(parts, counts), channels)


@torch.library.register_fake("torch_blocked::slice_channels")
def _(input, channels, start, length):
    n, _, *spatial, block = input.shape
    return input.new_empty(blocked_dims((n, length, *spatial), block))
