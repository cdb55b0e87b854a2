"""Inputs that hold special values, and what two results must have in common.

Every comparison takes our result and ATen's, both dense, and says whether they agree."""

from collections.abc import Iterator

import torch
from torch import Tensor

Dims = tuple[int, ...]

LEAST_NORMAL = torch.finfo(torch.float32).tiny
LEAST_DENORMAL = 1.4e-45


def _random(dims: Dims) -> Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(1))


def _alone(dims: Dims, *values: float) -> Iterator[Tensor]:
    """Each value alone among ordinary ones: at the first place, at the last and between them.
    Kernels treat the borders of a picture apart."""
    x = _random(dims)
    for value in values:
        for place in (0, x.numel() // 3, x.numel() - 1):
            planted = x.clone()
            planted.view(-1)[place] = value
            yield planted


def _together(dims: Dims, *values: float) -> Tensor:
    """All values among ordinary ones, each at every seventh place."""
    x = _random(dims)
    for start, value in enumerate(values):
        x.view(-1)[start::7] = value
    return x


def _nan(dims: Dims) -> Iterator[Tensor]:
    yield from _alone(dims, float("nan"))


def _infinities(dims: Dims) -> Iterator[Tensor]:
    yield from _alone(dims, float("inf"), -float("inf"))


def _denormals(dims: Dims) -> Iterator[Tensor]:
    yield _random(dims) * 1e-40
    yield _together(dims, 1e-40, -1e-40, LEAST_DENORMAL, -LEAST_DENORMAL)
    yield _random(dims) * 40  # exponentials of some of them are denormals


def _zeros(dims: Dims) -> Iterator[Tensor]:
    yield torch.full(dims, -0.0)
    yield _random(dims) * 0
    yield _together(dims, 0.0, -0.0)


def _limits(dims: Dims) -> Iterator[Tensor]:
    yield from _alone(dims, 3e38, -3e38, 1e38, -1e38)
    yield _random(dims) * 1e-38


# What a column of the table is about: its inputs.
INPUTS = {
    "NaN": _nan,
    "infinity": _infinities,
    "denormals": _denormals,
    "signed zero": _zeros,
    "near the limits": _limits,
}


# ---- comparisons --------------------------------------------------------------------------------

HUGE = 1e30  # far above what ordinary values sum to


def _near(ours: Tensor, aten: Tensor, tolerance: float, floor: float = 8 * LEAST_DENORMAL) -> bool:
    """Relative to the largest value. Near zero float32 itself is as coarse as the floor."""
    if not aten.numel():
        return True
    # In float64, because the difference may be no float32.
    apart = (ours.double() - aten.double()).abs().max()
    return bool(apart <= tolerance * aten.double().abs().max() + floor)


def _finite_values(ours: Tensor, aten: Tensor, tolerance: float, **floor: float) -> bool:
    """Near, where both are finite. A huge value does not excuse errors of the ordinary ones."""
    finite = ours.isfinite() & aten.isfinite()
    ordinary, huge = finite & (aten.abs() < HUGE), finite & (aten.abs() >= HUGE)
    return all(_near(ours[part], aten[part], tolerance, **floor) for part in (ordinary, huge))


def _classes(x: Tensor) -> Tensor:
    """0: finite, 1: infinity, -1: -infinity, 2: NaN."""
    return x.isposinf().int() - x.isneginf().int() + 2 * x.isnan().int()


def _same_places(ours: Tensor, aten: Tensor) -> bool:
    return torch.equal(_classes(ours), _classes(aten))


def same_classes(ours: Tensor, aten: Tensor) -> bool:
    """NaN, infinity and -infinity are at the same places; the other values are near."""
    return _same_places(ours, aten) and _finite_values(ours, aten, 1e-4)


def _small(ours: Tensor, aten: Tensor) -> Tensor:
    """Where one of the two is a denormal or zero."""
    finite = ours.isfinite() & aten.isfinite()
    return finite & ((ours.abs() < LEAST_NORMAL) | (aten.abs() < LEAST_NORMAL))


def same_denormals(ours: Tensor, aten: Tensor) -> bool:
    """Where one of the two is a denormal, the other one is almost the same number, and not zero."""
    small = _small(ours, aten)
    return same_classes(ours, aten) and _near(ours[small], aten[small], 1e-3)


def same_zeros(ours: Tensor, aten: Tensor) -> bool:
    """Zeros have the same sign."""
    zero = (ours == 0) & (aten == 0)
    signs = torch.equal(ours[zero].signbit(), aten[zero].signbit())
    return signs and same_classes(ours, aten)


def same_bits(ours: Tensor, aten: Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), aten.view(torch.int32))


def coarse_denormals(ours: Tensor, aten: Tensor) -> bool:
    """Among denormals alone, results are not zero, and have some of their bits."""
    return _same_places(ours, aten) and _finite_values(ours, aten, 0.05)


def normal_values(ours: Tensor, aten: Tensor) -> bool:
    """A denormal result may be zero."""
    return _same_places(ours, aten) and _finite_values(ours, aten, 1e-4, floor=LEAST_NORMAL)


def larger_values(ours: Tensor, aten: Tensor) -> bool:
    """Each product of a sum may lose what is below the smallest normal number."""
    floor = 1000 * LEAST_NORMAL
    return _same_places(ours, aten) and _finite_values(ours, aten, 1e-4, floor=floor)


def reaches_more(ours: Tensor, aten: Tensor) -> bool:
    """What is not finite in ATen is not finite here, and NaN is NaN. More may be."""
    kept = (ours.isnan() | ~aten.isnan()) & (~ours.isfinite() | aten.isfinite())
    return bool(kept.all())


def reaches_less(ours: Tensor, aten: Tensor) -> bool:
    """What is finite in ATen is the same here. Where ATen has a NaN there may be a number."""
    finite = aten.isfinite()
    return bool(ours[finite].isfinite().all()) and _finite_values(ours, aten, 1e-4)


def finite_values(ours: Tensor, aten: Tensor) -> bool:
    """What is finite in both is near. One of them may overflow where the other one does not."""
    return _finite_values(ours, aten, 1e-4)


def numbers_or_nan(ours: Tensor, aten: Tensor) -> bool:
    """What is finite in one is finite in the other. An infinity may be NaN."""
    return torch.equal(ours.isfinite(), aten.isfinite()) and _finite_values(ours, aten, 1e-4)


# What "as ATen" means in each column.
SAME = {
    "NaN": same_classes,
    "infinity": same_classes,
    "denormals": same_denormals,
    "signed zero": same_zeros,
    "near the limits": same_classes,
}
