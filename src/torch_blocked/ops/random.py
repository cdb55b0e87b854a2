"""Random fills, as dropout makes them: the same seed gives the values of the dense tensor.

The stream follows the logical order, so values are drawn dense; one counted reorder blocks them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.ops.contract import implements
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


@implements(
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),  # `from` is a keyword of Python
    aten.random_.to,
    aten.uniform_.default,
    takes="input: blocked",
)
def fill(func, input, *args, **kwargs):
    dense = func(torch.empty(input.shape, dtype=input.dtype), *args, **kwargs)
    input._physical.copy_(_tb.to_blocked(dense, input.block))
    return input


@implements(
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    takes="input: blocked, memory_format: kept format",
)
def like(func, input, *args, memory_format=None, **kwargs):
    dense: Tensor = func(torch.empty(input.shape, dtype=input.dtype), *args, **kwargs)
    return BlockedTensor(_tb.to_blocked(dense, input.block), input._channels)


@implements(aten.bernoulli.default, aten.bernoulli.p, takes="input: blocked")
def bernoulli(func, input, *args, **kwargs):
    dense = func(_tb.to_dense(input._physical, input._channels), *args, **kwargs)
    return BlockedTensor(_tb.to_blocked(dense, input.block), input._channels)
