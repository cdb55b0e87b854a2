"""Elements named by index tensors: gather, scatter, index, index_put and index_add.

Along N and the spatial dims ATen's ops run on the physical tensor. Along C we have a kernel for an
index of one channel per pixel; for a list of channels it is `shuffle.gather_channels`."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.descriptor import blocked_dims
from torch_blocked.ops.contract import as_dense, expect, implements, wrapped_dim
from torch_blocked.ops.operands import clear_tail, to_blocked_like
from torch_blocked.ops.shuffle import channel_list, gather_channels
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


@implements(aten.gather.default, takes="input: blocked, dim: dim")
def gather(func, input, dim, index, sparse_grad=False):
    """Along C the result is dense, like the index."""
    if dim == 1:
        channels = _one_channel(index, input.shape)
        return _tb.pick_channels(input._physical, input._channels, channels).unsqueeze(1)
    alike = index.dim() == input.dim() and index.shape[1] == input._channels
    expect(alike, "an index of the rank and channels of the input")
    out = func(input._physical, dim, to_blocked_like(index, input)._physical)
    return BlockedTensor(out, input._channels)


@implements(aten.scatter.src, aten.scatter_add.default)
def scatter(func, input, dim, index, src):
    like = next(t for t in (input, src, index) if isinstance(t, BlockedTensor))
    dim = wrapped_dim(dim, like.dim())
    alike = input.dim() == index.dim() and input.dtype == src.dtype and src.shape == index.shape
    expect(alike, "input, index and src of one rank, src of input's dtype and index's dims")
    written = to_blocked_like(input, like)
    if dim == 1:
        channels = _one_channel(index, input.shape)
        return _scatter_channel(func, written, channels, as_dense(src).squeeze(1))
    expect(index.shape[1] == input.shape[1], "an index with the channels of the input")
    physicals = [to_blocked_like(value, like)._physical for value in (index, src)]
    return BlockedTensor(func(written._physical, dim, *physicals), written._channels)


def _scatter_channel(func, input, index, values) -> BlockedTensor:
    """Adds to one channel of every pixel, or replaces it."""
    channels, kept = input._channels, input._physical
    if func is aten.scatter.src:
        ones = torch.ones_like(values)
        chosen = _tb.place_channels(ones, index, channels, input.block) != 0
        kept = kept.masked_fill(chosen, 0)
    return BlockedTensor(kept + _tb.place_channels(values, index, channels, input.block), channels)


def _one_channel(index: Tensor, dims) -> Tensor:
    """`index`, which names a channel for every pixel, [N, 1, *spatial], as [N, *spatial]."""
    expect(tuple(index.shape) == (dims[0], 1, *dims[2:]), "an index of one channel a pixel")
    return as_dense(index).squeeze(1)


@implements(aten.index.Tensor, takes="input: blocked")
def index(func, input, indices):
    """Takes one list of positions along any dim; other indices fall back."""
    if _only_dim(indices) != 1:
        return BlockedTensor(func(input._physical, indices), input._channels)
    return gather_channels(input, _wrapped_channels(indices[1], input._channels))


def _wrapped_channels(index: Tensor, count: int) -> list[int]:
    """The channels, of `count`, that `index` names, counted from 0."""
    channels = channel_list(index)
    expect(all(-count <= channel < count for channel in channels), f"channels below {count}")
    return [channel % count for channel in channels]


@implements(
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
    takes="input: blocked",
)
def index_put(func, input, indices, values, *accumulate):
    writes = func._schema.is_mutable
    if _only_dim(indices) == 1:
        adds = any(accumulate[:1]) and not writes
        expect(adds and values.dim() == input.dim(), "values that are added to channels")
        return _add_channels(input, indices[1], to_blocked_like(values, input), 1)
    if values.dim() == 0:
        physical = as_dense(values)
    else:
        alike = values.dim() == input.dim() and values.shape[1] == input._channels
        expect(alike, "values of the rank and channels of the input")
        physical = to_blocked_like(values, input)._physical
    out = func(input._physical, indices, physical, *accumulate)
    blocked = clear_tail(out, input._channels)
    return input if writes else blocked


@implements(
    aten.index_add.default,
    aten.index_add_.default,
    takes="input: blocked, dim: dim, source: alike",
)
def index_add(func, input, dim, index, source, alpha=1):
    others = [[n for at, n in enumerate(t.shape) if at != dim] for t in (input, source)]
    expect(others[0] == others[1], "a source with the dims of the input, except the indexed one")
    source = to_blocked_like(source, input)
    if dim != 1:
        out = func(input._physical, dim, index, source._physical, alpha=alpha)
        return input if func._schema.is_mutable else BlockedTensor(out, input._channels)
    from_end = any(channel < 0 for channel in channel_list(index))
    expect(not from_end, "channels counted from 0, others are for index_put")
    out = _add_channels(input, index, source, alpha)
    if not func._schema.is_mutable:
        return out
    input._physical.copy_(out._physical)
    return input


def _add_channels(input, index, source, alpha):
    """Adds `source` to the channels that `index` names, in the order of `index`."""
    count = input._channels
    channels = _wrapped_channels(index, count)
    expect(len(channels) == source._channels, "as many channels named as given")
    out = input._physical
    for where in _rounds(channels, count):
        out = out.add(gather_channels(source, where)._physical, alpha=alpha)
    return BlockedTensor(out, count)


def _rounds(channels: list[int], count: int) -> list[list[int]]:
    """[k][channel]: the place in `channels` that names the channel for the k-th time, or -1."""
    rounds: list[list[int]] = [[-1] * count]
    for position, channel in enumerate(channels):
        free = next((row for row in rounds if row[channel] < 0), None)
        if free is None:
            rounds.append(free := [-1] * count)
        free[channel] = position
    return rounds


@implements(aten.index_fill.int_Scalar, takes="input: blocked, dim: dim but C")
def index_fill(func, input, dim, index, value):
    return clear_tail(func(input._physical, dim, index, value), input._channels)


def _only_dim(indices) -> int:
    """The only indexed dim, whose index is a 1-D tensor of positions."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    one = indices[given[0]] if len(given) == 1 else None
    positions = one is not None and one.dim() == 1 and one.dtype == torch.int64
    expect(positions, "one list of positions")
    return given[0]


@torch.library.register_fake("torch_blocked::pick_channels")
def _(input, channels, index):
    return input.new_empty(index.shape)


@torch.library.register_fake("torch_blocked::place_channels")
def _(values, index, channels, block):
    n, *spatial = values.shape
    return values.new_empty(blocked_dims((n, channels, *spatial), block))
