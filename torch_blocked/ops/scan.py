"""Running sums and sorts along N or a spatial dim: ATen's on the physical tensor."""

from __future__ import annotations

import torch

from torch_blocked.ops.operands import clear_tail
from torch_blocked.ops.table import implements

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
)
def along_dim(func, input, *args, **kwargs):
    names = [argument.name for argument in func._schema.arguments[1:]]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    dim = arguments.get("dim", -1)
    if not -input.dim() <= dim < input.dim() or dim % input.dim() == 1:
        return NotImplemented
    arguments["dim"] = dim % input.dim()
    out = func(input._physical, **arguments)
    if isinstance(out, tuple):
        return tuple(clear_tail(value, input._channels) for value in out)
    return clear_tail(out, input._channels)
