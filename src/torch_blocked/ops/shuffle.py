"""Ops that reorder N, C or the spatial dims: index_select, flip, roll, repeat, channel and pixel
shuffles. Over N and the spatial dims ATen's ops run on the physical tensor. Our kernel gathers
channels in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_blocked.descriptor import blocked_dims
from torch_blocked.ops.contract import expect, implements, wrapped_dim
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


def gather_channels(input: BlockedTensor, index: Sequence[int]) -> BlockedTensor:
    """Channel i of the result is channel index[i] of `input`, or zeros if that is -1."""
    out = _tb.gather_channels(input._physical, input._channels, index)
    return BlockedTensor(out, len(index))


@implements(aten.index_select.default, takes="input: blocked, dim: dim")
def index_select(func, input, dim, index):
    if dim != 1:
        return BlockedTensor(func(input._physical, dim, index), input._channels)
    channels = channel_list(index)
    expect(all(channel >= 0 for channel in channels), "channels counted from 0")
    return gather_channels(input, channels)


def channel_list(index: torch.Tensor) -> list[int]:
    """The values of a 1-D integer tensor. Declines in a trace, where values are unknown."""
    values = not isinstance(index, (FakeTensor, BlockedTensor)) and not index.dtype.is_complex
    expect(values and index.dim() <= 1, "channels in a list whose values are known")
    return index.reshape(-1).tolist()


@implements(aten.flip.default, takes="input: blocked, dims: dims")
def flip(func, input, dims):
    if 1 in dims:
        input = gather_channels(input, range(input._channels)[::-1])
        dims.remove(1)
    return BlockedTensor(func(input._physical, dims), input._channels)


@implements(aten.roll.default, takes="input: blocked")
def roll(func, input, shifts, dims=()):
    expect(len(dims) == len(shifts) > 0, "a dim for each shift")  # no dims would mean a flat tensor
    dims = [wrapped_dim(dim, input.dim()) for dim in dims]
    for shift, dim in zip(shifts, dims, strict=True):
        if dim == 1:
            channels = input._channels
            input = gather_channels(input, [(c - shift) % channels for c in range(channels)])
        else:
            input = BlockedTensor(func(input._physical, [shift], [dim]), input._channels)
    return input


@implements(aten.repeat.default, takes="input: blocked")
def repeat(func, input, repeats):
    each = len(repeats) == input.dim() and all(count >= 0 for count in repeats)
    expect(each, "a count of 0 or more for each dim")
    batch, channels, *spatial = repeats
    if channels != 1:
        input = gather_channels(input, [*range(input._channels)] * channels)
    return BlockedTensor(func(input._physical, [batch, 1, *spatial, 1]), input._channels)


@implements(
    aten.channel_shuffle.default, aten.native_channel_shuffle.default, takes="input: blocked"
)
def channel_shuffle(func, input, groups):
    channels = input._channels
    expect(groups > 0 and channels % groups == 0, "groups of whole channels")
    if input.numel() == 0:  # of any type; what ATen does in steps divides by 0
        return input.clone()
    size = channels // groups
    return gather_channels(input, [g * size + c for c in range(size) for g in range(groups)])


@implements(aten.pixel_shuffle.default, takes="input: blocked")
def pixel_shuffle(func, input, upscale_factor):
    out = _tb.pixel_shuffle(input._physical, input._channels, upscale_factor)
    return BlockedTensor(out, input._channels // upscale_factor**2)


@implements(aten.pixel_unshuffle.default, takes="input: blocked")
def pixel_unshuffle(func, input, downscale_factor):
    fits = downscale_factor > 0 and not any(size % downscale_factor for size in input.shape[2:])
    expect(fits, "a factor of both image sizes")
    if input.shape[0] == 0:
        return input.clone()  # ATen returns an empty batch unchanged
    out = _tb.pixel_unshuffle(input._physical, input._channels, downscale_factor)
    return BlockedTensor(out, input._channels * downscale_factor**2)


@torch.library.register_fake("torch_blocked::gather_channels")
def _(input, channels, index):
    n, _, *spatial, block = input.shape
    return input.new_empty(blocked_dims((n, len(index), *spatial), block))


@torch.library.register_fake("torch_blocked::pixel_shuffle")
def _(input, channels, factor):
    n, _, h, w, block = input.shape
    dims = (n, channels // factor**2, h * factor, w * factor)
    return input.new_empty(blocked_dims(dims, block))


@torch.library.register_fake("torch_blocked::pixel_unshuffle")
def _(input, channels, factor):
    n, _, h, w, block = input.shape
    dims = (n, channels * factor**2, h // factor, w // factor)
    return input.new_empty(blocked_dims(dims, block))
