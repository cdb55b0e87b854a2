"""Plain formats: the dims of a dense tensor in any order in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from torch_blocked import _C

_Function = TypeVar("_Function", bound=Callable[..., Any])


def known_when_traced(function: _Function) -> _Function:
    """Tells torch.compile that the result is a constant, because it depends on constants only.

    torch.compiler.assume_constant_result does the same, but imports Dynamo, which takes a
    second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@known_when_traced
def memory_order(tag: str, ndim: int) -> tuple[int, ...] | None:
    """The dims from the outermost to the innermost in memory; None for blocks of channels."""
    order = _C.memory_order(tag)
    if order is not None and len(order) == ndim:
        return tuple(order)
    if _C.Format.of(tag, ndim) is not None:
        return None
    raise ValueError(
        f"torch_blocked::to_format: expected a tag of {ndim} dims in some order, or of 3 to 5 dims "
        f"with channels in blocks of 4, 8, 16 or 32, got {_C.shortened(tag)} for {ndim} dims; a "
        "Descriptor describes other formats"
    )


def in_order(input: Tensor, order: tuple[int, ...]) -> Tensor:
    """`input` with its dims in this order in memory."""
    ordered = input.permute(order)
    if ordered.is_contiguous():
        return input
    return ordered.contiguous().permute([order.index(dim) for dim in range(len(order))])
