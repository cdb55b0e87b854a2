"""Padding: constant, reflect and replicate for the spatial dims, constant for N and C."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import expect, implements
from torch_blocked.ops.images import per_image
from torch_blocked.ops.operands import clear_tail
from torch_blocked.ops.shuffle import gather_channels
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

for _mode in ("reflection_pad", "replication_pad"):
    for _dims in (1, 2, 3):
        implements(
            getattr(aten, f"{_mode}{_dims}d").default,
            getattr(aten, f"{_mode}{_dims}d_backward").default,
        )(per_image)


@implements(aten.constant_pad_nd.default, takes="input: blocked")
def constant_pad(func, input, pad, value=0):
    """pad: (left, right) of the last dim, then of the dim before it; negative values crop."""
    spatial = 2 * (input.dim() - 2)
    expect(len(pad) % 2 == 0 and len(pad) <= spatial + 4, "two numbers a dim")
    of_channels, of_batch = pad[spatial : spatial + 2], pad[spatial + 2 :]
    if any(of_channels):
        expect(input._channels + sum(of_channels) >= 0, "channels to crop")
        input = _pad_channels(input, of_channels[0], of_channels[1], value)
    pads = [0, 0, *pad[:spatial]]
    if any(of_batch):
        pads += [0, 0, *of_batch]
    physical = func(input._physical, pads, value) if any(pads) else input._physical.clone()
    if value == 0:
        return BlockedTensor(physical, input._channels)
    return clear_tail(physical, input._channels)


def _pad_channels(input: BlockedTensor, left: int, right: int, value: float) -> BlockedTensor:
    kept = range(max(-left, 0), input._channels - max(-right, 0))
    index = [-1] * max(left, 0) + [*kept] + [-1] * max(right, 0)
    out = gather_channels(input, index)
    if value == 0:
        return out
    added = torch.tensor([value if channel < 0 else 0 for channel in index], dtype=out.dtype)
    added = added.view(1, -1, *[1] * (input.dim() - 2))
    physical = out._physical + torch.ops.torch_blocked.to_blocked(added, out.block)
    return BlockedTensor(physical, out._channels)
