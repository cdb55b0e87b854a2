"""Upsampling, nearest to bicubic, 1-D to 3-D, and the gradients."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import implements
from torch_blocked.ops.images import per_image

aten = torch.ops.aten

_MODES = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)

for _mode in _MODES:
    implements(
        getattr(aten, _mode).default,
        getattr(aten, f"{_mode}_backward").default,
    )(per_image)
