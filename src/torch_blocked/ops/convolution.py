"""Convolution and transposed convolution, 1-D to 3-D: a dense weight on blocked activations."""

from __future__ import annotations

import torch

from torch_blocked.descriptor import blocked_dims
from torch_blocked.ops.contract import implements
from torch_blocked.ops.operands import asked_for, gradient_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten


@implements(
    aten.convolution.default, aten._convolution.default, takes="input: blocked, weight: dense"
)
def convolution(
    func, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_
):
    """input [N, IC, *in] blocked, weight [OC, IC/groups, *kernel] -> [N, OC, *out]. The weight
    stays dense, because it is packed for its kernel anyway."""
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
def _(input, channels, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    n, _, *spatial, block = input.shape
    image = input.new_empty((n, channels, *spatial))  # without data, to ask ATen for the dims
    out = torch.convolution(
        image, weight, None, stride, padding, dilation, transposed, output_padding, groups
    )
    return input.new_empty(blocked_dims(out.shape, block))


@implements(aten.convolution_backward.default, takes="input: blocked, weight: dense")
def convolution_backward(
    func, grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed,
    output_padding, groups, output_mask,
):  # fmt: skip
    """grad_output [N, OC, *out] blocked or dense, input [N, IC, *in] blocked, weight
    -> gradients of input (blocked), weight (dense, strides of weight) and bias (dense).

    Every run gives the same bits. With groups of more than one channel, the last bits of the
    weight's gradient may depend on the number of threads, because oneDNN splits the sum over N
    among them."""
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    gradients = torch.ops.torch_blocked.convolution_backward(
        gradient_like(grad_output, out_channels, input),
        input._physical,
        input._channels,
        weight,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )
    return asked_for(gradients, output_mask, input._channels)


@torch.library.register_fake("torch_blocked::convolution_backward")
def _(
    grad_output, input, channels, weight, stride, padding, dilation, transposed, output_padding,
    groups, output_mask,
):  # fmt: skip
    none = input.new_empty(0)
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format) if output_mask[0] else none,
        torch.empty_like(weight) if output_mask[1] else none.clone(),
        input.new_empty(out_channels) if output_mask[2] else none.clone(),
    )
