"""Reductions over any dims: ATen's on the physical tensor.

With keepdim the result stays blocked, with one channel if C was reduced; without it is dense. Over
C the lanes are reduced too. The zero tail adds nothing to a sum; where a zero would count, whole
blocks and the last one are reduced apart."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torch_blocked.ops.operands import clear_tail
from torch_blocked.ops.table import implements
from torch_blocked.ops.view import without_dims
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

# Over C, what zeros change nothing in.
_ZERO_IS_NEUTRAL = {
    aten.sum.dim_IntList,
    aten.nansum.default,
    aten.any.dims,
    aten.any.dim,
    aten.linalg_vector_norm.default,
}

# Over C, how the results of two parts go together.
_COMBINES = {
    aten.amax.default: torch.maximum,
    aten.amin.default: torch.minimum,
    aten.all.dims: torch.logical_and,
    aten.all.dim: torch.logical_and,
    aten.prod.dim_int: torch.mul,
}

_SINGLE_DIM = {aten.any.dim, aten.all.dim, aten.prod.dim_int}


@implements(
    *_ZERO_IS_NEUTRAL, *_COMBINES, aten.mean.dim, aten.var.correction, aten.std.correction,
    aten.logsumexp.default,
)  # fmt: skip
def reduction(func, input, *args, **kwargs):
    arguments = _bind(func, args, kwargs)
    keepdim = arguments.pop("keepdim", False)
    dims = _dims(input, arguments.pop("dim", None))
    if dims is None or not _computes(func, input, arguments.get("dtype")):
        return NotImplemented
    if 1 in dims:
        return _over_channels(func, input, dims, keepdim, arguments)
    out = _reduce(func, input._physical, dims, arguments)
    blocked = clear_tail(out, input._channels)
    return blocked if keepdim else without_dims(blocked, dims)


@implements(aten.var_mean.correction, aten.std_mean.correction)
def moments(func, input, *args, **kwargs):
    first = aten.var.correction if func is aten.var_mean.correction else aten.std.correction
    arguments = _bind(func, args, kwargs)
    spread = reduction(first, input, **arguments)
    arguments.pop("correction", None)
    if arguments.get("dim") is None:
        arguments["dim"] = []
    return spread if spread is NotImplemented else (
        spread, reduction(aten.mean.dim, input, **arguments)
    )  # fmt: skip


@implements(aten.norm.ScalarOpt_dim)
def norm(func, input, ord, dim, keepdim=False):
    order = 2 if ord is None else ord
    return reduction(aten.linalg_vector_norm.default, input, order, dim, keepdim)


@implements(aten.sum.default, aten.mean.default)
def over_everything(func, input, **options):
    """A dense scalar."""
    if not _computes(func, input, options.get("dtype")):
        return NotImplemented
    total = aten.sum.default(input._physical, **options)
    return total / input.numel() if func is aten.mean.default else total


@implements(
    aten.max.default, aten.min.default, aten.all.default, aten.prod.default, aten.any.default,
    aten.count_nonzero.default,
)  # fmt: skip
def scalar(func, input, *args, **kwargs):
    if func is aten.count_nonzero.default and args != (None,) and args:
        return NotImplemented
    if func in (aten.any.default, aten.count_nonzero.default):
        return func(input._physical)
    combine = {
        aten.max.default: torch.maximum, aten.min.default: torch.minimum,
        aten.all.default: torch.logical_and, aten.prod.default: torch.mul,
    }[func]  # fmt: skip
    return _combined(input, combine, lambda part: func(part, *args, **kwargs))


@implements(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.median.dim,
    aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default,
)  # fmt: skip
def selection(func, input, *args, **kwargs):
    """Values and where they are, along one dim; along C only the greatest and the least."""
    arguments = _bind(func, args, kwargs)
    dim = arguments.get("dim", None if func in _ARG else -1)
    if dim is None or not -input.dim() <= dim < input.dim():
        return NotImplemented
    dim %= input.dim()
    keepdim = arguments.pop("keepdim", False)
    if dim == 1:
        return _select_channel(func, input, keepdim)
    arguments["dim"] = dim
    out = func(input._physical, **arguments, keepdim=True)
    values = [clear_tail(v, input._channels) for v in (out if isinstance(out, tuple) else (out,))]
    if not keepdim:
        values = [without_dims(value, [dim]) for value in values]
    return tuple(values) if isinstance(out, tuple) else values[0]


_ARG = {aten.argmax.default, aten.argmin.default}
_EXTREMES = {aten.max.dim: aten.amax.default, aten.min.dim: aten.amin.default}


def _select_channel(func, input, keepdim):
    if func not in _ARG and func not in _EXTREMES:
        return NotImplemented
    least = func in (aten.argmin.default, aten.min.dim)
    indices = _tb.argmax_channels(input._physical, input._channels, least)
    if keepdim:
        indices = BlockedTensor(_tb.to_blocked(indices.unsqueeze(1), input.block), 1)
    if func in _ARG:
        return indices
    return reduction(_EXTREMES[func], input, [1], keepdim), indices


def _over_channels(func, input, dims, keepdim, arguments):
    lanes = [*dims, input.dim()]
    if input._channels == 0:
        return NotImplemented
    if func in (aten.sum.dim_IntList, aten.mean.dim):
        out = _sum(input._physical, input._channels, dims, **arguments)
        if func is aten.mean.dim:
            out = out / math.prod(input.shape[dim] for dim in dims)
    elif func in (aten.var.correction, aten.std.correction):
        out = _spread(func, input, dims, **arguments)
    elif func is aten.logsumexp.default:
        out = _logsumexp(input, dims)
    elif func in _COMBINES:
        combine = _COMBINES[func]
        out = _combined(input, combine, lambda part: _reduce(func, part, lanes, arguments))
    elif func is aten.linalg_vector_norm.default and not arguments.get("ord", 2) >= 0:
        return NotImplemented  # the least absolute value: a zero counts
    else:
        out = _reduce(func, input._physical, lanes, arguments)
    if not keepdim:
        return out.squeeze(lanes)
    return BlockedTensor(aten.constant_pad_nd(out, [0, input.block - 1]), 1)


# What ATen computes for floating-point and complex types only.
_OF_FRACTIONS = {
    aten.mean.default, aten.mean.dim, aten.var.correction, aten.std.correction,
    aten.linalg_vector_norm.default,
}  # fmt: skip


def _computes(func, input: BlockedTensor, dtype: torch.dtype | None) -> bool:
    """Whether `func` takes the input's type, and gives `dtype` if one is asked for."""
    types = (input.dtype, dtype or input.dtype)
    fractions = [each.is_floating_point or each.is_complex for each in types]
    if func in (aten.mean.default, aten.mean.dim):
        return fractions[1]
    return func not in _OF_FRACTIONS or all(fractions)


def _reduce(func, physical: Tensor, dims: list[int], arguments: dict) -> Tensor:
    """`func` over physical dims, which are kept with size 1."""
    if func not in _SINGLE_DIM:
        return func(physical, dim=dims, keepdim=True, **arguments)
    for dim in dims:
        physical = func(physical, dim=dim, keepdim=True, **arguments)
    return physical


def _combined(input: BlockedTensor, combine: Callable, reduce: Callable) -> Tensor:
    """reduce(whole blocks) and reduce(lanes in use of the last), together."""
    physical, used = input._physical, input._channels % input.block
    if used == 0:
        return reduce(physical)
    whole = input._channels // input.block
    last = reduce(physical.narrow(1, whole, 1).narrow(-1, 0, used))
    return combine(reduce(physical.narrow(1, 0, whole)), last) if whole else last


def _spread(func, input, dims, correction=None) -> Tensor:
    """Variance or standard deviation: the mean first, then squares about it without the tail."""
    count = math.prod(input.shape[dim] for dim in dims)
    correction = 1 if correction is None else correction
    channels = input._channels
    centred = input._physical - _sum(input._physical, channels, dims) / count
    squares = clear_tail(centred.square(), channels)._physical
    variance = _sum(squares, channels, dims) / max(count - correction, 0)
    return variance.sqrt() if func is aten.std.correction else variance


def _logsumexp(input, dims) -> Tensor:
    lanes = [*dims, input.dim()]
    greatest = _combined(input, torch.maximum, lambda part: part.amax(lanes, keepdim=True))
    finite = greatest.masked_fill(greatest.abs() == math.inf, 0)
    terms = clear_tail((input._physical - finite).exp(), input._channels)._physical
    return _sum(terms, input._channels, dims).log() + finite


def _sum(physical: Tensor, channels: int, dims: list[int], dtype=None) -> Tensor:
    """Over dims that hold C; reduced dims and lanes are kept with size 1. In float32 the channels
    go first, in an order that no number of threads changes."""
    lanes = physical.dim() - 1
    if physical.dtype != torch.float32 or dtype not in (None, torch.float32):
        return physical.sum([*dims, lanes], keepdim=True, dtype=dtype)
    out = _tb.sum_channels(physical, channels).unsqueeze(1).unsqueeze(-1)
    rest = [dim for dim in dims if dim != 1]
    return out.sum(rest, keepdim=True) if rest else out


def _dims(input, dims) -> list[int] | None:
    """Sorted and from 0; all if none are named. None if ATen has an error to name."""
    given = [dims] if isinstance(dims, int) else (dims or range(input.dim()))
    if not all(-input.dim() <= dim < input.dim() for dim in given):
        return None
    found = sorted({dim % input.dim() for dim in given})
    return found if len(found) == len(given) else None


def _bind(func, args, kwargs) -> dict:
    """The arguments after `self` by name, without those that are None."""
    names = [argument.name for argument in func._schema.arguments[1:]]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: value for name, value in given.items() if value is not None}


@torch.library.register_fake("torch_blocked::argmax_channels")
def _(input, channels, least):
    n, _, *spatial, _ = input.shape
    return input.new_empty(n, *spatial, dtype=torch.int64)


@torch.library.register_fake("torch_blocked::sum_channels")
def _(input, channels):
    n, _, *spatial, _ = input.shape
    return input.new_empty(n, *spatial)
