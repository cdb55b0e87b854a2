"""Convolution and transposed convolution, 1-D to 3-D: a dense weight on blocked activations."""

from __future__ import annotations

import torch

from torch_blocked.ops.table import implements
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


@implements(aten.convolution.default)
def convolution(
    func, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    """input [N, IC, *in] blocked, weight [OC, IC/groups, *kernel] dense -> [N, OC, *out] blocked."""
    if not isinstance(input, BlockedTensor) or isinstance(weight, BlockedTensor):
        return NotImplemented
    out = torch.ops.torch_blocked.convolution(
        input._physical,
        input._channels,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
    )
    return BlockedTensor(out, weight.shape[1] * groups if transposed else weight.shape[0])


@torch.library.register_fake("torch_blocked::convolution")
def _(
    input, channels, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    n, _, *spatial, block = input.shape
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    per_dim = [
        values * len(spatial) if len(values) == 1 else values
        for values in map(list, (stride, padding, dilation, output_padding))
    ]
    out = [
        _transposed_extent(i, k, *rest) if transposed else _extent(i, k, *rest)
        for i, k, *rest in zip(spatial, weight.shape[2:], *per_dim, strict=True)
    ]
    return input.new_empty(n, -(-out_channels // block), *out, block)


def _extent(size, kernel, stride, padding, dilation, _output_padding):
    """Output extent of a convolution. Source: torch.nn.Conv2d shape formula."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _transposed_extent(size, kernel, stride, padding, dilation, output_padding):
    """Source: torch.nn.ConvTranspose2d shape formula."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1
