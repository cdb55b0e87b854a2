"""Pointwise ops run as ATen's on the physical tensor: the same values and dtypes, in one pass.

Operands that broadcast are first brought to physical dims: [C, 1, 1] becomes [C/b, 1, 1, b], and
[H, W] becomes [H, W, 1]. Lanes beyond C are set to 0 again unless the op keeps zeros by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch import DIRECT, DIRECT_BYTES, RULES, Handler, decline
from torch_blocked.ops.contract import expect, implements
from torch_blocked.ops.operands import clear_tail, to_blocked_like, wants_dense_gradient
from torch_blocked.schema import has_out
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

# Ops with f(0) = 0 for any other arguments, which need no pass over the tail; only frequent ones.
# Source: the zero-preserving list of oneDNN's forward eltwise, src/common/eltwise_pd.hpp.
_KEEPS_ZERO = {
    "abs", "gelu", "gelu_", "hardswish", "hardswish_", "neg", "neg_",
    "relu", "relu_", "silu", "silu_", "sqrt", "square", "tanh", "tanh_", "threshold_backward",
}  # fmt: skip

# Ops of training steps whose results take memory from our pool, by the overloads that write into an
# argument. The page faults of a fresh result cost more than the op itself.
_POOLED = {
    aten.add.Tensor: (aten.add.out, "out"),
    aten.mul.Tensor: (aten.mul.out, "out"),
    aten.relu.default: (aten.relu.out, "out"),
    aten.silu.default: (aten.silu.out, "out"),
    aten.hardtanh.default: (aten.hardtanh.out, "out"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
}

# torch's own functions; a call takes 0.7 us less than a call of the op.
_FUNCTIONS: dict[OpOverload, Callable[[Tensor], Tensor]] = {
    aten.abs.default: torch.abs,
    aten.exp.default: torch.exp,
    aten.gelu.default: torch._C._nn.gelu,
    aten.hardsigmoid.default: torch._C._nn.hardsigmoid,
    aten.hardswish.default: torch._C._nn.hardswish,
    aten.neg.default: torch.neg,
    aten.relu.default: torch.relu,
    aten.sigmoid.default: torch.sigmoid,
    aten.silu.default: torch._C._nn.silu,
    aten.sqrt.default: torch.sqrt,
    aten.square.default: torch.square,
    aten.tanh.default: torch.tanh,
}
DIRECT |= {
    op: (function, op._schema.name.removeprefix("aten::") in _KEEPS_ZERO)
    for op, function in _FUNCTIONS.items()
}

_DIVIDES = {
    aten.div.Tensor_mode, aten.div_.Tensor_mode, aten.fmod.Tensor, aten.fmod_.Tensor,
    aten.remainder.Tensor, aten.remainder_.Tensor, aten.remainder.Scalar_Tensor,
    aten.floor_divide.default,
}  # fmt: skip

# Ops that are pointwise although PyTorch does not tag them so.
_UNTAGGED = (
    aten.hardswish.default,
    aten.hardswish_.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten.mish_.default,
    aten.gelu_.default,
    aten.masked_fill_.Scalar,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.rrelu_with_noise.default,
    aten.rrelu_with_noise_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten.rsub.Tensor,
    aten.floor_divide.default,
    aten.fill.Scalar,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.complex.default,
    aten.polar.default,
)


def pointwise_handler(func) -> Handler:
    """The handler of an op whose result at an index depends on its operands at that index only.

    It reads the schema here, once per op, because that costs more than a small relu."""
    writes = func._schema.is_mutable
    keeps_zero = func._schema.name.removeprefix("aten::") in _KEEPS_ZERO
    random = torch.Tag.nondeterministic_seeded in func.tags
    divides = func in _DIVIDES
    many = len(func._schema.returns) > 1
    into, out_name = _POOLED.get(func, (None, ""))

    def pointwise(func, *args, **kwargs):
        operands: Any
        if random:
            decline("expected no random numbers, which follow the logical order")
        if len(args) == 1 and not kwargs:
            like = args[0]
            operands = (like,)
            args = (like._physical,)
        elif not (kwargs or divides) and _are_alike(args):
            like = args[0]
            operands = args[:2]
            args = (like._physical, args[1]._physical, *args[2:])
        else:
            operands = [a for a in args if isinstance(a, Tensor)]
            operands += [a for a in kwargs.values() if isinstance(a, Tensor)]
            if divides:  # an integer division by the zeros of the tail would raise
                fractions = any(operand.is_floating_point() for operand in operands)
                expect(fractions, "floating-point numbers to divide")
            like = operands[0] if len(operands) == 1 else _result_like(operands)
            if writes:
                fits = _can_write(args[0], like, operands)
                expect(fits, "a written tensor with the dims of the result")
            args = tuple(_physical(a, like) if isinstance(a, Tensor) else a for a in args)
            kwargs = {
                name: _physical(value, like) if isinstance(value, Tensor) else value
                for name, value in kwargs.items()
            }
        if into is not None and _fills_pool(like, operands):
            out = into(*args, **kwargs, **{out_name: _tb.empty_like(like._physical)})
        else:
            out = func(*args, **kwargs)
        channels = like._channels
        if writes:
            out = like
            if not keeps_zero and channels % like._physical.shape[-1]:
                _tb.clear_tail_(like._physical, channels)
        elif many:
            out = tuple(clear_tail(value, channels) for value in out)
        elif keeps_zero:
            out = BlockedTensor(out, channels)
        else:
            out = clear_tail(out, channels)
        return out

    return pointwise


for _op in _UNTAGGED:
    implements(_op)(pointwise_handler(_op))


def _tagged_handler(func) -> Handler | None:
    """The handler of an op that PyTorch tags as pointwise: one rule for a whole family. Ops with
    `out` go to the fallback."""
    returns_tensors = all(isinstance(ret.type, torch.TensorType) for ret in func._schema.returns)
    if torch.Tag.pointwise in func.tags and returns_tensors and not has_out(func):
        return pointwise_handler(func)
    return None


RULES.append(_tagged_handler)


def _are_alike(args) -> bool:
    """Whether the first two are blocked with the same shape and format, and the rest no tensors."""
    if len(args) < 2 or not (type(args[0]) is type(args[1]) is BlockedTensor):
        return False
    first, second = args[0], args[1]
    return (
        first._channels == second._channels
        and first._physical.shape == second._physical.shape
        and not any(isinstance(a, Tensor) for a in args[2:])
    )


def _fills_pool(like: BlockedTensor, operands) -> bool:
    """Whether the result has the dims and dtype of `like` and is large."""
    physical = like._physical
    return (
        type(physical) is Tensor
        and physical.nbytes >= DIRECT_BYTES
        and all(o.shape == like.shape and o.dtype == like.dtype for o in operands)
    )


def _result_like(operands: list[Tensor]) -> BlockedTensor:
    """The blocked operand that has the result's rank and channels, if all others can follow it."""
    shape = operands[0].shape
    if all(operand.shape == shape for operand in operands):
        dims = shape
    else:
        dims = torch.broadcast_shapes(*(operand.shape for operand in operands))
    for operand in operands:
        if isinstance(operand, BlockedTensor) and operand.dim() == len(dims):
            if operand._channels == dims[1]:
                return operand
    return _channels_of_dense(operands, dims)


def _channels_of_dense(operands: list[Tensor], dims) -> BlockedTensor:
    """If every blocked operand has one channel and the result has more: a dense operand that has
    these channels, converted to blocked."""
    like = next(
        (o for o in operands if isinstance(o, BlockedTensor) and o.dim() == len(dims)), None
    )
    for operand in operands:
        if operand.dim() >= len(dims) - 1 and like is not None:
            lifted = operand[(None,) * (len(dims) - operand.dim())]
            if lifted.shape[1] == dims[1] and not isinstance(operand, BlockedTensor):
                return to_blocked_like(lifted.detach(), like)
    decline("expected an operand with the rank and channels of the result")


def _can_write(written: Tensor, like: BlockedTensor, operands: list[Tensor]) -> bool:
    """Whether an in-place op may run on the physical tensor of its first argument."""
    if written is like:
        return all(_broadcasts_to(operand.shape, like.shape) for operand in operands)
    return False


def _broadcasts_to(shape, dims) -> bool:
    if shape == dims:
        return True
    aligned = zip(reversed(shape), reversed(dims), strict=False)
    return len(shape) <= len(dims) and all(size in (1, to) for size, to in aligned)


def _physical(operand: Tensor, like: BlockedTensor) -> Tensor:
    """`operand` in dims that broadcast against `like`'s physical tensor."""
    if not isinstance(operand, BlockedTensor):
        wants_dense_gradient(operand)
    if operand.dim() == 0:
        return operand
    if operand.dim() < like.dim():
        operand = operand[(None,) * (like.dim() - operand.dim())]
    channels = operand.shape[1]
    if channels == 1 and like._channels != 1:
        if isinstance(operand, BlockedTensor):
            return operand._physical[..., :1]
        return operand.unsqueeze(-1)  # the same for all lanes
    return to_blocked_like(operand, like)._physical
