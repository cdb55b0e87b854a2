"""Shapes of the reorder ops, for tracing."""

from __future__ import annotations

import torch

from torch_blocked.descriptor import blocked_dims


@torch.library.register_fake("torch_blocked::to_blocked")
def _(input, block, *, dtype=None):
    return input.new_empty(blocked_dims(input.shape, block), dtype=dtype)


@torch.library.register_fake("torch_blocked::to_dense")
def _(input, channels, *, channels_last=False, dtype=None):
    n, _, *spatial, _ = input.shape
    if channels_last:
        out = input.new_empty(n, *spatial, channels, dtype=dtype)
        return out.movedim(-1, 1)
    return input.new_empty(n, channels, *spatial, dtype=dtype)


@torch.library.register_fake("torch_blocked::reblock")
def _(input, channels, block, *, dtype=None):
    n, _, *spatial, _ = input.shape
    return input.new_empty(blocked_dims((n, channels, *spatial), block), dtype=dtype)


@torch.library.register_fake("torch_blocked::empty_like")
def _(input):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.register_fake("torch_blocked::clear_tail_")
def _(input, channels):
    pass


@torch.library.register_fake("torch_blocked::tail_is_zero")
def _(input, channels):
    return True  # a tensor without values keeps the invariant
