"""Random fills, as dropout makes them: the same seed gives the values of the dense tensor.

The stream follows the logical order, so it is drawn dense; one counted reorder brings it over."""

from __future__ import annotations

import torch

from torch_blocked.ops.table import implements
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


@implements(aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default)
def fill(func, input, *args, **kwargs):
    if not isinstance(input, BlockedTensor):
        return NotImplemented
    dense = func(torch.empty(input.shape, dtype=input.dtype), *args, **kwargs)
    input._physical.copy_(torch.ops.torch_blocked.to_blocked(dense, input.block))
    return input
