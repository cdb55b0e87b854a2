"""Gated linear units: the first half of a dim times the sigmoid of the second, and the gradient."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import expect, implements
from torch_blocked.ops.operands import gradient_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


def _halves(input: BlockedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = input._channels // 2
    return tuple(
        _tb.slice_channels(input._physical, input._channels, start, half) for start in (0, half)
    )


@implements(aten.glu.default, takes="input: blocked, dim: dim")
def glu(func, input, dim=-1):
    expect(input.shape[dim] % 2 == 0, "a dim of two halves")
    if dim != 1:
        return BlockedTensor(func(input._physical, dim), input._channels)
    value, gate = _halves(input)
    return BlockedTensor(value * gate.sigmoid(), input._channels // 2)


@implements(aten.glu_backward.default, takes="input: blocked, dim: dim")
def glu_backward(func, grad_output, input, dim):
    halved = dim == 1
    grad = gradient_like(grad_output, input._channels // (2 if halved else 1), input)
    if not halved:
        return BlockedTensor(func(grad, input._physical, dim), input._channels)
    value, gate = _halves(input)
    gate = gate.sigmoid()
    parts = [grad * gate, grad * value * gate * (1 - gate)]
    half = input._channels // 2
    return BlockedTensor(_tb.concat_channels(parts, [half, half]), input._channels)
