"""Upsampling, nearest to bicubic, 1-D to 3-D, and the gradients."""

from __future__ import annotations

import torch

from torch_blocked import _C
from torch_blocked.ops.contract import implements
from torch_blocked.ops.images import as_images, from_images, per_image
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

# Their names in torch_blocked::resample.
_INTERPOLATIONS = {
    "upsample_nearest1d": 0,
    "upsample_nearest2d": 0,
    "upsample_nearest3d": 0,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 1,
    "_upsample_nearest_exact3d": 1,
    "upsample_linear1d": 2,
    "upsample_bilinear2d": 2,
    "upsample_trilinear3d": 2,
    "upsample_bicubic2d": 3,
}
# The types that ATen's nearest modes take; ATen refuses others.
_NEAREST = (torch.float64, torch.bfloat16, torch.float16, torch.uint8)
_ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
_ALL = (*_INTERPOLATIONS, *_ANTIALIASED)


@implements(*(getattr(aten, mode).default for mode in _INTERPOLATIONS), takes="input: blocked")
def resample(func, input, output_size, *rest):
    """input [N, C, *in] -> [N, C, *output_size], nearest to cubic. Refuses what ATen refuses."""
    spatial = len(output_size)
    interpolation = _INTERPOLATIONS[func._schema.name.removeprefix("aten::")]
    dtype = input._physical.dtype
    sums = dtype == torch.float32 or (dtype == torch.bfloat16 and _C.multiplies_bfloats())
    has_kernel = sums or (interpolation <= 1 and dtype in _NEAREST)
    is_known = has_kernel and input.dim() == spatial + 2
    if not is_known or input._physical.numel() == 0 or min(output_size) <= 0:
        return per_image(func, input, output_size, *rest)
    align_corners, *scales = rest if interpolation >= 2 else (False, *rest)
    scales = [scale or 0.0 for scale in (*scales, *[None] * spatial)[:spatial]]
    physical = _tb.resample(
        input._physical, input._channels, output_size, interpolation, align_corners, scales
    )
    return BlockedTensor(physical, input._channels)


@torch.library.register_fake("torch_blocked::resample")
def _(input, channels, size, interpolation, align_corners, scales):
    return input.new_empty(*input.shape[:2], *size, input.shape[-1])


for _mode in _ALL:
    implements(getattr(aten, f"{_mode}_backward").default)(per_image)


@implements(*(getattr(aten, mode).default for mode in _ANTIALIASED), takes="input: blocked")
def antialiased(func, input, output_size, *rest):
    """Converts images to plain if the result is one column of several pixels, because the kernel of
    ATen 2.13 misreads channels-last images there."""
    if input.dim() != 4 or input._channels == 0 or output_size[-1] != 1:
        return per_image(func, input, output_size, *rest)
    images = func(as_images(input._physical).contiguous(), output_size, *rest)
    return from_images(images, input.shape[0], input._channels)
