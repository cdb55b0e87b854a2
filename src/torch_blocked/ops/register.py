"""`torch_blocked.register`: ops of other libraries on blocked tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_blocked import _C
from torch_blocked.dispatch import CHECK_TAIL, OPS_TABLE, RULES, Declined, Handler
from torch_blocked.ops.contract import as_dense, expect, with_contract
from torch_blocked.tensor import BlockedTensor

_Handler = TypeVar("_Handler", bound=Handler)
Wanted = tuple[tuple[int, ...], torch.dtype]  # the dims and the dtype of a result


@overload
def register(op: OpOverload | str, handler: OpOverload) -> OpOverload: ...
@overload
def register(op: OpOverload | str, handler: _Handler, *, takes: str = ...) -> _Handler: ...
@overload
def register(op: OpOverload | str, *, takes: str = ...) -> Callable[[_Handler], _Handler]: ...
def register(op: OpOverload | str, handler: Any = None, *, takes: str = "") -> Any:
    """Registers how an op of your own, or of another library, runs on blocked tensors. Without this
    it runs on dense copies.

    op: an overload, `torch.ops.my.swish.default`, or its name, "my::swish".
    handler: either an op, the blocked form of `op`, or a function.
        A blocked form takes the arguments of `op`, with `int channels` after the first one. The
        first is the physical tensor [N, ceil(C/b), *spatial, b] and `channels` its logical C; other
        tensors are dense. It returns a physical tensor with as many channels and a zero tail, and
        has a fake. `optimize` and torch.compile(backend="torch_blocked") run it where its
        neighbours are blocked, and `op` elsewhere. When a size is new, its result must have the
        dims and dtype that the fake of `op` gives, and a zero tail; otherwise RuntimeError names
        the form. A function is called as handler(op, *args, **kwargs) with the arguments of the
        call, at least one of them blocked. It returns tensors in any format, or NotImplemented for
        arguments that it does not take; then the op runs on dense copies. torch.compile traces the
        function. `optimize` does not call it, and runs `op` on plain tensors.
    takes: what the function's arguments must be, such as "input: blocked, dim: dim", in the words
    of
        torch_blocked.ops.contract. Other arguments are declined.
    Returns `handler`; without one, a decorator for it.

    Raises TypeError for an `op` or `handler` of another kind; ValueError for an unknown op, an op
    that has a handler already, a form with other arguments, and a contract that names no
    parameter."""
    target = _op_of(op)
    if handler is None:
        return lambda function: register(target, function, takes=takes)
    if _is_taken(target):
        raise ValueError(
            f"torch_blocked::register: expected an op without a handler, got {target}; "
            "register each op once"
        )
    if isinstance(handler, OpOverload):
        if takes:
            raise ValueError(
                f"torch_blocked::register: expected no contract with an op, got takes={takes!r}; "
                "an op checks its arguments itself"
            )
        _C.check_blocked_form(target.name(), handler.name())
        _C.register_blocked_form(target.name(), handler.name())
    elif callable(handler):
        OPS_TABLE[target] = _of_function(with_contract(handler, takes) if takes else handler)
    else:
        raise TypeError(
            "torch_blocked::register: expected a function or an op as handler, got "
            f"{type(handler).__name__}; an op is an overload, such as torch.ops.my.swish.default"
        )
    return handler


def _op_of(op: Any) -> OpOverload:
    if isinstance(op, OpOverload):
        return op
    if not isinstance(op, str):
        raise TypeError(
            f"torch_blocked::register: expected an op's overload or its name, got {op!r}; such as "
            "torch.ops.my.swish.default or 'my::swish'"
        )
    name, _, overload_name = op.partition(".")
    namespace, _, word = name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), word)
        found: OpOverload = getattr(packet, overload_name or "default")
    except (AttributeError, RuntimeError):
        raise ValueError(
            f"torch_blocked::register: expected the name of a torch op, got {_C.shortened(op)!r}; "
            "import the library that defines it first"
        ) from None
    return found


def _is_taken(op: OpOverload) -> bool:
    return op in OPS_TABLE or any(rule(op) is not None for rule in RULES)


def _of_function(function: Handler) -> Handler:
    def handler(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        result = function(func, *args, **kwargs)
        if result is NotImplemented:
            raise Declined("its handler does not take these arguments")
        return result

    return handler


# How many different calls of an op have their results checked completely.
_KEPT = 256


@dataclass
class _Form:
    """Calls the blocked form of an op, and checks that its result fits the op's."""

    op: OpOverload
    form: OpOverload
    seen: dict[Any, Wanted | None] = field(default_factory=dict)

    def __call__(self, func: OpOverload, input: Any, *args: Any, **kwargs: Any) -> BlockedTensor:
        expect(isinstance(input, BlockedTensor), "the first argument blocked")
        args, kwargs = pytree.tree_map_only(Tensor, as_dense, (args, kwargs))
        physical, channels = input._physical, input._channels
        is_real = type(physical) is Tensor
        key = _key(input, args, kwargs) if is_real else None
        is_first = key is None or key not in self.seen
        wanted = _wanted(func, input, args, kwargs) if is_first else self.seen[key]
        dims, dtype = wanted or ((), None)
        expect(
            not dims or (len(dims) == input.dim() and dims[1] == channels),
            "an op whose result has the dims and channels of its first argument",
        )
        result = self.form(physical, channels, *args, **kwargs)
        tensors = [each for each in pytree.arg_tree_leaves(*args, **kwargs) if _is_tensor(each)]
        names = func.name(), self.form.name()
        read = [physical, *tensors]
        _C.check_form_result(*names, result, read, input.block, dims, dtype)
        result = result.contiguous()
        if is_real and (is_first or CHECK_TAIL):
            _C.check_form_tail(*names, result, channels)
        if key is not None and is_first:
            if len(self.seen) >= _KEPT:
                self.seen.clear()
            self.seen[key] = wanted
        return BlockedTensor(result, channels)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _key(input: BlockedTensor, args: Any, kwargs: Any) -> Any:
    """The key of everything that a result's dims depend on; None if it cannot be hashed."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    told = tuple((each.shape, each.dtype) if _is_tensor(each) else each for each in leaves)
    key = (input.shape, input.dtype, input.block, told, structure)
    try:
        hash(key)
    except TypeError:  # an argument is an object that cannot be hashed
        return None
    return key


def _wanted(func: OpOverload, input: BlockedTensor, args: Any, kwargs: Any) -> Wanted | None:
    """The dims and the dtype of the op's own result, by its fake; None if the fake does not run on
    the meta device."""

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    # A traced program does not contain this. (The import here takes half a second.)
    traced = type(input._physical) is not Tensor
    try:
        with _disable_current_modes() if traced else nullcontext(), torch.no_grad():
            args, kwargs = pytree.tree_map_only(Tensor, on_meta, (args, kwargs))
            result = func(on_meta(input), *args, **kwargs)
    except Exception:  # a fake that needs more than dims may raise anything
        return None
    return tuple(result.shape), result.dtype


def _of_form(func: OpOverload) -> Handler | None:
    """The handler of an op that has a blocked form, from Python or from C++."""
    name = _C.blocked_form(func._schema.name, func._schema.overload_name)
    return None if name is None else _Form(func, _op_of(name))


RULES.insert(0, _of_form)
