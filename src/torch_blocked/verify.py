"""Compares two forms of a model, and makes inputs to compare them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_blocked import structure
from torch_blocked.tensor import BlockedTensor, to_blocked

# Relative to the largest value of a float32 result. On the networks of the benchmark two right
# forms differ by at most 1e-5, and a wrong one is off by 1e-2 or more.
TOLERANCE = 2e-3
# If the model rounds to steps, a value between two steps may go either way, by a whole step, and
# later layers amplify that: to 7 % in an int8 MobileNetV2 with random weights, to 18 % in a
# ResNet-50 on small images. Larger differences are compared with the effect of rounding.
TOLERANCE_IN_STEPS = 0.15
# When results are compared with the rounding errors of the model's own: an error may be this many
# times as large, and never more than half of the largest value.
_TIMES, _MOST = 4, 0.5
# A float32 model in bfloat16 is compared with ATen's ops in bfloat16. This error is always right.
LEAST_IN_BFLOAT16 = 0.05
# How far inputs are nudged, relative to their largest value: as far as rounding moves the input of
# a layer, in models that round to steps and in others.
NUDGE_IN_STEPS, NUDGE = 1e-5, 1e-6
# An output that rounding moves this far is noise: two right forms may differ by any amount.
CHAOTIC = _MOST / _TIMES
# Two right forms of a result that is noise never differed by this much in any known model.
ALIKE = _MOST

# The share of integer and boolean results that may differ, because rounding decides between scores
# that are nearly equal.
_UNDECIDED = 0.01


def nudged(value: Any, nudge: float) -> Any:
    """Inputs that differ from these as if by rounding."""
    random = torch.Generator().manual_seed(0)

    def moved(tensor: Tensor) -> Tensor:
        if isinstance(tensor, BlockedTensor):
            return to_blocked(moved(tensor.to_dense()), tensor.format)
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        noise = torch.rand(tensor.shape, generator=random).sub(0.5).to(tensor.dtype)
        return tensor + 2 * nudge * tensor.abs().max() * noise

    return pytree.tree_map_only(Tensor, moved, value)


def tolerance_of(dtype: torch.dtype, in_steps: bool) -> float:
    """The difference of two right forms that needs no closer look. In bfloat16 and float16 half of
    the numbers round differently, and layers amplify that, so these always get a closer look."""
    if dtype in _HALVES:
        return 0.0
    least = TOLERANCE_IN_STEPS if in_steps else TOLERANCE
    is_double = dtype in (torch.float64, torch.complex128)
    return least * _DOUBLE if is_double and not in_steps else least


# The ratio of a rounding step of float64 to one of float32.
_DOUBLE = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


@dataclass
class Judgement:
    """what: how a result is wrong, or empty. moved: how far rounding moves that output, or else the
    output that it moves most, relative to the largest value. is_noise: whether the wrong output, or
    else every output, is noise."""

    what: str
    tolerance: float
    moved: float
    is_noise: bool


def least_of(dtype: torch.dtype, in_steps: bool) -> float:
    """The difference that is always allowed, relative to the largest value."""
    return tolerance_of(dtype, in_steps) or torch.finfo(dtype).eps


def judged(
    exact: Any, others: Sequence[Any], result: Any, least: Callable[[torch.dtype], float]
) -> Judgement:
    """Judges `result`, output by output. exact: the results without rounding. others: results that
    are right up to rounding, the model's first.

    least: gives the tolerance that is always allowed for an output's type, relative to the largest
    value."""
    errors: list[float] = []
    lists = [structure.flatten(each)[0] for each in (exact, result, *others)]
    for i, (a, b, *right) in enumerate(zip(*lists, strict=True)):
        if not isinstance(a, Tensor):
            continue
        what, tolerance, moved = _judged_output(
            _plain(a), _plain(b), [_plain(each) for each in right], least
        )
        if what:
            where = f"output {i}: " if len(lists[0]) > 1 else ""
            return Judgement(where + what, tolerance, moved, moved > CHAOTIC)
        if right[0].is_floating_point() and right[0].numel():
            errors.append(moved)
    is_noise = bool(errors) and min(errors) > CHAOTIC
    what = f"rounding moves it by {min(errors):.0%}" if is_noise else ""
    return Judgement(what, 0.0, max(errors, default=0.0), is_noise)


def _judged_output(
    exact: Tensor, result: Tensor, right: list[Tensor], least: Callable[[torch.dtype], float]
) -> tuple[str, float, float]:
    """What is wrong, the tolerance, and how far rounding moves the output, all relative to its
    largest value."""
    dtype = right[0].dtype
    if exact.is_quantized:
        exact, result, *right = (each.dequantize() for each in (exact, result, *right))
    if not exact.is_floating_point() and not exact.is_complex():
        shares = [(exact != each).double().mean().item() for each in (result, *right)]
        most = min(max(_UNDECIDED, _TIMES * max(shares[1:])), _MOST)
        return (f"{shares[0]:.0%} of the elements" if shares[0] > most else ""), most, 0.0
    values = [_real(each) for each in (exact, result, *right)]
    kept = torch.stack([each.isfinite() for each in values]).all(0)
    if not kept.any():
        return "", 0.0, 0.0
    exact, result, *right = (torch.where(kept, each, 0) for each in values)
    scale = max(exact.abs().max().item(), torch.finfo(torch.float32).tiny)
    channels = {1, exact.dim() - 1} if dtype in _HALVES and exact.dim() > 1 else set()
    sizes = _of_channels(exact, exact, channels)[1]
    apart, *own = (_of_channels(each - exact, exact, channels)[0] for each in (result, *right))
    moved = max(each[0].item() for each in own) / scale
    step = least(dtype)
    tolerance = max(step, _TIMES * moved)
    if moved <= CHAOTIC:
        tolerance = min(tolerance, _MOST)
    allowed = [torch.tensor(tolerance * scale)]
    for size, *known in list(zip(sizes, *own, strict=True))[1:]:
        allowed.append((step * size).clamp(min=_TIMES * torch.stack(known).abs().max()))
    for at, (got, bound) in enumerate(zip(apart, allowed, strict=True)):
        if bool((got.abs() > bound).any()):
            of_channel = ", and a channel's mean or scale by more than rounding" if at else ""
            return f"off by {apart[0].item():.2g} of {scale:.2g}{of_channel}", tolerance, moved
    return "", tolerance, moved


_HALVES = (torch.bfloat16, torch.float16)


def _of_channels(apart: Tensor, exact: Tensor, dims: set[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The largest error; then, for each channel along these dims, the mean error and the error of
    the scale. With few digits the largest error hides these two. The second list has the same for
    the numbers themselves."""
    found, sizes = [apart.abs().max()], [exact.abs().max()]
    for dim in sorted(dims):
        rows, numbers = (each.movedim(dim, 0).flatten(1) for each in (apart, exact))
        size = numbers.square().mean(1).sqrt()
        found += [rows.mean(1), (rows * numbers).mean(1) / size.clamp(min=1e-30)]
        sizes += [size, size]
    return found, sizes


def _real(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def difference(
    expected: Any, result: Any, tolerance: float | Callable[[torch.dtype], float]
) -> str:
    """How `result` differs from `expected`, both in the structure that a forward returns; empty if
    it does not. tolerance: relative to the largest value, for all types or by type."""
    (expected, wanted), (result, got) = structure.flatten(expected), structure.flatten(result)
    if wanted != got:
        return f"the structure is {got} instead of {wanted}"
    for a, b in zip(expected, result, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            what = _of_tensors(_plain(a), _plain(b), tolerance)
        else:
            what = "" if type(a) is type(b) and a == b else f"{b} instead of {a}"
        if what:
            return what
    return ""


def _plain(value: Tensor) -> Tensor:
    return value.to_dense() if isinstance(value, BlockedTensor) else value


def _of_tensors(a: Tensor, b: Tensor, tolerance: float | Callable[[torch.dtype], float]) -> str:
    if callable(tolerance):
        tolerance = tolerance(a.dtype)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{b.dtype} {list(b.shape)} instead of {a.dtype} {list(a.shape)}"
    if not a.numel():
        return ""
    if a.is_quantized:
        a, b = a.dequantize(), b.dequantize()
    if not a.is_floating_point() and not a.is_complex():
        share = (a != b).double().mean().item()
        return f"{share:.0%} of the elements" if share > _UNDECIDED else ""
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(_infinite(a), _infinite(b)):
        return "other elements are NaN or infinite"
    finite = a.isfinite()
    a, b = a[finite], b[finite]
    if not a.numel():
        return ""
    apart, scale = (a - b).abs().max().item(), a.abs().max().item()
    least = torch.finfo(a.dtype).tiny  # smaller numbers may be 0 in one of the forms
    return f"off by {apart:.2g} of {scale:.2g}" if apart > max(tolerance * scale, least) else ""


def _infinite(value: Tensor) -> Tensor:
    return torch.where(value.isinf(), value.sign() if not value.is_complex() else 1, 0)


def others_like(value: Any) -> Iterator[Any]:
    """Arguments with tensors of other sizes, whose values repeat. The batch has one more, and
    images shrink to a quarter, small ones to a half, or grow to twice the size. If a model does not
    take those, later entries have half the size, 64 less or 32 more. (32 more at first would make
    50 000 voxels of 4 x 5 x 6.) Each entry is made when it is asked for. Names and numbers stay. So
    do the fourth and later spatial dims, whose product with the others would be huge."""
    for size_of in _SIZES:
        yield pytree.tree_map_only(Tensor, partial(_resized, size_of), value)


_SIZES: tuple[Callable[[int], int], ...] = (
    lambda size: size // 4 if size >= 128 else size // 2 if size >= 16 else 2 * size,
    lambda size: size // 2 if size >= 16 else size + 32,
    lambda size: size - 64 if size > 128 else size + 32,
)


def _resized(size_of: Callable[[int], int], value: Tensor) -> Tensor:
    if isinstance(value, BlockedTensor):
        return to_blocked(_resized(size_of, value.to_dense()), value.format)
    for dim, size in enumerate(value.shape):
        is_batch, is_image = dim == 0 and value.dim() > 1, 1 < dim < 5 and value.dim() > 2
        if size == 0 or not (is_batch or is_image):
            continue
        other = size + 1 if is_batch else size_of(size)
        value = value.index_select(dim, torch.arange(other) % size)
    return value
