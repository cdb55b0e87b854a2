"""The last resorts for an op that no handler takes: its parts, a dense view, or dense copies, which
are counted."""

from __future__ import annotations

import functools
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_blocked import _C, foreign, module_paths
from torch_blocked.dispatch import LAST_RESORTS, OPS_TABLE
from torch_blocked.foreign import StandIn, is_foreign
from torch_blocked.ops.operands import to_blocked_like
from torch_blocked.schema import has_out, is_view_op, written_arguments
from torch_blocked.shadow import BlockedCopy, become, dense_view, tied_dense
from torch_blocked.strict import Refused, is_strict
from torch_blocked.tensor import BlockedTensor

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_warned: set[str] = set()


@functools.cache
def _is_composite(func) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def in_parts(func, args, kwargs, reason: str):
    """Runs an op that is composed of other ops, such as conv2d. Usually autograd takes such ops
    apart, but inference mode skips autograd. (Their decompositions in Python go further down than
    we want.)

    Dense operands may be conjugated or negated lazily. The dispatch keys that resolve this are
    excluded while a handler runs, so they are included here."""
    if not _is_composite(func):
        return NotImplemented
    conjugate, negative = (
        torch._C._SetExcludeDispatchKeyGuard(key, False)
        for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
    )
    with conjugate, negative:
        return func._op_dk(_COMPOSITE, *args, **kwargs)


def as_dense_view(func, args, kwargs, reason: str):
    if is_view_op(func) and isinstance(args[0], BlockedTensor):
        return dense_view(func, *args, **kwargs)
    return NotImplemented


def on_dense_copies(func, args, kwargs, reason: str):
    """Runs `func` on dense copies. Written arguments are copied back, and results are blocked again
    if the op belongs to a family that keeps the format."""
    blocked = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, BlockedTensor)]
    _announce(func, blocked, reason)
    _refuse_partial_overlap(func, args, kwargs, blocked)
    dense = {id(a): a.to_dense() for a in blocked}
    may_write = func._schema.is_mutable or is_foreign(func)

    def to_dense(value):
        if isinstance(value, Tensor) and id(value) not in dense and not may_write:
            return regular(value)
        return dense.get(id(value), value)

    args_of_dense, kwargs_of_dense = pytree.tree_map(to_dense, (args, kwargs))
    if is_foreign(func) and all(type(a._physical) is Tensor for a in blocked):
        given = {id(a): StandIn(a, dense[id(a)], partial(_bring, func, a)) for a in blocked}
        out = foreign.run(func, args_of_dense, kwargs_of_dense, list(given.values()))
        out = pytree.tree_map_only(Tensor, partial(_tied, blocked, dense), out)
        arguments = []
    else:
        out = func(*args_of_dense, **kwargs_of_dense)
        arguments = written_arguments(func, args, kwargs)

    written = {id(dense[id(a)]): a for a in arguments if id(a) in dense}
    for copy_id, original in written.items():
        _write_back(func, original, next(d for d in dense.values() if id(d) == copy_id))
    like, keeps_format = blocked[0], func in OPS_TABLE

    def from_dense(value):
        if id(value) in written:
            return written[id(value)]
        if keeps_format and _can_be_blocked(value) and value.dim() == like.dim():
            return to_blocked_like(value, like)
        return value

    return pytree.tree_map(from_dense, out)


def _can_be_blocked(value: Any) -> bool:
    """A call may name another device or layout for its result: x.cuda()."""
    on_cpu = type(value) is Tensor and value.device.type in ("cpu", "meta")
    return on_cpu and value.layout == torch.strided


def _bring(func, argument: BlockedTensor, value: Tensor) -> None:
    _write_back(func, argument, value)
    if isinstance(argument, BlockedCopy):
        argument._shadow.write_back()


def _tied(blocked: list[BlockedTensor], dense: dict[int, Tensor], value: Tensor) -> Tensor:
    """A result, tied to an argument if it is a view of that argument's dense copy."""
    if type(value) is Tensor and value.layout == torch.strided:
        for argument in blocked:
            copy = dense[id(argument)]
            if torch._C._is_alias_of(value, copy):  # type: ignore[attr-defined]
                return tied_dense(value, argument, copy)
    return value


LAST_RESORTS += (in_parts, as_dense_view, on_dense_copies)


def regular(value: Tensor) -> Tensor:
    """`value` with strides that ATen reads correctly. ATen's batch norm backward on the CPU takes
    a gradient with strides [C, 1, W * C, C], as of a transposed sequence of batch 1, for
    contiguous."""
    if value.dim() < 3 or value.shape[0] != 1 or value.layout != torch.strided:
        return value
    return value.contiguous()


def _refuse_partial_overlap(func, args, kwargs, blocked: list[BlockedTensor]) -> None:
    """Raises RuntimeError if `out` shares a part of its memory with another argument, as ATen does.
    On copies ATen would not notice."""
    if not has_out(func):
        return
    for out in written_arguments(func, args, kwargs):
        for other in blocked:
            if isinstance(out, BlockedTensor) and out is not other and _overlap(out, other):
                raise RuntimeError(
                    f"torch_blocked::{func}: expected an `out` in memory of its own, got one that "
                    f"shares a part of that of another argument; pass a .clone()"
                )


def _overlap(a: BlockedTensor, b: BlockedTensor) -> bool:
    """Whether they share a part of their memory. Like ATen's check, it is for tensors without
    gaps."""
    if type(a._physical) is not Tensor or type(b._physical) is not Tensor:
        return False
    (first, end), (other, other_end) = sorted(
        (x._physical.data_ptr(), x._physical.data_ptr() + x._physical.nbytes) for x in (a, b)
    )
    in_one_piece = a._physical.is_contiguous() and b._physical.is_contiguous()
    return in_one_piece and other < min(end, other_end) and (first, end) != (other, other_end)


def _announce(func, blocked: list[BlockedTensor], reason: str) -> None:
    name = str(func)
    formats = ", ".join(f"{a.format} {tuple(a.shape)}" for a in blocked)
    if is_strict():
        raise Refused(
            f"torch_blocked::{name}: expected a blocked kernel for {formats}, got none "
            f"({reason}){module_paths.here()}; call .to_dense() on the input, or leave "
            "torch_blocked.strict()"
        )
    line = module_paths.user_line() if _C.is_recording() else ""
    _C.trace_fallback(name, f"{formats}: {reason}", line)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"torch_blocked: {name} runs on a dense copy of {formats} ({reason})"
            f"{module_paths.here()}; "
            "torch_blocked.profile() counts these, torch_blocked.strict() refuses them",
            stacklevel=5,
        )


def _write_back(func, original, dense: Tensor) -> None:
    if dense.shape != original.shape:  # an `out` that was resized
        can_block = 3 <= dense.dim() <= 5
        return become(original, to_blocked_like(dense, original) if can_block else dense)
    original._physical.copy_(torch.ops.torch_blocked.to_blocked(dense, original.block))
