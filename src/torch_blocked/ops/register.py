"""`torch_blocked.register`: ops of other libraries on blocked tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torch_blocked import _C
from torch_blocked.dispatch import OPS_TABLE, RULES, Declined, Handler
from torch_blocked.ops.contract import as_dense, expect, with_contract
from torch_blocked.tensor import BlockedTensor

_Handler = TypeVar("_Handler", bound=Handler)


@overload
def register(op: OpOverload | str, handler: OpOverload) -> OpOverload: ...
@overload
def register(op: OpOverload | str, handler: _Handler, *, takes: str = ...) -> _Handler: ...
@overload
def register(op: OpOverload | str, *, takes: str = ...) -> Callable[[_Handler], _Handler]: ...
def register(op: OpOverload | str, handler: Any = None, *, takes: str = "") -> Any:
    """Says what an op of your own, or of another library, does with blocked tensors. Without it the
    op runs on dense copies.

    op: an overload, `torch.ops.my.swish.default`, or its name, "my::swish".
    handler: either an op, the blocked form of `op`, or a function.
        The blocked form takes what `op` takes, with `int channels` after the first argument: the
        physical tensor [N, ceil(C/b), *spatial, b] and its logical C, then the others as they are,
        tensors dense. It returns a physical tensor of as many channels with a zero tail, and has a
        fake. `optimize` and torch.compile(backend="torch_blocked") run it where its neighbours are
        blocked, and `op` elsewhere.
        A function is called as handler(op, *args, **kwargs) with the arguments of the call, at
        least one of them blocked, and returns tensors in any format, or NotImplemented for what it
        does not take: that runs on dense copies. torch.compile traces it; `optimize` does not call
        it, it runs `op` on plain tensors.
    takes: what the function's arguments must be, such as "input: blocked, dim: dim"; others are
        declined (the words are those of torch_blocked.ops.contract).
    Returns `handler`; without one, a decorator for it.

    Raises TypeError for an `op` or `handler` of another kind; ValueError for a name that no op has,
    an op that has a handler already, a form with other arguments, and a contract that names no
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


def _of_form(func: OpOverload) -> Handler | None:
    """The handler of an op that has a blocked form, from Python or from C++."""
    name = _C.blocked_form(func._schema.name, func._schema.overload_name)
    if name is None:
        return None
    form = _op_of(name)

    def handler(func: OpOverload, input: Any, *args: Any, **kwargs: Any) -> BlockedTensor:
        expect(isinstance(input, BlockedTensor), "the first argument blocked")
        args, kwargs = pytree.tree_map_only(Tensor, as_dense, (args, kwargs))
        return BlockedTensor(
            form(input._physical, input._channels, *args, **kwargs), input._channels
        )

    return handler


RULES.insert(0, _of_form)
