"""Running sums and sorts along N or a spatial dim: ATen's ops on the physical tensor."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import bound, expect, implements, wrapped_dim
from torch_blocked.ops.operands import clear_tail

aten = torch.ops.aten


@implements(
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    takes="input: blocked",
)
def along_dim(func, input, *args, **kwargs):
    arguments = bound(func, args, kwargs)
    arguments["dim"] = dim = wrapped_dim(arguments.get("dim", -1), input.dim())
    expect(dim != 1, "a dim other than C")
    out = func(input._physical, **arguments)
    if isinstance(out, tuple):
        return tuple(clear_tail(value, input._channels) for value in out)
    return clear_tail(out, input._channels)
