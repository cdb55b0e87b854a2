"""Concatenation over any dim; over the channels at any offset."""

from __future__ import annotations

import torch

from torch_blocked.ops.table import implements, to_blocked_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


@implements(aten.cat.default)
def cat(func, tensors, dim=0):
    like = next(t for t in tensors if isinstance(t, BlockedTensor))
    ndim = like.dim()
    if not -ndim <= dim < ndim:
        return NotImplemented  # ATen says what is wrong
    dim %= ndim
    if any(t.dim() != ndim or t.dtype != like.dtype for t in tensors):
        return NotImplemented
    blocked = [to_blocked_like(t, like) for t in tensors]
    channels = [t._channels for t in blocked]
    physicals = [t._physical for t in blocked]
    if dim == 1:
        out = torch.ops.torch_blocked.concat_channels(physicals, channels)
        return BlockedTensor(out, sum(channels))
    if any(count != channels[0] for count in channels):
        return NotImplemented
    return BlockedTensor(func(physicals, dim), channels[0])


@torch.library.register_fake("torch_blocked::concat_channels")
def _(inputs, channels):
    n, _, *rest = inputs[0].shape
    return inputs[0].new_empty(n, -(-sum(channels) // rest[-1]), *rest)
