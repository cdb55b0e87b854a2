"""Compares two forms of a model, and makes inputs to compare them on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_blocked import structure
from torch_blocked.tensor import BlockedTensor, to_blocked

# Of the largest value of a result. Rounding differs between two right forms by 1e-5 at most on the
# networks of the benchmark; a wrong one is off by 1e-2 and more.
TOLERANCE = 2e-3
# Where the model rounds to steps, a value between two goes either way, by a whole step, and the
# layers behind it make more of that: 7 % on a MobileNetV2 of bytes with random weights, 18 % on a
# ResNet-50 and small images. More than this is compared with what a nudge of the inputs does.
TOLERANCE_IN_STEPS = 0.15
# How far inputs are nudged, of their largest value: as far as rounding moves what a layer reads, of
# models that round to steps and of others.
NUDGE_IN_STEPS, NUDGE = 1e-5, 1e-6
# In bfloat16: so many times the error that ATen's own ops make in it, within these bounds.
_LEAST, _TIMES, _MOST = 0.05, 4, 0.5
# Results that a nudge moves so far are those of rounding: two right forms differ by anything.
CHAOTIC = _MOST / _TIMES

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


def moved(expected: Any, result: Any) -> float:
    """How far results are from others at most, of the largest value of each: of forms that are both
    right, or of one form and nudged inputs."""
    pairs = zip(structure.flatten(expected)[0], structure.flatten(result)[0], strict=True)
    errors = [
        ((_plain(a) - _plain(b)).abs().max() / _plain(a).abs().max().clamp(min=1e-30)).item()
        for a, b in pairs
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel() and a.shape == b.shape
    ]
    return max(errors, default=0)


def tolerance_beside(error: float, least: float = _LEAST) -> float:
    """The tolerance where rounding moves results by `error`: of a form in bfloat16 as the capture's
    ops by ATen, of any other as nudged inputs. In deep networks rounding errors grow, and where a
    norm divides by next to nothing."""
    return min(max(least, _TIMES * error), _MOST)


def difference(expected: Any, result: Any, tolerance: float) -> str:
    """How `result` differs from `expected`, both as a forward returns them; empty: it does not."""
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


def _of_tensors(a: Tensor, b: Tensor, tolerance: float) -> str:
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
