"""Pointwise ops run as ATen's on the physical tensor: same values, same dtypes, one contiguous pass.

Operands that broadcast are seen in physical dims first: [C, 1, 1] becomes [C/b, 1, 1, b], and
[H, W] becomes [H, W, 1]. Lanes beyond C are set to 0 again unless the op keeps zeros by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_blocked.ops.table import clear_tail, implements, to_blocked_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked

# f(0) = 0 for any further arguments: no pass over the tail. Only ops frequent in networks.
# Source: the zero-preserving list of oneDNN's forward eltwise, src/common/eltwise_pd.hpp.
_KEEPS_ZERO = {
    "abs", "gelu", "gelu_", "hardswish", "hardswish_", "leaky_relu", "leaky_relu_", "neg", "neg_",
    "relu", "relu_", "silu", "silu_", "sqrt", "square", "tanh", "tanh_", "threshold_backward",
}  # fmt: skip

# Pointwise in fact, though not tagged so.
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
)


@implements(*_UNTAGGED)
def pointwise(func, *args, **kwargs):
    """Any op whose result at an index depends on its operands at that index only."""
    operands = [a for a in args if isinstance(a, Tensor)]
    operands += [a for a in kwargs.values() if isinstance(a, Tensor)]
    if torch.Tag.nondeterministic_seeded in func.tags or "out" in kwargs:
        return NotImplemented  # random streams follow the logical order
    if len(operands) == 1:
        like = operands[0]
    else:
        dims = torch.broadcast_shapes(*(operand.shape for operand in operands))
        like = _blocked_with(operands, dims)
        if like is None or not all(_fits(operand, like) for operand in operands):
            return NotImplemented

    written = args[0] if func._schema.is_mutable else None
    if written is not None and (
        not isinstance(written, BlockedTensor)
        or written.block != like.block
        or (len(operands) > 1 and written.shape != dims)
    ):
        return NotImplemented

    def physical(value):
        return _physical(value, like) if isinstance(value, Tensor) else value

    out = func(*map(physical, args), **{key: physical(value) for key, value in kwargs.items()})
    keeps_zero = len(operands) == 1 and func._schema.name[6:] in _KEEPS_ZERO
    if written is not None:
        if not keeps_zero:
            clear_tail(written._physical, written._channels)
        return written
    if isinstance(out, tuple):
        return tuple(clear_tail(value, like._channels) for value in out)
    if keeps_zero:
        return BlockedTensor(out, like._channels)
    return clear_tail(out, like._channels)


def _blocked_with(operands, dims) -> BlockedTensor | None:
    """The blocked operand that has the result's rank and channels."""
    for operand in operands:
        if isinstance(operand, BlockedTensor) and operand.dim() == len(dims):
            if operand._channels == dims[1]:
                return operand
    return None


def _fits(operand: Tensor, like: BlockedTensor) -> bool:
    return operand.dim() <= like.dim()


def _physical(operand: Tensor, like: BlockedTensor) -> Tensor:
    """`operand` in dims that broadcast against `like`'s physical tensor."""
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
