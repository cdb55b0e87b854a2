"""Views of blocked tensors.

Dims of size 1 come and go among the spatial dims without a copy. A tensor [N, C, 1, ...] is, in
rows of whole blocks, the dense [N, C], so flattening into a classifier is a view too. Any other
change of dims has no blocked form: its result is dense, one counted reorder away."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.ops.table import implements
from torch_blocked.shadow import dense_view
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def flat_channels(input: BlockedTensor) -> Tensor | None:
    """[N, C, 1, ...] as dense [N, C], the same memory; None if there is more than one pixel."""
    if any(size != 1 for size in input.shape[2:]):
        return None
    return input._physical.flatten(1)[:, : input._channels]


def without_dims(input: BlockedTensor, dims: list[int]) -> Tensor:
    """`input`, whose `dims` have size 1, without them, dense."""
    flat = flat_channels(input)
    dense = flat
    if dense is None:
        dense = torch.ops.torch_blocked.to_dense(input._physical, input._channels)
    kept = [size for dim, size in enumerate(input.shape) if dim not in dims]
    return dense.reshape(kept)


@implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def view(func, input, size, *_strides):
    if tuple(size) == tuple(input.shape):
        return BlockedTensor(aten.alias(input._physical), input._channels)
    flat = flat_channels(input)
    if flat is not None:
        try:
            return flat.view(size)
        except RuntimeError:  # rows are padded to whole blocks, and `size` joins them
            pass
    return dense_view(aten.view.default, input, size)


@implements(aten.permute.default)
def permute(func, input, dims):
    ndim = input.dim()
    to_channels_last = [d % ndim for d in dims] == [0, *range(2, ndim), 1]
    return dense_view(func, input, dims, channels_last=to_channels_last)


@implements(aten.unsqueeze.default)
def unsqueeze(func, input, dim):
    position = dim % (input.dim() + 1) if -input.dim() - 1 <= dim <= input.dim() else 0
    if position < 2 or input.dim() == 5:
        return NotImplemented
    return BlockedTensor(func(input._physical, position), input._channels)


@implements(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(func, input, dim):
    given = dim if isinstance(dim, (list, tuple)) else [dim]
    if not all(-input.dim() <= d < input.dim() for d in given):
        return NotImplemented
    dims = [d % input.dim() for d in given if input.shape[d] == 1]
    if any(d < 2 for d in dims) or input.dim() - len(dims) < 3:
        return NotImplemented
    return BlockedTensor(aten.squeeze.dims(input._physical, dims), input._channels)


@implements(aten.expand.default)
def expand(func, input, size, implicit=False):
    """Over N and the spatial dims the same memory, as the gradient of a mean needs it."""
    if len(size) != input.dim() or size[1] not in (-1, input._channels):
        return NotImplemented
    physical = func(input._physical, [size[0], -1, *size[2:], -1])
    return BlockedTensor(physical, input._channels)
