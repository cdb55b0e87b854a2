"""Compares two forms of a model, and makes inputs to compare them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_blocked import structure
from torch_blocked.tensor import BlockedTensor, to_blocked

# Of the largest value of a float32 result. Rounding differs between two right forms by 1e-5 at most
# on the networks of the benchmark; a wrong one is off by 1e-2 and more.
TOLERANCE = 2e-3
# Where the model rounds to steps, a value between two goes either way, by a whole step, and the
# layers behind it make more of that: 7 % on a MobileNetV2 of bytes with random weights, 18 % on a
# ResNet-50 and small images. More than this is compared with what rounding does.
TOLERANCE_IN_STEPS = 0.15
# Of the largest value where the results are compared with what rounding does to the model's own:
# so many times its errors are right, and never more than half of the largest value.
_TIMES, _MOST = 4, 0.5
# In bfloat16 what ATen's own ops make of a float32 model is compared with that; this is right.
LEAST_IN_BFLOAT16 = 0.05
# How far inputs are nudged, of their largest value: as far as rounding moves what a layer reads, of
# models that round to steps and of others.
NUDGE_IN_STEPS, NUDGE = 1e-5, 1e-6
# An output that rounding moves so far is noise: two right forms differ by anything.
CHAOTIC = _MOST / _TIMES
# Of results of rounding: what two right forms do not differ by in any model that was seen.
ALIKE = _MOST

# Elements of integer and boolean results that may differ: where two scores are all but equal,
# rounding decides.
_UNDECIDED = 0.01


def nudged(value: Any, nudge: float) -> Any:
    """Inputs that rounding could have made of these."""
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
    """What two right forms may differ by at sight. Half of the numbers of bfloat16 and float16 are
    rounded otherwise, and layers make more of that: they are always compared with rounding."""
    if dtype in _HALVES:
        return 0.0
    least = TOLERANCE_IN_STEPS if in_steps else TOLERANCE
    is_double = dtype in (torch.float64, torch.complex128)
    return least * _DOUBLE if is_double and not in_steps else least


# What a step of float64 is of one of float32.
_DOUBLE = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


@dataclass
class Judgement:
    """what: how a result is wrong; empty: it is not. moved: how far rounding moves that output, or
    the one that it moves most, of its largest value. is_noise: of all outputs."""

    what: str
    tolerance: float
    moved: float
    is_noise: bool


def least_of(dtype: torch.dtype, in_steps: bool) -> float:
    """What two right forms may differ by in any case, of the largest value."""
    return tolerance_of(dtype, in_steps) or torch.finfo(dtype).eps


def judged(
    exact: Any, others: Sequence[Any], result: Any, least: Callable[[torch.dtype], float]
) -> Judgement:
    """`result` beside results that are right but for rounding, the first of which is the model's,
    and what these would be without. Each output is judged by itself.

    least: by the type of an output, a tolerance that is always right, of the largest value."""
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
    """What is wrong, the tolerance, and how far rounding moves the output, of its largest value."""
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
            of_channel = ", or a channel of it is, in the mean" if at else ""
            return f"off by {apart[0].item():.2g} of {scale:.2g}{of_channel}", tolerance, moved
    return "", tolerance, moved


_HALVES = (torch.bfloat16, torch.float16)


def _of_channels(apart: Tensor, exact: Tensor, dims: set[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The largest error; then, of each channel along these dims, the mean error, and that of its
    scale: rounding to few digits hides in the largest error what these tell. And how large each is
    of the numbers themselves."""
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
    """How `result` differs from `expected`, both as a forward returns them; empty: it does not.
    tolerance: of the largest value, the same for all types or by type."""
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
    least = torch.finfo(a.dtype).tiny  # what is less may be 0 in one form
    return f"off by {apart:.2g} of {scale:.2g}" if apart > max(tolerance * scale, least) else ""


def _infinite(value: Tensor) -> Tensor:
    return torch.where(value.isinf(), value.sign() if not value.is_complex() else 1, 0)


def others_like(value: Any) -> list[Any]:
    """Tensors of other sizes, with values of these repeated: one more in the batch, and images of a
    quarter of the size, small ones of twice, or, where a model does not take those, of half or of
    one that is 64 less or 32 more. (32 more at first would make 50 000 voxels of 4 x 5 x 6.)
    Names and numbers stay, as do the fourth and more dims of an image, whose product with the
    others would be huge."""
    return [pytree.tree_map_only(Tensor, partial(_resized, size_of), value) for size_of in _SIZES]


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
