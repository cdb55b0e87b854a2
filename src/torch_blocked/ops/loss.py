"""Losses of two activations, and of scores against classes; their gradients are blocked."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.ops.contract import expect, implements
from torch_blocked.ops.pointwise import pointwise_handler
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

_NONE, _MEAN, _SUM = range(3)  # at::Reduction


def _with_reduction(func, args, kwargs, reduction: int) -> tuple[int, list]:
    """The requested reduction, and the arguments with another reduction in its place."""
    names = [argument.name for argument in func._schema.arguments]
    values = [argument.default_value for argument in func._schema.arguments]
    values[: len(args)] = args
    values = [kwargs.get(name, value) for name, value in zip(names, values, strict=True)]
    at = names.index("reduction")
    asked, values[at] = values[at], reduction
    return asked, values


def _loss_handler(func):
    pointwise = pointwise_handler(func)

    def loss(func, *args, **kwargs):
        """Runs the loss pointwise, then sums over the physical tensor, whose tail is 0."""
        reduction, values = _with_reduction(func, args, kwargs, _NONE)
        out = pointwise(func, *values)
        if reduction not in (_MEAN, _SUM):  # ATen reduces by no other number
            return out
        total = out._physical.sum()
        return total / out.numel() if reduction == _MEAN else total

    return loss


def _gradient_handler(func):
    pointwise = pointwise_handler(func)

    def gradient(func, grad_output, *args, **kwargs):
        """Puts the factor of the mean, which is over the logical elements, into the gradient."""
        asked, _ = _with_reduction(func, (grad_output, *args), kwargs, _NONE)
        if asked == _MEAN:
            grad_output = grad_output / args[0].numel()
        other = _SUM if asked in (_MEAN, _SUM) else _NONE
        _, values = _with_reduction(func, (grad_output, *args), kwargs, other)
        return pointwise(func, *values)

    return gradient


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
              "binary_cross_entropy"):  # fmt: skip
    _forward, _backward = (getattr(aten, name).default for name in (_name, f"{_name}_backward"))
    implements(_forward)(_loss_handler(_forward))
    implements(_backward)(_gradient_handler(_backward))
implements(aten.binary_cross_entropy_with_logits.default)(
    _loss_handler(aten.binary_cross_entropy_with_logits.default)
)


@implements(aten.nll_loss2d_forward.default, takes="input: blocked, target: dense")
def nll_loss2d(func, input, target, weight, reduction, ignore_index):
    """input [N, C, H, W] blocked, target [N, H, W] -> the loss, and the sum of the weights."""
    index, weights = _classes(input, target, weight, ignore_index)
    losses = -_tb.pick_channels(input._physical, input._channels, index) * weights
    total = weights.sum()
    if reduction == _NONE:
        return losses, total.new_zeros(())
    return losses.sum() / total if reduction == _MEAN else losses.sum(), total


@implements(
    aten.nll_loss2d_backward.default, takes="input: blocked, target: dense, grad_output: dense"
)
def nll_loss2d_backward(
    func, grad_output, input, target, weight, reduction, ignore_index, total_weight
):
    """Zeros, except in the targets' channels."""
    index, weights = _classes(input, target, weight, ignore_index)
    grad = grad_output / total_weight if reduction == _MEAN else grad_output
    physical = _tb.place_channels(-weights * grad, index, input._channels, input.block)
    return BlockedTensor(physical, input._channels)


def _classes(input, target, weight, ignore_index) -> tuple[Tensor, Tensor]:
    """The channel of every pixel, or -1 if it is ignored, and its weight. The op that takes the
    channels refuses channels that do not exist."""
    pixels = (input.shape[0], *input.shape[2:])
    expect(input.dim() == 4 and tuple(target.shape) == pixels, "[N, C, H, W] and a class a pixel")
    expect(target.dtype == torch.int64, "classes in int64")
    expect(weight is None or weight.numel() == input._channels, "a weight for each class")
    used = target != ignore_index
    index = torch.where(used, torch.where(target < 0, input._channels, target), -1)
    if weight is None:
        return index, used.to(input.dtype)
    chosen = weight.flatten()[index.clamp(0, input._channels - 1)]
    return index, torch.where(used, chosen, 0)
