"""From a torch op on blocked tensors to the handler that runs it.

torch_blocked.ops fills the tables. BlockedTensor uses this file and comes as an argument.

A handler takes the op and its arguments and returns blocked tensors. It declines by raising
Declined, or by letting an error of the C++ op through (each starts with "torch_blocked::"). Then
the last resorts run the op, the last of them on dense copies. So ATen computes what we cannot, and
refuses what it would refuse anyway, in its own words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import Buffer
from torch.utils import _pytree as pytree

from torch_blocked import _C
from torch_blocked.schema import is_view_op
from torch_blocked.strict import Refused

Handler = Callable[..., Any]
LastResort = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], str], Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# TORCH_BLOCKED_CHECK=1: verify the zero tail of every blocked result.
CHECK_TAIL = os.environ.get("TORCH_BLOCKED_CHECK", "0") not in ("", "0")

OPS_TABLE: dict[OpOverload, Handler] = {}

# Rules that may give a handler to an op that is not in the table; the table then keeps it.
RULES: list[Callable[[OpOverload], Handler | None]] = []

# These run an op that has no handler, or whose handler declines. They are called in turn with the
# reason, until one does not return NotImplemented.
LAST_RESORTS: list[LastResort] = []

# Frequent short ops of one blocked tensor and no other argument: the function for the physical
# tensor, and whether it keeps zeros. Used for small tensors outside of traces; large results come
# from the pool.
DIRECT: dict[OpOverload, tuple[Callable[[Tensor], Tensor], bool]] = {}
DIRECT_BYTES = 1 << 20

# Classes that may stand beside ours: dense tensors, and their substitutes in a traced program.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, Buffer, FakeTensor, FunctionalTensor}


class Declined(Exception):
    """A handler does not take these arguments; the message says why."""


def decline(reason: str) -> NoReturn:
    raise Declined(reason)


def never_compiled(function: _Function) -> _Function:
    """Keeps torch.compile out of `function` and of all that it calls. An op that Dynamo leaves out
    of its graph, such as a GRU, runs with Dynamo watching, and it would compile our Python behind
    the op frame by frame.

    torch.compiler.disable does the same, but imports Dynamo, which takes a second."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def dispatch(
    wrapper: Any,
    func: OpOverload,
    types: Iterable[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs `func`: directly, by its handler, or on dense copies. wrapper: BlockedTensor."""
    if torch.is_inference_mode_enabled() and views_counted(func, args):
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(wrapper, func, types, args, kwargs)
    direct = DIRECT.get(func)
    if direct is not None and len(args) == 1 and not kwargs:
        input = args[0]
        if type(input) is wrapper:
            physical = input._physical
            if type(physical) is Tensor and physical.nbytes < DIRECT_BYTES:
                return _run_directly(wrapper, func, *direct, physical, input._channels)
    if torch._C._get_tracing_state() is not None:
        return _recorded(func, args, kwargs)
    for t in types:
        if t is not wrapper and t not in _PLAIN_TYPES:
            return NotImplemented  # another subclass: let it take its turn
    handler = OPS_TABLE.get(func) or _handler_by_rule(func)
    reason = "no blocked kernel for this op"
    if handler is not None:
        try:
            result = handler(func, *args, **kwargs)
        except Declined as declined:
            reason = str(declined)
        except (ValueError, TypeError, NotImplementedError) as error:
            reason = str(error)
            if isinstance(error, Refused) or not reason.startswith("torch_blocked::"):
                raise
        else:
            if CHECK_TAIL:
                _check_tails(wrapper, func, result)
            return result
    for resort in LAST_RESORTS:
        result = resort(func, args, kwargs, reason)
        if result is not NotImplemented:
            break
    return result


def views_counted(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether `func` makes a view of a tensor that counts its writes. The view must count them too,
    so it cannot be made in inference mode."""
    return is_view_op(func) and not args[0].is_inference()


def _handler_by_rule(func: OpOverload) -> Handler | None:
    for rule in RULES:
        handler = rule(func)
        if handler is not None:
            OPS_TABLE[func] = handler
            return handler
    return None


def _recorded(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op that torch.jit.trace takes apart: it would record our ops on physical tensors.
    `_convolution`, which other convolution ops call, is the only one that we can record."""
    if func is torch.ops.aten.convolution.default and not kwargs:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C._dispatch_key_parse("Tracer"), False):
            return torch.ops.aten._convolution.default(*args, False, False, False, False)
    raise NotImplementedError(
        f"torch_blocked::{func}: expected an op that torch.jit.trace records, got one that it "
        "takes apart; use torch.compile or torch.export, or give the model a dense input"
    )


def _run_directly(
    wrapper: Any,
    func: OpOverload,
    function: Callable[[Tensor], Tensor],
    keeps_zero: bool,
    physical: Tensor,
    channels: int,
) -> Any:
    out = function(physical)
    if not keeps_zero and channels % out.shape[-1]:
        torch.ops.torch_blocked.clear_tail_(out, channels)
    result = _C.wrap(wrapper, out, channels)
    if CHECK_TAIL:
        result._check_tail(str(func))
    return result


def _check_tails(wrapper: Any, func: OpOverload, result: Any) -> None:
    for value in pytree.tree_leaves(result):
        if isinstance(value, wrapper) and type(value._physical) is Tensor:
            value._check_tail(str(func))
