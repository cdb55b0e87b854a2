"""Elements named by index tensors: gather, scatter, index, index_put and index_add.

Along N and the spatial dims ATen's run on the physical tensor. Along C an index of one channel per
pixel has a kernel of ours, a list of channels is `shuffle.gather_channels`."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.descriptor import blocked_dims
from torch_blocked.ops.operands import clear_tail, to_blocked_like
from torch_blocked.ops.shuffle import channel_list, gather_channels
from torch_blocked.ops.table import implements
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


@implements(aten.gather.default)
def gather(func, input, dim, index, sparse_grad=False):
    """Along C the result is dense, as the index is."""
    if not isinstance(input, BlockedTensor) or not -input.dim() <= dim < input.dim():
        return NotImplemented
    dim %= input.dim()
    if dim == 1:
        if not _is_one_channel(index, input.shape):
            return NotImplemented
        channels = _dense(index).squeeze(1)
        return _tb.pick_channels(input._physical, input._channels, channels).unsqueeze(1)
    if index.dim() != input.dim() or index.shape[1] != input._channels:
        return NotImplemented
    out = func(input._physical, dim, to_blocked_like(index, input)._physical)
    return BlockedTensor(out, input._channels)


@implements(aten.scatter.src, aten.scatter_add.default)
def scatter(func, input, dim, index, src):
    like = next((t for t in (input, src, index) if isinstance(t, BlockedTensor)), None)
    if like is None or not -like.dim() <= dim < like.dim() or input.dtype != src.dtype:
        return NotImplemented
    if not input.dim() == index.dim() == src.dim() or src.shape != index.shape:
        return NotImplemented
    dim %= like.dim()
    written = to_blocked_like(input, like)
    if dim == 1:
        if not _is_one_channel(index, input.shape):
            return NotImplemented
        return _scatter_channel(func, written, _dense(index).squeeze(1), _dense(src).squeeze(1))
    if index.shape[1] != input.shape[1]:
        return NotImplemented
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


def _is_one_channel(index: Tensor, dims) -> bool:
    """Whether `index` names a channel for every pixel: [N, 1, *spatial]."""
    return tuple(index.shape) == (dims[0], 1, *dims[2:])


def _dense(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BlockedTensor):
        return _tb.to_dense(tensor._physical, tensor._channels)
    return tensor


@implements(aten.index.Tensor)
def index(func, input, indices):
    """With one list of positions, along any dim; other indices fall back."""
    dim = _only_dim(input, indices)
    if dim is None:
        return NotImplemented
    if dim != 1:
        return BlockedTensor(func(input._physical, indices), input._channels)
    channels = channel_list(indices[1])
    if channels is None or not all(-input._channels <= c < input._channels for c in channels):
        return NotImplemented
    return gather_channels(input, [channel % input._channels for channel in channels])


@implements(
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
)
def index_put(func, input, indices, values, *accumulate):
    dim = _only_dim(input, indices)
    if dim is None:
        return NotImplemented
    writes = func._schema.is_mutable
    if dim == 1:
        if writes or not (accumulate and accumulate[0]) or values.dim() != input.dim():
            return NotImplemented
        return _add_channels(input, indices[1], to_blocked_like(values, input), 1)
    if values.dim() == 0:
        physical = _dense(values)
    elif values.dim() == input.dim() and values.shape[1] == input._channels:
        physical = to_blocked_like(values, input)._physical
    else:
        return NotImplemented
    out = func(input._physical, indices, physical, *accumulate)
    blocked = clear_tail(out, input._channels)
    return input if writes else blocked


@implements(aten.index_add.default, aten.index_add_.default)
def index_add(func, input, dim, index, source, alpha=1):
    if not isinstance(input, BlockedTensor) or not -input.dim() <= dim < input.dim():
        return NotImplemented
    if source.dim() != input.dim() or source.dtype != input.dtype:
        return NotImplemented
    dim %= input.dim()
    others = [size for at, size in enumerate(source.shape) if at != dim]
    if others != [size for at, size in enumerate(input.shape) if at != dim]:
        return NotImplemented
    source = to_blocked_like(source, input)
    if dim != 1:
        out = func(input._physical, dim, index, source._physical, alpha=alpha)
        return input if func._schema.is_mutable else BlockedTensor(out, input._channels)
    if any(channel < 0 for channel in channel_list(index) or ()):
        return NotImplemented  # positions from the end are for index_put
    out = _add_channels(input, index, source, alpha)
    if out is NotImplemented or not func._schema.is_mutable:
        return out
    input._physical.copy_(out._physical)
    return input


def _add_channels(input, index, source, alpha):
    """`source` added to the channels that `index` names, in the order of their naming."""
    channels, count = channel_list(index), input._channels
    if channels is None or len(channels) != source._channels:
        return NotImplemented
    if not all(-count <= channel < count for channel in channels):
        return NotImplemented
    out = input._physical
    for where in _rounds([channel % count for channel in channels], count):
        out = out.add(gather_channels(source, where)._physical, alpha=alpha)
    return BlockedTensor(out, count)


def _rounds(channels: list[int], count: int) -> list[list[int]]:
    """For the k-th time that a channel is named, where: [k][channel], -1 for nowhere."""
    rounds: list[list[int]] = [[-1] * count]
    for position, channel in enumerate(channels):
        free = next((row for row in rounds if row[channel] < 0), None)
        if free is None:
            rounds.append(free := [-1] * count)
        free[channel] = position
    return rounds


@implements(aten.index_fill.int_Scalar)
def index_fill(func, input, dim, index, value):
    if not -input.dim() <= dim < input.dim() or dim % input.dim() == 1:
        return NotImplemented
    return clear_tail(func(input._physical, dim % input.dim(), index, value), input._channels)


def _only_dim(input, indices) -> int | None:
    """The dim that a 1-D tensor of positions indexes, if it is the only one."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if not isinstance(input, BlockedTensor) or len(given) != 1:
        return None
    index = indices[given[0]]
    if isinstance(index, BlockedTensor) or index.dim() != 1 or index.dtype != torch.int64:
        return None
    return given[0]


@torch.library.register_fake("torch_blocked::pick_channels")
def _(input, channels, index):
    return input.new_empty(index.shape)


@torch.library.register_fake("torch_blocked::place_channels")
def _(values, index, channels, block):
    n, *spatial = values.shape
    return values.new_empty(blocked_dims((n, channels, *spatial), block))
