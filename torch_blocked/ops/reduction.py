"""Reductions over N and the spatial dims: ATen's on the physical tensor.

With keepdim the result stays blocked, without it is dense. Reductions over C fall back."""

from __future__ import annotations

import torch

from torch_blocked.ops.table import clear_tail, implements
from torch_blocked.ops.view import without_dims

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
    if 1 in dims or len(dims) != len(arguments["dim"]):
        return NotImplemented
    keepdim = arguments.pop("keepdim", False)
    arguments["dim"] = dims
    out = func(input._physical, **_keywords(func, arguments), keepdim=True)
    blocked = clear_tail(out, input._channels)
    return blocked if keepdim else without_dims(blocked, dims)


def _bind(func, args, kwargs) -> dict:
    """The arguments after `self` by name."""
    names = [argument.name for argument in func._schema.arguments[1:]]
    return dict(zip(names, args, strict=False)) | kwargs


def _keywords(func, arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if value is not None}
