"""Operands and gradients in the format of a blocked tensor, and results with a zero tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from torch_blocked.dispatch import never_compiled
from torch_blocked.shadow import DenseView
from torch_blocked.tensor import BlockedTensor


def to_blocked_like(value: Tensor, like: BlockedTensor) -> BlockedTensor:
    """`value`, dense or blocked, in the format of `like`."""
    if isinstance(value, BlockedTensor):
        if value.block == like.block:
            return value
        physical = torch.ops.torch_blocked.reblock(value._physical, value._channels, like.block)
    else:
        wants_dense_gradient(value)
        physical = torch.ops.torch_blocked.to_blocked(value, like.block)
    return BlockedTensor(physical, value.shape[1])


def gradient_like(gradient: Tensor, channels: int, like: BlockedTensor) -> Tensor:
    """The physical tensor of the gradient of a result with `channels`, in the format of `like`.
    Checks the channels, because another number may take as many blocks."""
    if gradient.dim() != like.dim() or gradient.shape[1] != channels:
        raise ValueError(
            f"torch_blocked::gradient: expected {like.dim()} dims with {channels} channels, got "
            f"{tuple(gradient.shape)}; pass the gradient of the result"
        )
    return to_blocked_like(gradient, like)._physical


def statistics_dtype(input: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The dtype of a norm's statistics: that of its first parameter, or else of its input, as in
    ATen."""
    return next((each.dtype for each in parameters if each is not None), input.dtype)


def fake_norm_gradients(
    op: str, input: Tensor, channels: int, weight: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients of a norm without values: of input, physical, and of weight and bias,
    [channels] in the statistics' dtype. What output_mask does not ask for is empty."""
    for_input, *for_parameters = output_mask
    if len(for_parameters) != 2:  # torch checks this only for kernels in C++
        raise RuntimeError(
            f"torch_blocked::{op}: expected an output_mask of 3, got {len(output_mask)}"
        )
    none, dtype = input.new_empty(0), statistics_dtype(input, weight)
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format) if for_input else none,
        *(
            input.new_empty(channels, dtype=dtype) if asked else none.clone()
            for asked in for_parameters
        ),
    )


_has_hook = WeakTensorKeyDictionary()


def wants_dense_gradient(operand: Tensor) -> None:
    """Makes the gradient of a dense operand dense. Otherwise autograd would pass on the blocked
    gradient of the result, but parameters and optimizers should see nothing new."""
    if operand.requires_grad and torch.is_grad_enabled() and operand not in _has_hook:
        _has_hook[operand] = operand.register_hook(_dense_gradient)


@never_compiled
@unserializable_hook  # type: ignore[untyped-decorator]
def _dense_gradient(gradient: Tensor) -> Tensor:
    if isinstance(gradient, BlockedTensor):
        return gradient.to_dense()
    return gradient.clone() if isinstance(gradient, DenseView) else gradient


def asked_for(gradients, output_mask, channels: int) -> tuple:
    """The gradients of input (physical), weight and bias; None for those that were not
    requested."""
    input, *others = gradients
    return (
        BlockedTensor(input, channels) if output_mask[0] else None,
        *(value if asked else None for value, asked in zip(others, output_mask[1:], strict=True)),
    )


def clear_tail(physical: Tensor, channels: int) -> BlockedTensor:
    """A blocked tensor of `physical`, whose lanes beyond `channels` are set to 0."""
    if channels % physical.shape[-1]:
        torch.ops.torch_blocked.clear_tail_(physical, channels)
    return BlockedTensor(physical, channels)
