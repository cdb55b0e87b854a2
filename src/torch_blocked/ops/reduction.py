"""Reductions over any dims: ATen's on the physical tensor.

With keepdim the result stays blocked, with one channel if C was reduced; without, it is dense. Over
C the lanes are reduced too. The zero tail adds nothing to a sum. For reductions in which zeros
count, whole blocks and the last block are reduced separately."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_blocked.ops.contract import bound, expect, implements, wrapped_dim, wrapped_dims
from torch_blocked.ops.operands import clear_tail
from torch_blocked.ops.view import without_dims
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

# Reductions over C that zeros do not change.
_ZERO_IS_NEUTRAL = {
    aten.sum.dim_IntList,
    aten.nansum.default,
    aten.any.dims,
    aten.any.dim,
    aten.linalg_vector_norm.default,
}

# How the results of two parts of C combine.
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
    aten.logsumexp.default, takes="input: blocked",
)  # fmt: skip
def reduction(func, input, *args, **kwargs):
    arguments = bound(func, args, kwargs)
    keepdim = arguments.pop("keepdim", False)
    dims = _dims(input, arguments.pop("dim", None))
    expect(_computes(func, input, arguments.get("dtype")), _FRACTIONS)
    if 1 in dims:
        return _over_channels(func, input, dims, keepdim, arguments)
    out = _reduce(func, input._physical, dims, arguments)
    blocked = clear_tail(out, input._channels)
    return blocked if keepdim else without_dims(blocked, dims)


@implements(aten.var_mean.correction, aten.std_mean.correction, takes="input: blocked")
def moments(func, input, *args, **kwargs):
    first = aten.var.correction if func is aten.var_mean.correction else aten.std.correction
    arguments = bound(func, args, kwargs)
    spread = reduction(first, input, **arguments)
    arguments.pop("correction", None)
    if arguments.get("dim") is None:
        arguments["dim"] = []
    return spread, reduction(aten.mean.dim, input, **arguments)


@implements(aten.norm.ScalarOpt_dim, takes="input: blocked")
def norm(func, input, ord, dim, keepdim=False):
    order = 2 if ord is None else ord
    return reduction(aten.linalg_vector_norm.default, input, order, dim, keepdim)


@implements(aten.sum.default, aten.mean.default, takes="input: blocked")
def over_everything(func, input, **options):
    """A dense scalar."""
    expect(_computes(func, input, options.get("dtype")), _FRACTIONS)
    total = aten.sum.default(input._physical, **options)
    return total / input.numel() if func is aten.mean.default else total


@implements(
    aten.max.default, aten.min.default, aten.all.default, aten.prod.default, aten.any.default,
    aten.count_nonzero.default, takes="input: blocked",
)  # fmt: skip
def scalar(func, input, *args, **kwargs):
    if func is aten.count_nonzero.default:
        expect(args in ((), (None,)), "all dims")
    if func in (aten.any.default, aten.count_nonzero.default):
        return func(input._physical)
    combine = {
        aten.max.default: torch.maximum, aten.min.default: torch.minimum,
        aten.all.default: torch.logical_and, aten.prod.default: torch.mul,
    }[func]  # fmt: skip
    return _combined(input, combine, lambda part: func(part, *args, **kwargs))


@implements(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.median.dim,
    aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default, takes="input: blocked",
)  # fmt: skip
def selection(func, input, *args, **kwargs):
    """Values and their positions along one dim; along C only maxima and minima."""
    arguments = bound(func, args, kwargs)
    given: Any = arguments.get("dim", None if func in _ARG else -1)
    expect(given is not None, "a dim")
    dim = wrapped_dim(given, input.dim())
    keepdim = arguments.pop("keepdim", False)
    if dim == 1:
        return _select_channel(func, input, keepdim)
    arguments["dim"] = dim
    out = func(input._physical, **arguments, keepdim=True)
    results = out if isinstance(out, tuple) else (out,)
    values: Any = [clear_tail(each, input._channels) for each in results]
    if not keepdim:
        values = [without_dims(value, [dim]) for value in values]
    return tuple(values) if isinstance(out, tuple) else values[0]


_ARG = {aten.argmax.default, aten.argmin.default}
_EXTREMES = {aten.max.dim: aten.amax.default, aten.min.dim: aten.amin.default}


def _select_channel(func, input, keepdim):
    expect(func in _ARG or func in _EXTREMES, "a dim other than C")
    least = func in (aten.argmin.default, aten.min.dim)
    indices = _tb.argmax_channels(input._physical, input._channels, least)
    if keepdim:
        indices = BlockedTensor(_tb.to_blocked(indices.unsqueeze(1), input.block), 1)
    if func in _ARG:
        return indices
    return reduction(_EXTREMES[func], input, [1], keepdim), indices


def _over_channels(func, input, dims, keepdim, arguments):
    lanes = [*dims, input.dim()]
    expect(input._channels > 0, "channels")
    if func is aten.linalg_vector_norm.default:  # orders below 0 are minima, so zeros would count
        expect(arguments.get("ord", 2) >= 0, "an order of 0 or more")
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
    else:
        # Without the tail of a single block: of one value ATen's norm is the absolute value, and
        # (|x| ** 1e-5) ** 1e5 is off by 0.3 %.
        out = _reduce(func, input._physical[..., : input._channels], lanes, arguments)
    if not keepdim:
        return out.squeeze(lanes)
    return BlockedTensor(aten.constant_pad_nd(out, [0, input.block - 1]), 1)


_FRACTIONS = "floating-point numbers"

# Ops that ATen computes only for floating-point and complex types.
_OF_FRACTIONS = {
    aten.mean.default, aten.mean.dim, aten.var.correction, aten.std.correction,
    aten.linalg_vector_norm.default,
}  # fmt: skip


def _computes(func, input: BlockedTensor, dtype: torch.dtype | None) -> bool:
    """Whether `func` takes the input's type, and can give `dtype` if that is requested."""
    types = (input.dtype, dtype or input.dtype)
    fractions = [each.is_floating_point or each.is_complex for each in types]
    if func in (aten.mean.default, aten.mean.dim):
        return fractions[1]
    return func not in _OF_FRACTIONS or all(fractions)


def _reduce(func, physical: Tensor, dims: list[int], arguments: dict) -> Tensor:
    """Runs `func` over physical dims, which are kept with size 1."""
    if func not in _SINGLE_DIM:
        return func(physical, dim=dims, keepdim=True, **arguments)
    for dim in dims:
        physical = func(physical, dim=dim, keepdim=True, **arguments)
    return physical


def _combined(input: BlockedTensor, combine: Callable, reduce: Callable) -> Tensor:
    """Combines reduce(whole blocks) and reduce(used lanes of the last block)."""
    physical, used = input._physical, input._channels % input.block
    if used == 0:
        return reduce(physical)
    whole = input._channels // input.block
    last = reduce(physical.narrow(1, whole, 1).narrow(-1, 0, used))
    return combine(reduce(physical.narrow(1, 0, whole)), last) if whole else last


def _spread(func, input, dims, correction=None) -> Tensor:
    """Variance or standard deviation: first the mean, then squared deviations without the tail."""
    out = _spread_in(input._physical, func, input, dims, correction)
    if type(out) is Tensor and out.dtype != torch.float64 and not _squares_fit(func, out):
        out = _spread_in(input._physical.double(), func, input, dims, correction).to(out.dtype)
    return out


def _squares_fit(func, out: Tensor) -> bool:
    """Whether float32 holds the squares behind these results with all digits. It does not for
    values beyond 1e19 or below 1e-15. ATen sums in float64."""
    least = 1e-15 if func is aten.std.correction else 1e-30
    return bool((out.isfinite() & (out > least)).all())


def _spread_in(physical: Tensor, func, input, dims, correction) -> Tensor:
    count = math.prod(input.shape[dim] for dim in dims)
    correction = 1 if correction is None else correction
    channels = input._channels
    centred = physical - _sum(physical, channels, dims) / count
    squares = clear_tail(centred.square(), channels)._physical
    divisor = max(count - correction, 0) if count else math.nan  # as in ATen
    variance = _sum(squares, channels, dims) / divisor
    return variance.sqrt() if func is aten.std.correction else variance


def _logsumexp(input, dims) -> Tensor:
    lanes = [*dims, input.dim()]
    if 0 in (input.shape[dim] for dim in dims):
        return _sum(input._physical, input._channels, dims).log()  # of no values: -inf
    greatest = _combined(input, torch.maximum, lambda part: part.amax(lanes, keepdim=True))
    finite = greatest.masked_fill(greatest.abs() == math.inf, 0)
    terms = clear_tail((input._physical - finite).exp(), input._channels)._physical
    return _sum(terms, input._channels, dims).log() + finite


def _sum(physical: Tensor, channels: int, dims: list[int], dtype=None) -> Tensor:
    """Sums over dims that include C. Reduced dims and lanes are kept with size 1. In float32 the
    channels are summed first, in an order that does not depend on the number of threads."""
    lanes = physical.dim() - 1
    if physical.dtype != torch.float32 or dtype not in (None, torch.float32):
        return physical.sum([*dims, lanes], keepdim=True, dtype=dtype)
    out = _tb.sum_channels(physical, channels).unsqueeze(1).unsqueeze(-1)
    rest = [dim for dim in dims if dim != 1]
    return out.sum(rest, keepdim=True) if rest else out


def _dims(input, dims) -> list[int]:
    """The dims, sorted and counted from 0; all dims if none are named."""
    given = [dims] if isinstance(dims, int) else (dims or range(input.dim()))
    return sorted(wrapped_dims(given, input.dim()))


@torch.library.register_fake("torch_blocked::argmax_channels")
def _(input, channels, least):
    n, _, *spatial, _ = input.shape
    return input.new_empty(n, *spatial, dtype=torch.int64)


@torch.library.register_fake("torch_blocked::sum_channels")
def _(input, channels):
    n, _, *spatial, _ = input.shape
    return input.new_empty(n, *spatial)
