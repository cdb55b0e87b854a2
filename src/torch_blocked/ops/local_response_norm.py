"""Local response normalization over the channels, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from torch_blocked.arguments import checked_tensor
from torch_blocked.dispatch import never_compiled
from torch_blocked.ops.operands import gradient_like
from torch_blocked.tensor import BlockedTensor, wrapper_class

_tb = torch.ops.torch_blocked


def local_response_norm(
    input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """`F.local_response_norm` in one pass over a blocked float32 tensor. Differentiable.

    input: [N, C, *spatial], dense or blocked. Each channel of a pixel is divided by
        (k + alpha * mean of squares)^beta. The mean is over the `size` channels around it, with
        zeros beyond the first and the last channel.
    Returns a tensor in the format of input. Inputs that are not blocked float32, or in forward-mode
    differentiation, go to F.local_response_norm.

    F.local_response_norm keeps blocked tensors blocked too, but eager torch runs it as ten ops, and
    a blocked tensor does not see the function that calls them. `optimize` finds these ops and runs
    them as one.
    Source: Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural
    Networks" (2012)."""
    checked_tensor("local_response_norm", input)
    is_ours = isinstance(input, BlockedTensor) and input.dtype == torch.float32
    if not is_ours or forward_ad._current_level >= 0:
        return F.local_response_norm(input, size, alpha, beta, k)
    result: Tensor = _LocalResponseNorm.apply(input, size, alpha, beta, k)
    return result


class _LocalResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(input: BlockedTensor, *window: Any) -> BlockedTensor:
        channels = input._channels
        return wrapper_class()(_tb.local_response_norm(input._read(), channels, *window), channels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.window = inputs[1:]

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself is to be differentiated
            output = F.local_response_norm(input, *ctx.window)
            return *torch.autograd.grad(output, input, grad, create_graph=True), *[None] * 4
        channels = input._channels
        physical = gradient_like(grad, channels, input)
        physical = _tb.local_response_norm_backward(physical, input._read(), channels, *ctx.window)
        return wrapper_class()(physical, channels), *[None] * 4


@torch.library.register_fake("torch_blocked::local_response_norm")
def _(input, channels, size, alpha, beta, k):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.register_fake("torch_blocked::local_response_norm_backward")
def _(grad_output, input, channels, size, alpha, beta, k):
    return torch.empty_like(input, memory_format=torch.contiguous_format)
