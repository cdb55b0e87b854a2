"""Upsampling, nearest to bicubic, 1-D to 3-D, and the gradients."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import implements
from torch_blocked.ops.images import as_images, from_images, per_image

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
)
_ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")

for _mode in _MODES:
    implements(getattr(aten, _mode).default)(per_image)
for _mode in (*_MODES, *_ANTIALIASED):
    implements(getattr(aten, f"{_mode}_backward").default)(per_image)


@implements(*(getattr(aten, mode).default for mode in _ANTIALIASED), takes="input: blocked")
def antialiased(func, input, output_size, *rest):
    """ATen 2.13's kernel misreads channels-last images where one column of several pixels comes
    out: these are made plain."""
    if input.dim() != 4 or input._channels == 0 or output_size[-1] != 1:
        return per_image(func, input, output_size, *rest)
    images = func(as_images(input._physical).contiguous(), output_size, *rest)
    return from_images(images, input.shape[0], input._channels)
