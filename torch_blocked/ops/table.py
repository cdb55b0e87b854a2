"""From a torch op on blocked tensors to its handler, or to the counted dense fallback.

A handler takes the op and its arguments and returns blocked tensors. It declines by returning
NotImplemented, or by letting an error of the C++ op through (every one starts with
"torch_blocked::"): the op then runs on dense copies. ATen so computes what we cannot, and refuses
what it would refuse anyway, in its own words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import Buffer
from torch.utils import _pytree as pytree
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from torch_blocked import _C, tensor
from torch_blocked.profile import is_strict
from torch_blocked.shadow import (
    BlockedCopy,
    DenseView,
    become,
    dense_view,
    is_view_op,
    tied_to,
    written_arguments,
)
from torch_blocked.tensor import BlockedTensor

Handler = Callable[..., Any]

OPS_TABLE: dict[torch._ops.OpOverload, Handler] = {}

# Frequent short ops of one blocked tensor and no other argument: the function for the physical
# tensor, and whether it keeps zeros. Taken if the tensor is not traced, and is small: large results
# come from the pool.
DIRECT: dict[torch._ops.OpOverload, tuple[Callable[[Tensor], Tensor], bool]] = {}
DIRECT_BYTES = 1 << 20

# Besides ours: the dense tensors, and what stands for them while a program is traced.
_PLAIN_TYPES = {BlockedTensor, Tensor, torch.nn.Parameter, Buffer, FakeTensor, FunctionalTensor}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_warned: set[str] = set()


def implements(*overloads: torch._ops.OpOverload) -> Callable[[Handler], Handler]:
    """Registers the decorated handler for the given op overloads."""

    def register(handler: Handler) -> Handler:
        for overload in overloads:
            OPS_TABLE[overload] = handler
        return handler

    return register


def dispatch(func, types, args, kwargs) -> Any:
    """Runs `func`: directly, by its handler, or on dense copies."""
    if torch.is_inference_mode_enabled() and is_view_op(func) and not args[0].is_inference():
        # A view counts its writes with what it is a view of; one made in this mode could not.
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(func, types, args, kwargs)
    direct = DIRECT.get(func)
    if direct is not None and len(args) == 1 and not kwargs:
        input = args[0]
        if type(input) is BlockedTensor:
            physical = input._physical
            if type(physical) is Tensor and physical.nbytes < DIRECT_BYTES:
                return _run_directly(func, *direct, physical, input._channels)
    if torch._C._get_tracing_state() is not None:
        return _recorded(func, args, kwargs)
    for t in types:
        if t is BlockedCopy:
            return _dispatch_copies(func, args, kwargs)
        if t not in _PLAIN_TYPES:
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
    # In inference mode ops of other ops, as conv2d, come whole: autograd, which takes them apart
    # elsewhere, is left out. (Their decompositions in Python go further down than we want.)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _in_parts(func, args, kwargs)
    if is_view_op(func) and isinstance(args[0], BlockedTensor):
        return dense_view(func, *args, **kwargs)
    return _fallback(func, args, kwargs, reason, keeps_format=handler is not None)


def _in_parts(func, args, kwargs) -> Any:
    """Runs a composite op. Its dense parts may be conjugated or negated lazily, and what resolves
    that is else left out while a handler runs."""
    conjugate, negative = (
        torch._C._SetExcludeDispatchKeyGuard(key, False)
        for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
    )
    with conjugate, negative:
        return func._op_dk(_COMPOSITE, *args, **kwargs)


def _recorded(func, args, kwargs) -> Any:
    """Runs an op that torch.jit.trace does not record by itself: it would record what we do with
    physical tensors. It records `_convolution` only, which other ops of the kind call."""
    if func is torch.ops.aten.convolution.default and not kwargs:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C._dispatch_key_parse("Tracer"), False):
            return torch.ops.aten._convolution.default(*args, False, False, False, False)
    raise NotImplementedError(
        f"torch_blocked::{func}: expected an op that torch.jit.trace records, got one that it "
        "takes apart; use torch.compile or torch.export, or give the model a dense input"
    )


def _run_directly(func, function, keeps_zero: bool, physical: Tensor, channels: int):
    out = function(physical)
    if not keeps_zero and channels % out.shape[-1]:
        torch.ops.torch_blocked.clear_tail_(out, channels)
    result = _C.wrap(BlockedTensor, out, channels)
    if tensor.CHECK_TAIL:
        tensor.check_tail(str(func), result)
    return result


tensor.dispatch = dispatch  # BlockedTensor.__torch_dispatch__ calls it; tensor.py cannot import us


def _dispatch_copies(func, args, kwargs) -> Any:
    """Runs `func` with each copied view up to date before, and its base after."""
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    for copy in (leaf for leaf in leaves if isinstance(leaf, BlockedCopy)):
        copy._shadow.follow()
    types = {type(leaf) for leaf in leaves if isinstance(leaf, Tensor)} - {BlockedCopy}
    result = dispatch(func, types, args, kwargs)
    if is_view_op(func) and isinstance(args[0], BlockedCopy):
        return pytree.tree_map_only(Tensor, partial(tied_to, args[0]), result)
    if func._schema.is_mutable:
        for argument in written_arguments(func, args, kwargs):
            if isinstance(argument, BlockedCopy):
                argument._shadow.write_back()
    return result


def _pointwise_handler(func) -> Handler | None:
    """PyTorch tags its pointwise ops, so that a whole family is one rule. What is written into
    `out` goes the way of the fallback."""
    has_out = any(argument.is_out for argument in func._schema.arguments)
    if torch.Tag.pointwise in func.tags and _returns_tensors(func) and not has_out:
        from torch_blocked.ops.pointwise import pointwise_handler

        OPS_TABLE[func] = pointwise_handler(func)
        return OPS_TABLE[func]
    return None


def _returns_tensors(func) -> bool:
    return all(isinstance(ret.type, torch.TensorType) for ret in func._schema.returns)


def _fallback(func, args, kwargs, reason: str, keeps_format: bool) -> Any:
    """Runs `func` on dense copies; written arguments are written back, results re-blocked if the op
    belongs to a family that keeps the format."""
    blocked = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, BlockedTensor)]
    _announce(func, blocked, reason)
    _refuse_partial_overlap(func, args, kwargs, blocked)
    dense = {id(a): a.to_dense() for a in blocked}

    def to_dense(value):
        if isinstance(value, Tensor) and id(value) not in dense and not func._schema.is_mutable:
            return regular(value)
        return dense.get(id(value), value)

    out = func(*pytree.tree_map(to_dense, args), **pytree.tree_map(to_dense, kwargs))

    written = {id(dense[id(a)]): a for a in written_arguments(func, args, kwargs) if id(a) in dense}
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


def regular(value: Tensor) -> Tensor:
    """`value` with strides that ATen reads right. Its batch norm backward on the CPU takes a
    gradient with strides [C, 1, W * C, C], as a transposed sequence of batch 1 has them, for
    contiguous."""
    if value.dim() < 3 or value.shape[0] != 1 or value.layout != torch.strided:
        return value
    return value.contiguous()


def _refuse_partial_overlap(func, args, kwargs, blocked: list[BlockedTensor]) -> None:
    """Raises RuntimeError if `out` shares a part of its memory with another argument, as ATen does
    where it sees the memory; copies would hide it."""
    if not any(argument.is_out for argument in func._schema.arguments):
        return
    for out in written_arguments(func, args, kwargs):
        for other in blocked:
            if isinstance(out, BlockedTensor) and out is not other and _overlap(out, other):
                raise RuntimeError(
                    f"torch_blocked::{func}: expected an `out` in memory of its own, got one that "
                    f"shares a part of that of another argument; pass a .clone()"
                )


def _overlap(a: BlockedTensor, b: BlockedTensor) -> bool:
    """Whether their memory is the same in part and, as ATen asks too, each is in one piece."""
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


def _write_back(func, original: BlockedTensor, dense: Tensor) -> None:
    if dense.shape != original.shape:  # an `out` of other dims
        can_block = 3 <= dense.dim() <= 5
        return become(original, to_blocked_like(dense, original) if can_block else dense)
    original._physical.copy_(torch.ops.torch_blocked.to_blocked(dense, original.block))


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
    """The physical tensor of the gradient of a result with `channels`, in the format of `like`. The
    blocks of another number of channels may be as many, so it is looked at here."""
    if gradient.dim() != like.dim() or gradient.shape[1] != channels:
        raise ValueError(
            f"torch_blocked::gradient: expected {like.dim()} dims with {channels} channels, got "
            f"{tuple(gradient.shape)}; pass the gradient of the result"
        )
    return to_blocked_like(gradient, like)._physical


_has_hook = WeakTensorKeyDictionary()


def wants_dense_gradient(operand: Tensor) -> None:
    """Makes the gradient of a dense operand dense: autograd passes on that of the blocked result as
    it is, and parameters and optimizers are to see nothing new."""
    if operand.requires_grad and torch.is_grad_enabled() and operand not in _has_hook:
        _has_hook[operand] = operand.register_hook(_dense_gradient)


@unserializable_hook
def _dense_gradient(gradient: Tensor) -> Tensor:
    if isinstance(gradient, BlockedTensor):
        return gradient.to_dense()
    return gradient.clone() if isinstance(gradient, DenseView) else gradient


def asked_for(gradients, output_mask, channels: int) -> tuple:
    """The gradients of input (physical), weight and bias with None for those not asked for."""
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


def _check_tails(func, result) -> None:
    for value in pytree.tree_leaves(result):
        if isinstance(value, BlockedTensor) and type(value._physical) is Tensor:
            tensor.check_tail(str(func), value)
