"""Ops that treat all channels alike run on the physical tensor as a batch of channels-last images.

A blocked tensor [N, C/b, *spatial, b] is, byte for byte, a channels-last batch of N * C/b images of
b channels. ATen's channels-last kernels then need no copy, and lanes beyond C stay 0 as long as the
op turns zeros into zeros."""

from __future__ import annotations

import re
from functools import cache

from torch import Tensor

from torch_blocked.descriptor import blocks_of
from torch_blocked.ops.contract import expect
from torch_blocked.ops.operands import clear_tail, to_blocked_like
from torch_blocked.tensor import BlockedTensor


def as_images(physical: Tensor) -> Tensor:
    """[N, C/b, *spatial, b] -> [N * C/b, b, *spatial], the same memory unless it is a slice."""
    return physical.contiguous().flatten(0, 1).movedim(-1, 1)


def from_images(images: Tensor, batch: int, channels: int) -> BlockedTensor:
    """[N * C/b, b, *spatial] -> blocked; no copy if the images are channels-last."""
    blocks = blocks_of(channels, images.shape[1])
    physical = images.movedim(1, -1).contiguous().unflatten(0, (batch, blocks))
    if images.dtype.is_floating_point:
        return BlockedTensor(physical, channels)
    return clear_tail(physical, channels)  # indices of zeros need not be 0


def per_image(func, *args, **kwargs):
    """Runs `func` on images. Its tensor arguments are activations with the same N and C. The
    `input_size` of backward formulas becomes the images' size."""
    like = next(a for a in args if isinstance(a, BlockedTensor))
    expect(like.dim() == _rank(func), "a batch")  # ATen also takes one image, [C, *spatial]
    # Most of these ops refuse C = 0 but take N = 0, and C = 0 would become N = 0.
    expect(like._channels > 0, "channels")
    batch, channels, block = like.shape[0], like._channels, like.block
    alike = all(a.shape[:2] == like.shape[:2] for a in args if isinstance(a, Tensor))
    expect(alike, "tensors of one N and C")

    def image(name, value):
        if isinstance(value, Tensor):
            return as_images(to_blocked_like(value, like)._physical)
        if name == "input_size":
            return [batch * like._physical.shape[1], block, *value[2:]]
        return value

    names = [argument.name for argument in func._schema.arguments]
    out = func(*map(image, names, args), **kwargs)
    if isinstance(out, tuple):
        return tuple(from_images(value, batch, channels) for value in out)
    return from_images(out, batch, channels)


@cache
def _rank(func) -> int:
    """The number of dims of a batch: 4 for upsample_nearest2d."""
    return int(re.findall(r"([123])d", func._schema.name)[0]) + 2
