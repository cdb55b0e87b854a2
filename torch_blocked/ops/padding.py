"""Padding of the spatial dims: constant, reflect and replicate, and the gradients."""

from __future__ import annotations

import torch

from torch_blocked.ops.images import per_image
from torch_blocked.ops.table import clear_tail, implements
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten

for _mode in ("reflection_pad", "replication_pad"):
    for _dims in (1, 2, 3):
        implements(
            getattr(aten, f"{_mode}{_dims}d").default,
            getattr(aten, f"{_mode}{_dims}d_backward").default,
        )(per_image)


@implements(aten.constant_pad_nd.default)
def constant_pad(func, input, pad, value=0):
    """pad: (left, right) of the last dim, then of the one before; negative values crop."""
    if len(pad) > 2 * (input.dim() - 2):
        if any(pad[2 * (input.dim() - 2) :]):
            return NotImplemented  # grows N or C
        pad = pad[: 2 * (input.dim() - 2)]
    physical = func(input._physical, [0, 0, *pad], value)
    if value == 0:
        return BlockedTensor(physical, input._channels)
    return clear_tail(physical, input._channels)
