"""Softmax and its logarithm over any dim, and their gradients."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import expect, implements
from torch_blocked.ops.operands import clear_tail, gradient_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

_LOGARITHMS = {aten._log_softmax.default, aten._log_softmax_backward_data.default}


@implements(aten._softmax.default, aten._log_softmax.default, takes="input: blocked, dim: dim")
def softmax(func, input, dim, half_to_float):
    """Any number of threads gives the same bits. Over C, types other than float32 run on a dense
    copy."""
    physical, channels = input._physical, input._channels
    if dim != 1 and physical.dtype != torch.float32:
        return clear_tail(func(physical, dim, half_to_float), channels)
    return BlockedTensor(_tb.softmax(physical, channels, dim, func in _LOGARITHMS), channels)


@implements(
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    takes="output: blocked, dim: dim",
)
def softmax_backward(func, grad_output, output, dim, input_dtype):
    expect(input_dtype == output.dtype, "the dtype of the output")
    grad = gradient_like(grad_output, output._channels, output)
    physical, channels = output._physical, output._channels
    if dim != 1 and physical.dtype != torch.float32:
        return clear_tail(func(grad, physical, dim, input_dtype), channels)
    logarithm = func in _LOGARITHMS
    return BlockedTensor(_tb.softmax_backward(grad, physical, channels, dim, logarithm), channels)


@torch.library.register_fake("torch_blocked::softmax")
def _(input, channels, dim, log):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.register_fake("torch_blocked::softmax_backward")
def _(grad_output, output, channels, dim, log):
    return torch.empty_like(output, memory_format=torch.contiguous_format)
