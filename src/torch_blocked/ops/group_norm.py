"""Group norm and layer norm, and their gradients. Instance norm is a batch norm over images that
`view` joins into one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_blocked.ops.contract import as_dense, expect, implements
from torch_blocked.ops.operands import (
    asked_for,
    clear_tail,
    fake_norm_gradients,
    gradient_like,
    statistics_dtype,
)
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


@implements(aten.native_group_norm.default, takes="input: blocked")
def native_group_norm(func, input, weight, bias, batch, channels, pixels, groups, eps):
    """-> output in the format of input, and mean and 1 / sqrt(var + eps) of every group, dense
    [N, groups], in the parameters' dtype. Any number of threads gives the same bits."""
    sizes = (*input.shape[:2], math.prod(input.shape[2:]))
    expect(sizes == (batch, channels, pixels), "N, C and the pixels of the input")
    out, mean, rstd = _tb.group_norm(input._physical, channels, weight, bias, groups, eps)
    return BlockedTensor(out, channels), mean, rstd


@implements(aten.native_group_norm_backward.default, takes="input: blocked")
def native_group_norm_backward(
    func, grad_out, input, mean, rstd, weight, batch, channels, pixels, groups, output_mask
):
    """-> gradients of input (in its format), weight and bias (dense)."""
    grad = gradient_like(grad_out, input._channels, input)
    gradients = _tb.group_norm_backward(
        grad, input._physical, channels, mean, rstd, weight, groups, output_mask
    )
    return asked_for(gradients, output_mask, channels)


@implements(aten.native_layer_norm.default, takes="input: blocked")
def native_layer_norm(func, input, normalized_shape, weight, bias, eps):
    """Normalizes over C and all pixels as one group, or over trailing spatial dims in each lane.

    -> output in the format of input; mean and 1 / sqrt(var + eps) with 1 for the normalized dims,
    dense in the first case and blocked in the second."""
    expect(input.dtype == torch.float32, "float32")
    count = _normalized(input, normalized_shape, weight, bias)
    physical, channels = input._physical, input._channels
    if count == input.dim() - 1:
        out, mean, rstd = _tb.group_norm(physical, channels, None, None, 1, eps)
        mean, rstd = (value.view(input.shape[0], *[1] * count) for value in (mean, rstd))
    else:
        outer, inner = physical.shape[: -count - 1], physical.shape[-count - 1 :]
        rows = physical.reshape(math.prod(outer), 1, *inner)  # [rows, 1, *normalized, block]
        out, *statistics = _tb.group_norm(rows, input.block, None, None, input.block, eps)
        out = out.view(physical.shape)
        dims = (*outer, *[1] * count, input.block)
        mean, rstd = (clear_tail(each.view(dims), channels) for each in statistics)
    if weight is not None:
        out = out * _elementwise(weight, input)
    if bias is not None:
        out = out + _elementwise(bias, input)
    return clear_tail(out, channels), mean, rstd


@implements(aten.native_layer_norm_backward.default, takes="input: blocked")
def native_layer_norm_backward(
    func, grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
):
    """-> gradients of input (in its format), weight and bias (dense).

    dx = rstd * (dy - mean(dy) - x_hat * mean(dy * x_hat)), where dy is the gradient times the
    weight.
    Source: Ba, Kiros, Hinton, "Layer Normalization" (arXiv 1607.06450)."""
    count = _normalized(input, normalized_shape, weight, bias)
    channels, ndim = input._channels, input.dim()
    grad = gradient_like(grad_out, input._channels, input)
    mean, rstd = (_statistics(value, input, count) for value in (mean, rstd))
    normalized = clear_tail((input._physical - mean) * rstd, channels)._physical
    scaled = grad if weight is None else grad * _elementwise(weight, input)
    dims = [*range(ndim - count, ndim + (count == ndim - 1))]  # C includes the lanes
    shares = [
        value.sum(dims, keepdim=True) / math.prod(normalized_shape)
        for value in (scaled, scaled * normalized)
    ]
    grad_input = rstd * (scaled - shares[0] - normalized * shares[1])
    parameters = [
        _parameter_gradient(values, input, count) if asked else None
        for values, asked in zip((grad * normalized, grad), output_mask[1:], strict=True)
    ]
    return clear_tail(grad_input, channels) if output_mask[0] else None, *parameters


def _normalized(input: BlockedTensor, normalized_shape, *parameters: Tensor | None) -> int:
    """The number of trailing dims that are normalized. N may not be among them. Parameters have
    these dims, too."""
    expect(input.is_floating_point(), "floating-point values")
    count, trailing = len(normalized_shape), tuple(normalized_shape)
    fits = 0 < count < input.dim() and tuple(input.shape[-count:]) == trailing and 0 not in trailing
    expect(fits, "trailing dims without N, none of them empty")
    for each in parameters:
        expect(each is None or tuple(each.shape) == trailing, "parameters of the normalized dims")
    return count


def _elementwise(parameter: Tensor, input: BlockedTensor) -> Tensor:
    """A parameter [C, *spatial], or its trailing dims, in dims that broadcast against a physical
    tensor."""
    if parameter.dim() == input.dim() - 1:
        return _tb.to_blocked(parameter.detach().unsqueeze(0), input.block)
    return parameter.unsqueeze(-1)


def _statistics(value: Tensor, input: BlockedTensor, count: int) -> Tensor:
    """A mean or rstd of any format in dims that broadcast against the physical input: one for all
    channels, or one for each."""
    if count == input.dim() - 1:
        return as_dense(value).unsqueeze(-1)
    if isinstance(value, BlockedTensor) and value.block == input.block:
        return value._physical
    return _tb.to_blocked(as_dense(value), input.block)


def _parameter_gradient(values: Tensor, input: BlockedTensor, count: int) -> Tensor:
    """Sums physical `values` to the last `count` logical dims."""
    if count == input.dim() - 1:
        return _tb.to_dense(values.sum(0, keepdim=True), input._channels).squeeze(0)
    return values.sum([*range(input.dim() - count), input.dim()])


@torch.library.register_fake("torch_blocked::group_norm")
def _(input, channels, weight, bias, groups, eps):
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    dtype = statistics_dtype(input, weight, bias)
    return out, *(input.new_empty(input.shape[0], groups, dtype=dtype) for _ in range(2))


@torch.library.register_fake("torch_blocked::group_norm_backward")
def _(grad_output, input, channels, mean, rstd, weight, groups, output_mask):
    return fake_norm_gradients("group_norm_backward", input, channels, weight, output_mask)
