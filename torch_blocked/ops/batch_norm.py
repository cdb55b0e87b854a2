"""Batch norm with running statistics: one pass x * scale + shift per channel."""

from __future__ import annotations

import torch

from torch_blocked.ops.table import implements
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


@implements(aten.native_batch_norm.default)
def native_batch_norm(func, input, weight, bias, mean, var, training, momentum, eps):
    """-> output in the format of input, and the empty statistics ATen gives in inference."""
    if training or not isinstance(input, BlockedTensor) or mean is None or var is None:
        return NotImplemented
    out = torch.ops.torch_blocked.batch_norm_inference(
        input._physical, input._channels, weight, bias, mean, var, eps
    )
    empty = mean.new_empty(0)
    return BlockedTensor(out, input._channels), empty, empty.clone()


@implements(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(func, input, weight, bias, mean, var, momentum, eps):
    return native_batch_norm(func, input, weight, bias, mean, var, False, momentum, eps)


@implements(aten._batch_norm_no_update.default)
def batch_norm_no_update(func, input, weight, bias, mean, var, momentum, eps):
    result = native_batch_norm(func, input, weight, bias, mean, var, False, momentum, eps)
    return result if result is NotImplemented else (*result, torch.empty(0, dtype=torch.uint8))


@torch.library.register_fake("torch_blocked::batch_norm_inference")
def _(input, channels, weight, bias, running_mean, running_var, eps):
    return torch.empty_like(input, memory_format=torch.contiguous_format)
