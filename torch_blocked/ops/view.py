"""Views of blocked tensors.

Dims of size 1 come and go among the spatial dims without a copy. A tensor [N, C, 1, ...] whose C is
whole blocks is byte for byte the dense [N, C], so flattening into a classifier is a view too."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.ops.table import implements
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
    dense = input.to_dense() if flat is None else flat
    kept = [size for dim, size in enumerate(input.shape) if dim not in dims]
    return dense.reshape(kept)


@implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def view(func, input, size, *_strides):
    if tuple(size) == tuple(input.shape):
        return BlockedTensor(aten.alias(input._physical), input._channels)
    flat = flat_channels(input)
    if flat is None:
        return NotImplemented
    try:
        return flat.view(size)
    except RuntimeError:  # rows are padded to whole blocks, and `size` joins them
        return NotImplemented


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
