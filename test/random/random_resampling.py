"""Sizes and scales of resampling, whose rounding ATen's kernels do not agree on."""

import itertools

import torch
from torch.nn import functional as F

MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
    "area": (1, 2, 3),
}
ALIGNED = ("linear", "bilinear", "trilinear", "bicubic")
# From 0.2 to 4, none of them a round number, and those at which sizes stay or double.
SCALES = [0.2 + 0.0937 * i for i in range(41)] + [1.0, 1.02, 1.3, 2.0, 2.02, 2.2, 1 / 3, 0.5]


def options():
    """(mode, spatial dims, further arguments of interpolate)."""
    for mode, ranks in MODES.items():
        for rank, aligned in itertools.product(ranks, (False, True)):
            if mode in ALIGNED:
                yield mode, rank, {"align_corners": aligned}
            elif not aligned:
                yield mode, rank, {}


def differing(mode, rank, more, pairs, dtype=torch.float32, channels=3, long=()):
    """The (src, scales) at which a blocked image gives other values than ATen's. One dim goes
    through all pairs of a size and a scale; the others stay small, or are as `long` says."""
    wrong = []
    others = [long or (5, 1.3), (2, 1.7)][: rank - 1]
    for size, scale in pairs:
        for place in range(rank):
            dims, factors = [list(each) for each in zip(*others, strict=True)] or [[], []]
            dims.insert(place, size)
            factors.insert(place, scale)
            if min(int(d * f) for d, f in zip(dims, factors, strict=True)) < 1:
                continue
            numel = channels * torch.Size(dims).numel()
            image = torch.arange(numel).remainder(251).reshape(1, channels, *dims).to(dtype)
            dense = F.interpolate(image, scale_factor=factors, mode=mode, **more)
            blocked = F.interpolate(image.to_blocked(), scale_factor=factors, mode=mode, **more)
            if not _alike(mode, dense, blocked.to_dense()):
                wrong.append((dims, factors))
    return wrong


def _alike(mode, dense, blocked):
    if mode.startswith("nearest"):
        return torch.equal(dense, blocked)
    return dense.shape == blocked.shape and torch.allclose(dense, blocked, rtol=1e-5, atol=1e-3)
