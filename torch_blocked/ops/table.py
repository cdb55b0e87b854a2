"""From a torch op on blocked tensors to its handler, or to the counted dense fallback.

A handler takes the op and its arguments and returns blocked tensors. It declines by returning
NotImplemented, or by letting an error of the C++ op through (every one starts with
"torch_blocked::"): the op then runs on dense copies. ATen so computes what we cannot, and refuses
what it would refuse anyway, in its own words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_blocked import _C, tensor
from torch_blocked.profile import is_strict
from torch_blocked.tensor import BlockedTensor

Handler = Callable[..., Any]

OPS_TABLE: dict[torch._ops.OpOverload, Handler] = {}

_PLAIN_TYPES = (BlockedTensor, Tensor, torch.nn.Parameter)
_warned: set[str] = set()


def implements(*overloads: torch._ops.OpOverload) -> Callable[[Handler], Handler]:
    """Registers the decorated handler for the given op overloads."""

    def register(handler: Handler) -> Handler:
        for overload in overloads:
            OPS_TABLE[overload] = handler
        return handler

    return register


def dispatch(func, types, args, kwargs) -> Any:
    """Runs `func`: by its handler, or on dense copies."""
    if any(not issubclass(t, _PLAIN_TYPES) for t in types):
        return NotImplemented  # another subclass: let it take its turn
    handler = OPS_TABLE.get(func) or _pointwise_handler(func)
    reason = "no blocked kernel for this op"
    if handler is not None:
        try:
            result = handler(func, *args, **kwargs)
        except (ValueError, TypeError, NotImplementedError) as error:
            if not str(error).startswith("torch_blocked::"):
                raise
            result, reason = NotImplemented, str(error)
        else:
            reason = "these arguments have no blocked kernel"
        if result is not NotImplemented:
            if tensor.CHECK_TAIL:
                _check_tails(func, result)
            return result
    return _fallback(func, args, kwargs, reason, keeps_format=handler is not None)


def _pointwise_handler(func) -> Handler | None:
    """PyTorch tags its pointwise ops, so that a whole family is one rule."""
    if torch.Tag.pointwise in func.tags and _returns_tensors(func):
        from torch_blocked.ops.pointwise import pointwise

        OPS_TABLE[func] = pointwise
        return pointwise
    return None


def _returns_tensors(func) -> bool:
    return all(isinstance(ret.type, torch.TensorType) for ret in func._schema.returns)


def _fallback(func, args, kwargs, reason: str, keeps_format: bool) -> Any:
    """Runs `func` on dense copies; written arguments are written back, results re-blocked if the op
    belongs to a family that keeps the format."""
    blocked = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, BlockedTensor)]
    _announce(func, blocked, reason)
    dense = {id(a): a.to_dense() for a in blocked}

    def to_dense(value):
        return dense.get(id(value), value)

    out = func(*pytree.tree_map(to_dense, args), **pytree.tree_map(to_dense, kwargs))

    written = {id(dense[id(a)]): a for a in _written(func, args, kwargs)}
    for copy_id, original in written.items():
        _write_back(func, original, next(d for d in dense.values() if id(d) == copy_id))
    like = blocked[0]

    def from_dense(value):
        if id(value) in written:
            return written[id(value)]
        if keeps_format and isinstance(value, Tensor) and value.dim() == like.dim():
            return to_blocked_like(value, like)
        return value

    return pytree.tree_map(from_dense, out)


def _announce(func, blocked: list[BlockedTensor], reason: str) -> None:
    name = str(func)
    formats = ", ".join(f"{a.format} {tuple(a.shape)}" for a in blocked)
    if is_strict():
        raise NotImplementedError(
            f"torch_blocked::{name}: expected a blocked kernel for {formats}, got none "
            f"({reason}); call .to_dense() on the input, or leave torch_blocked.strict()"
        )
    _C.trace_fallback(name, f"{formats}: {reason}")
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"torch_blocked: {name} runs on a dense copy of {formats} ({reason}); "
            "torch_blocked.profile() counts these, torch_blocked.strict() refuses them",
            stacklevel=4,
        )


def _written(func, args, kwargs) -> list[BlockedTensor]:
    """The blocked arguments that the op's schema says it writes."""
    values = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values += [v for v in pytree.tree_leaves(value) if isinstance(v, BlockedTensor)]
    return values


def _write_back(func, original: BlockedTensor, dense: Tensor) -> None:
    if dense.shape != original.shape or dense.dtype != original.dtype:
        raise RuntimeError(
            f"torch_blocked::{func}: expected an in-place op to keep {tuple(original.shape)} "
            f"{original.dtype}, got {tuple(dense.shape)} {dense.dtype}; call .to_dense() first"
        )
    original._physical.copy_(torch.ops.torch_blocked.to_blocked(dense, original.block))


def to_blocked_like(value: Tensor, like: BlockedTensor) -> BlockedTensor:
    """`value`, dense or blocked, in the format of `like`."""
    if isinstance(value, BlockedTensor):
        if value.block == like.block:
            return value
        physical = torch.ops.torch_blocked.reblock(value._physical, value._channels, like.block)
    else:
        physical = torch.ops.torch_blocked.to_blocked(value, like.block)
    return BlockedTensor(physical, value.shape[1])


def clear_tail(physical: Tensor, channels: int) -> BlockedTensor:
    """A blocked tensor of `physical`, whose lanes beyond `channels` are set to 0."""
    if channels % physical.shape[-1]:
        torch.ops.torch_blocked.clear_tail_(physical, channels)
    return BlockedTensor(physical, channels)


def _check_tails(func, result) -> None:
    for value in pytree.tree_leaves(result):
        if isinstance(value, BlockedTensor) and type(value._physical) is Tensor:
            tensor.check_tail(str(func), value)
