"""Views of blocked tensors.

Adding and removing spatial dims of size 1 takes no copy. A tensor [N, C, 1, ...] has the memory of
a dense [N, C] with rows of whole blocks, so flattening for a classifier is a view too. Any other
change of dims has no blocked form: the result is dense, and costs one counted reorder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_blocked.descriptor import blocks_of
from torch_blocked.ops.contract import expect, implements, wrapped_dims
from torch_blocked.ops.operands import to_blocked_like
from torch_blocked.shadow import (
    IN_PLACE_VIEWS,
    BlockedCopy,
    Shadow,
    anchor,
    become,
    dense_view,
)
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


def flat_channels(input: BlockedTensor) -> Tensor | None:
    """[N, C, 1, ...] as dense [N, C] in the same memory; None if there is more than one pixel, or a
    gap between the blocks."""
    if any(size != 1 for size in input.shape[2:]):
        return None
    try:
        rows = input._physical.view(input.shape[0], -1 if input._channels else 0)
    except (RuntimeError, ValueError):  # blocks of a slice lie apart (ValueError in a trace)
        return None
    return rows[:, : input._channels]


def without_dims(input: BlockedTensor, dims: list[int]) -> Tensor:
    """`input` without its `dims` of size 1, dense."""
    flat = flat_channels(input)
    dense = flat
    if dense is None:
        dense = torch.ops.torch_blocked.to_dense(input._physical, input._channels)
    kept = [size for dim, size in enumerate(input.shape) if dim not in dims]
    return dense.reshape(kept)


@implements(
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    takes="input: blocked",
)
def view(func, input, size, *_strides):
    if tuple(size) == tuple(input.shape):
        return BlockedTensor(aten.alias(input._physical), input._channels)
    flat = flat_channels(input)
    if flat is not None:
        try:
            return flat.view(size)
        except (RuntimeError, ValueError):  # `size` joins rows, which are padded to whole blocks
            pass
    same_channels = _with_spatial(input, size)
    if same_channels is not None:
        return same_channels
    if _shares_images(input, size):
        return _with_images(input, size[0], size[1])
    return dense_view(aten.view.default, input, size)


def _with_spatial(input: BlockedTensor, size) -> BlockedTensor | None:
    """The same N, C and memory with other spatial dims; None if that is impossible."""
    if not 3 <= len(size) <= 5 or tuple(size[:2]) != tuple(input.shape[:2]):
        return None
    try:
        physical = input._physical.view(*input._physical.shape[:2], *size[2:], input.block)
    except (RuntimeError, ValueError):  # ATen then raises its own error, or makes a copy
        return None
    return BlockedTensor(physical, input._channels)


def _shares_images(input: BlockedTensor, size) -> bool:
    """Whether the channels of N images become the channels of one image, or the reverse."""
    if len(size) != input.dim() or tuple(size[2:]) != tuple(input.shape[2:]):
        return False
    if 1 not in (size[0], input.shape[0]):
        return False
    return size[0] * size[1] == input.shape[0] * input._channels


def _with_images(input: BlockedTensor, batch: int, channels: int) -> BlockedTensor:
    """[N, C, ...] as [1, N * C, ...] or the reverse, for instance norm. Whole blocks keep the
    memory; otherwise it is a copy tied to `input`."""
    block = input.block
    if channels % block == 0 and input._channels % block == 0:
        physical = input._physical.contiguous()
        if physical is input._physical:
            shape = [batch, channels // block, *physical.shape[2:]]
            return BlockedTensor(physical.view(shape), channels)
    input = anchor(input)

    def copy() -> Tensor:
        return _regrouped(input, batch, channels)

    if type(input._physical) is not Tensor:
        return BlockedTensor(copy(), channels)  # in a trace in-place ops are functional already
    view = BlockedCopy(copy(), channels)

    def push() -> None:
        input._physical.copy_(_regrouped(view, *input.shape[:2]))

    def pull() -> None:
        view._physical.copy_(copy())

    view._shadow = Shadow(input, pull, push)
    return view


def _regrouped(input: BlockedTensor, batch: int, new: int) -> Tensor:
    """The physical tensor of `input` with N * C split into `batch` images of `new` channels."""
    n, blocks, *rest = input._physical.shape
    block, old = input.block, input._channels
    padded = blocks_of(new, block) * block
    index = [
        at // old * blocks * block + at % old if channel < new else -1
        for image in range(batch)
        for channel in range(padded)
        for at in (image * new + channel,)
    ]
    side_by_side = input._physical.reshape(1, n * blocks, *rest)
    out = torch.ops.torch_blocked.gather_channels(side_by_side, n * blocks * block, index)
    return out.view(batch, padded // block, *rest)


@implements(aten.permute.default, takes="input: blocked, dims: dims")
def permute(func, input, dims):
    ndim = input.dim()
    if dims[:2] == [0, 1] and len(dims) == ndim:  # permutes spatial dims only
        return BlockedTensor(func(input._physical, [*dims, ndim]), input._channels)
    return dense_view(func, input, dims, pixels_last=dims == [0, *range(2, ndim), 1])


@implements(aten.transpose.int, takes="input: blocked, dim0: spatial dim, dim1: spatial dim")
def transpose(func, input, dim0, dim1):
    return BlockedTensor(func(input._physical, dim0, dim1), input._channels)


_LEFT = "a spatial dim to be left"


@implements(aten.select.int, takes="input: blocked, dim: spatial dim")
def select(func, input, dim, index):
    expect(input.dim() > 3, _LEFT)
    return BlockedTensor(func(input._physical, dim, index), input._channels)


@implements(aten.unbind.int, takes="input: blocked, dim: spatial dim")
def unbind(func, input, dim=0):
    expect(input.dim() > 3, _LEFT)
    parts = func(input._physical, dim)
    return [BlockedTensor(part, input._channels) for part in parts]


@implements(aten.select_backward.default, takes="grad_output: blocked, dim: new dim")
def select_backward(func, grad_output, input_sizes, dim, index):
    """Zeros, except at the selected place."""
    rank = len(input_sizes)
    expect(grad_output.dim() + 1 == rank <= 5 and dim >= 2, "a spatial dim of at most three")
    physical, channels = grad_output._physical, grad_output._channels
    sizes = [input_sizes[0], physical.shape[1], *input_sizes[2:], grad_output.block]
    return BlockedTensor(func(physical, sizes, dim, index), channels)


@implements(aten.select_scatter.default, takes="input: blocked, dim: spatial dim")
def select_scatter(func, input, src, dim, index):
    expect(input.dim() > 3, _LEFT)
    fits = src.dim() == input.dim() - 1 and src.shape[1] == input._channels
    expect(fits, "src of one dim less and as many channels")
    placed = to_blocked_like(src, input)._physical
    return BlockedTensor(func(input._physical, placed, dim, index), input._channels)


@implements(aten.unsqueeze.default, takes="input: blocked, dim: new dim")
def unsqueeze(func, input, dim):
    expect(dim >= 2 and input.dim() < 5, "a spatial dim of at most three")
    return BlockedTensor(func(input._physical, dim), input._channels)


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, takes="input: blocked")
def squeeze(func, input, dim=None):
    given = range(input.dim()) if dim is None else dim
    given = given if isinstance(given, (list, tuple, range)) else [given]
    dims = [d for d in wrapped_dims(given, input.dim()) if input.shape[d] == 1]
    expect(all(d >= 2 for d in dims) and input.dim() - len(dims) >= 3, _LEFT)
    return BlockedTensor(aten.squeeze.dims(input._physical, dims), input._channels)


@implements(aten.expand.default, takes="input: blocked")
def expand(func, input, size, implicit=False):
    """Keeps the memory over N and the spatial dims, for the gradient of a mean for example."""
    same_channels = len(size) == input.dim() and size[1] in (-1, input._channels)
    expect(same_channels, "a size of the same rank and channels")
    physical = func(input._physical, [size[0], -1, *size[2:], -1])
    return BlockedTensor(physical, input._channels)


@implements(*(op for op, view in IN_PLACE_VIEWS.items() if view is not None))
def change_dims(func, input, *args, **kwargs):
    """Turns `input` into the view that the op without the underscore returns."""
    view: Any = IN_PLACE_VIEWS[func]
    become(input, view(anchor(input), *args, **kwargs))
    return input


@implements(aten.resize_.default)
def resize_(func, input, size, **options):
    """Gives the same elements, in logical order, other dims. `input` becomes dense."""
    if tuple(size) == tuple(input.shape):
        return input
    become(input, dense_view(aten.alias.default, input))
    return func(input, size, **options)


@implements(aten.resize_as_.default)
def resize_as_(func, input, template, **options):
    """As resize_(). Of `template` only the dims count, and its strides if it is dense."""
    if isinstance(template, BlockedTensor):
        template = torch.empty(template.shape)
    if isinstance(input, BlockedTensor):
        if input.shape == template.shape:
            return input
        become(input, dense_view(aten.alias.default, input))
    return func(input, template, **options)


@implements(aten.set_.default)
def set_(func, input):
    """Removes all elements, as models do to free memory; `input.set_(other)` restores it."""
    become(input, torch.empty(0, dtype=input.dtype))
    return input


@implements(aten.set_.source_Tensor)
def set_to(func, input, source):
    """Takes the memory of `source`, blocked or dense."""
    expect(input.dtype == source.dtype, "a source of the same dtype")
    blocked = isinstance(source, BlockedTensor)
    become(input, anchor(source) if blocked else source.detach())
    return input


@implements(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
def set_to_storage(func, input, *_):
    """Raises: a storage does not say in which order its elements are."""
    raise RuntimeError(
        f"torch_blocked::set_: expected a tensor whose memory {input.format} {tuple(input.shape)} "
        "takes, got a storage; pass the tensor itself, x.set_(y)"
    )
