"""`implements`: which handler an op has, and what it takes.

    @implements(aten._softmax.default, takes="input: blocked, dim: dim")
    def softmax(func, input, dim, half_to_float):

The contract names parameters of the handler and says what each must be:

    blocked         a blocked tensor
    dense           a tensor or None; a blocked tensor comes as a dense copy
    alike           a tensor with the rank and dtype of the first parameter named, which is blocked
    dim             a dim of that parameter; the handler gets it counted from 0
    spatial dim     a dim that is neither N nor C
    dim but C       a dim that is not C
    new dim         a place for one more dim
    dims            a list of different dims
    kept format     a memory format that changes nothing: None or torch.preserve_format
    cpu             None or the device of the CPU
    strided         None or torch.strided
    unpinned        None or False: memory that is not pinned

Other arguments are declined, in one sentence. When its file is imported, each contract becomes the
source of a function, so that a call reads no strings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from torch_blocked.dispatch import OPS_TABLE, Declined, Handler
from torch_blocked.tensor import BlockedTensor


def implements(*overloads: OpOverload, takes: str = "") -> Callable[[Handler], Handler]:
    """Registers the decorated handler for the given op overloads. The function that replaces it has
    the same parameters and checks the contract first, also when another handler calls it. Without a
    contract it is the handler itself."""

    def register(handler: Handler) -> Handler:
        checked = with_contract(handler, takes) if takes else handler
        for overload in overloads:
            OPS_TABLE[overload] = checked
        return checked

    return register


def expect(holds: bool, rule: str) -> None:
    """Declines unless the rule holds: expect(step == 1, "step 1 over the channels")."""
    if not holds:
        raise Declined(f"expected {rule}")


def wrapped_dim(dim: int, rank: int) -> int:
    """`dim`, which may count from the end, counted from 0. Declines a dim out of range."""
    if not -rank <= dim < rank:
        raise Declined(f"expected a dim from {-rank} to {rank - 1}, got {dim}")
    return dim % rank


def wrapped_dims(dims: Iterable[int], rank: int) -> list[int]:
    """The same for several dims, which must differ."""
    wrapped = [wrapped_dim(dim, rank) for dim in dims]
    expect(len(set(wrapped)) == len(wrapped), "different dims")
    return wrapped


def bound(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments after the first by the names of the schema."""
    names = [argument.name for argument in func._schema.arguments[1:]]
    return dict(zip(names, args, strict=False)) | kwargs


def as_dense(tensor: Tensor) -> Tensor:
    """`tensor`, converted to dense if it is blocked, for kernels that want it dense."""
    if isinstance(tensor, BlockedTensor):
        dense: Tensor = torch.ops.torch_blocked.to_dense(tensor._physical, tensor._channels)
        return dense
    return tensor


# The source of each kind's check. {0}: the parameter; {1}: the first one, blocked, of rank _rank.
_CHECKS = {
    "blocked": """
        if not isinstance({0}, _BlockedTensor):
            raise _Declined("expected {0} blocked, got " + type({0}).__name__)""",
    "dense": """
        if isinstance({0}, _BlockedTensor):
            {0} = _as_dense({0})""",
    "alike": """
        if {0}.dim() != _rank or {0}.dtype != {1}.dtype:
            raise _Declined("expected {0} with the rank and dtype of {1}")""",
    "dim": """
        if not -_rank <= {0} < _rank:
            _wrapped_dim({0}, _rank)
        {0} %= _rank""",
    "spatial dim": """
        if _wrapped_dim({0}, _rank) < 2:
            raise _Declined("expected a spatial dim, got " + str({0}))
        {0} %= _rank""",
    "dim but C": """
        if _wrapped_dim({0}, _rank) == 1:
            raise _Declined("expected a dim other than C")
        {0} %= _rank""",
    "new dim": """
        {0} = _wrapped_dim({0}, _rank + 1)""",
    "dims": """
        {0} = _wrapped_dims({0}, _rank)""",
    "kept format": """
        if {0} is not None and {0} is not _preserve_format:
            raise _Declined("expected no memory format, got " + str({0}))""",
    "cpu": """
        if {0} is not None and _device({0}).type != "cpu":
            raise _Declined("expected the CPU, got " + str({0}))""",
    "strided": """
        if {0} is not None and {0} is not _strided:
            raise _Declined("expected a strided tensor, got " + str({0}))""",
    "unpinned": """
        if {0}:
            raise _Declined("expected memory that is not pinned")""",
}
_NAMES = {
    "_BlockedTensor": BlockedTensor,
    "_Declined": Declined,
    "_as_dense": as_dense,
    "_wrapped_dim": wrapped_dim,
    "_wrapped_dims": wrapped_dims,
    "_preserve_format": torch.preserve_format,
    "_device": torch.device,
    "_strided": torch.strided,
}


def with_contract(handler: Handler, contract: str) -> Handler:
    """A function with the parameters of `handler` that checks the contract and calls it. Other
    names that it reads begin with an underscore, so that no parameter hides them. Raises ValueError
    for a contract with unknown parameters or kinds."""
    parameters = inspect.signature(handler).parameters
    kinds = dict(_parsed(contract, handler.__name__, parameters))
    first = next(iter(kinds))
    lines = [_CHECKS[kind].format(name, first) for name, kind in kinds.items()]
    if any("_rank" in line for line in lines):
        lines.insert(1, f"\n        _rank = {first}.dim()")
    defaults = {f"default_{name}": each.default for name, each in parameters.items()}
    source = (
        f"def checked({', '.join(_declared(parameters.values()))}):"
        + "".join(lines)
        + f"\n        return _handler({', '.join(_passed(each) for each in parameters.values())})"
    )
    names: dict[str, Any] = {**_NAMES, **defaults, "_handler": handler}
    exec(compile(source, f"<contract of {handler.__module__}.{handler.__name__}>", "exec"), names)
    checked: Handler = names["checked"]
    checked.__name__, checked.__doc__ = handler.__name__, handler.__doc__
    return checked


def _parsed(contract: str, handler: str, parameters: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Each parameter and its kind. The first must be blocked; others are compared with it."""
    for position, part in enumerate(contract.split(",")):
        name, _, kind = (each.strip() for each in part.partition(":"))
        known = _CHECKS if position else ("blocked",)
        if name not in parameters or kind not in known:
            raise ValueError(
                f"torch_blocked::implements: expected one of {', '.join(parameters)} to be one of "
                f"{', '.join(known)}, got '{part.strip()}' for {handler}"
            )
        yield name, kind


_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _declared(parameters: Iterable[inspect.Parameter]) -> Iterable[str]:
    """Parameters as text for the head of a function; defaults are names."""
    positional = True
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and positional:
            yield "*"
        positional = positional and each.kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        default = "" if each.default is each.empty else f"=default_{each.name}"
        yield f"{_STARS.get(each.kind, '')}{each.name}{default}"


def _passed(parameter: inspect.Parameter) -> str:
    """A parameter as text for a call."""
    if parameter.kind is parameter.KEYWORD_ONLY:
        return f"{parameter.name}={parameter.name}"
    return f"{_STARS.get(parameter.kind, '')}{parameter.name}"
