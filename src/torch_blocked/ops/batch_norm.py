"""Batch norm: one pass x * scale + shift per channel, with running statistics or the batch's."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.ops.contract import expect, implements
from torch_blocked.ops.operands import (
    asked_for,
    fake_norm_gradients,
    gradient_like,
    statistics_dtype,
)
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


@implements(
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, takes="input: blocked"
)
def native_batch_norm(func, input, weight, bias, mean, var, training, momentum, eps):
    """-> output in the format of input, and mean and 1 / sqrt(var + eps) of the batch, dense.

    In inference the statistics are empty, as in ATen. In training mean and var are updated in
    place. Any number of threads gives the same bits. bfloat16 and float16 are computed in float32,
    and the statistics have the parameters' dtype."""
    physical, channels = input._physical, input._channels
    _check_sizes(channels, weight, bias, mean, var)
    expect((mean is None) == (var is None), "both running statistics or none")
    if training:
        out, *statistics = _tb.batch_norm_training(
            physical, channels, weight, bias, mean, var, momentum, eps
        )
        return BlockedTensor(out, channels), *statistics
    _check_given(mean)
    out = _tb.batch_norm_inference(physical, channels, weight, bias, mean, var, eps)
    empty = mean.new_empty(0)
    return BlockedTensor(out, channels), empty, empty.clone()


@implements(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(func, input, weight, bias, training, momentum, eps):
    return native_batch_norm(func, input, weight, bias, None, None, training, momentum, eps)


@implements(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(func, input, weight, bias, mean, var, training, momentum, eps):
    """Like native_batch_norm, but returns the new running statistics and keeps the old ones."""
    mean, var = mean.clone(), var.clone()
    result = native_batch_norm(func, input, weight, bias, mean, var, training, momentum, eps)
    return *result, mean, var


@implements(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(func, input, weight, bias, mean, var, momentum, eps):
    return native_batch_norm(func, input, weight, bias, mean, var, False, momentum, eps)


def _with_reserve(result):
    """Adds the reserve that backends may return as a fourth result; here it is empty."""
    return *result, torch.empty(0, dtype=torch.uint8)


@implements(aten._batch_norm_no_update.default)
def batch_norm_no_update(func, input, weight, bias, mean, var, momentum, eps):
    return _with_reserve(
        native_batch_norm(func, input, weight, bias, mean, var, False, momentum, eps)
    )


@implements(aten._batch_norm_with_update.default)
def batch_norm_with_update(func, input, weight, bias, mean, var, momentum, eps):
    return _with_reserve(
        native_batch_norm(func, input, weight, bias, mean, var, True, momentum, eps)
    )


@implements(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(func, input, weight, bias, mean, var, momentum, eps):
    mean, var = mean.clone(), var.clone()
    result = batch_norm_with_update(func, input, weight, bias, mean, var, momentum, eps)
    return *result, mean, var


@implements(aten.native_batch_norm_backward.default, takes="input: blocked")
def native_batch_norm_backward(
    func, grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
    output_mask,
):  # fmt: skip
    """-> gradients of input (in its format), weight and bias (dense)."""
    if train:
        mean, invstd = save_mean, save_invstd
    else:
        _check_given(running_mean, running_var)
        mean, invstd = running_mean, (running_var.float() + eps).rsqrt()
    _check_given(mean, invstd)
    _check_sizes(input._channels, weight, mean, invstd)
    gradients = _tb.batch_norm_backward(
        gradient_like(grad_out, input._channels, input),
        input._physical,
        input._channels,
        weight,
        mean,
        invstd,
        train,
        output_mask,
    )
    return asked_for(gradients, output_mask, input._channels)


@implements(aten.batch_norm_backward.default)
def batch_norm_backward(
    func, grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps,
    output_mask, reserve,
):  # fmt: skip
    """save_var is 1 / sqrt(var + eps), as in ATen's CPU kernel."""
    return native_batch_norm_backward(
        func, grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps,
        output_mask,
    )  # fmt: skip


def _check_sizes(channels: int, *parameters: Tensor | None) -> None:
    """Raises RuntimeError. These ops are not declined: called directly, ATen reads a value for each
    channel, whether there is one or not."""
    for each in parameters:
        if each is not None and each.numel() != channels:
            raise RuntimeError(
                f"torch_blocked::native_batch_norm: expected parameters of {channels} values, got "
                f"{tuple(each.shape)}; pass one for each channel"
            )


def _check_given(*statistics: Tensor | None) -> None:
    """Raises RuntimeError: ATen would read them."""
    if any(each is None for each in statistics):
        raise RuntimeError(
            "torch_blocked::native_batch_norm: expected a mean and a variance, got None; pass the "
            "running statistics, or those of the batch for the gradient of training"
        )


@torch.library.register_fake("torch_blocked::batch_norm_inference")
def _(input, channels, weight, bias, running_mean, running_var, eps):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.register_fake("torch_blocked::batch_norm_training")
def _(input, channels, weight, bias, running_mean, running_var, momentum, eps):
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    dtype = statistics_dtype(input, weight, bias, running_mean)
    return out, *(input.new_empty(channels, dtype=dtype) for _ in range(2))


@torch.library.register_fake("torch_blocked::batch_norm_backward")
def _(grad_output, input, channels, weight, mean, invstd, training, output_mask):
    return fake_norm_gradients("batch_norm_backward", input, channels, weight, output_mask)
