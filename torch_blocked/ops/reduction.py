"""Reductions over N and the spatial dims, and sums over C too: ATen's on the physical tensor.

With keepdim the result stays blocked, without it is dense. Other reductions over C fall back."""

from __future__ import annotations

import math

import torch

from torch_blocked.ops.table import clear_tail, implements
from torch_blocked.ops.view import without_dims
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


@implements(
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.std.correction,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
)
def reduction(func, input, *args, **kwargs):
    arguments = _bind(func, args, kwargs)
    dims = arguments.get("dim")
    if not dims or not all(-input.dim() <= dim < input.dim() for dim in dims):
        return NotImplemented  # over everything, or an error for ATen to name
    dims = sorted({dim % input.dim() for dim in dims})
    if len(dims) != len(arguments["dim"]):
        return NotImplemented
    keepdim = arguments.pop("keepdim", False)
    arguments["dim"] = dims
    if 1 in dims:
        if func not in (aten.sum.dim_IntList, aten.mean.dim):
            return NotImplemented
        return _sum_over_channels(func, input, keepdim, **_keywords(func, arguments))
    out = func(input._physical, **_keywords(func, arguments), keepdim=True)
    blocked = clear_tail(out, input._channels)
    return blocked if keepdim else without_dims(blocked, dims)


def _sum_over_channels(func, input, keepdim, dim, **options):
    """Sum or mean over dims that hold C: the zero tail adds nothing."""
    out = aten.sum.dim_IntList(input._physical, [*dim, input.dim()], keepdim=True, **options)
    if func is aten.mean.dim:
        out = out / math.prod(input.shape[d] for d in dim)
    if not keepdim:
        return out.squeeze([*dim, input.dim()])
    return BlockedTensor(aten.constant_pad_nd(out, [0, input.block - 1]), 1)


@implements(aten.sum.default, aten.mean.default)
def over_everything(func, input, **options):
    """A dense scalar."""
    total = aten.sum.default(input._physical, **options)
    return total / input.numel() if func is aten.mean.default else total


def _bind(func, args, kwargs) -> dict:
    """The arguments after `self` by name."""
    names = [argument.name for argument in func._schema.arguments[1:]]
    return dict(zip(names, args, strict=False)) | kwargs


def _keywords(func, arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if value is not None}
