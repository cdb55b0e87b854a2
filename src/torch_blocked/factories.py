"""Factories of blocked tensors: torch's, with `format=`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor

from torch_blocked import _C
from torch_blocked.arguments import checked_tensor
from torch_blocked.descriptor import blocked_dims
from torch_blocked.tensor import (
    BlockedTensor,
    block_of,
    default_block,
    to_blocked,
    wrapper_class,
)

# torch's factory for the dense values of each. `empty` gives zeros, because its tail must be zero.
_VALUES: dict[str, Callable[..., Tensor]] = {
    "empty": torch.zeros,
    "zeros": torch.zeros,
    "ones": torch.ones,
    "rand": torch.rand,
    "randn": torch.randn,
}
_NOTES = {"empty": " The values are zeros."} | dict.fromkeys(
    ("rand", "randn"), " The same seed gives the same values."
)

_OPTIONS = """
    format: a tag blocked over the channels, such as "nChw16c"; None takes {format}.
    dtype: of the result; None takes {dtype}.
    requires_grad: as in torch.
    Raises ValueError for other numbers of dims, and for a tag that is not blocked over the channels
    or has another rank."""
_FASTEST = "the block that is fastest on this CPU"
_OF_SIZE = "\n    size: the logical dims [N, C, *spatial], 3 to 5 of them." + _OPTIONS.format(
    format=_FASTEST, dtype="torch's default"
)
_OF_INPUT = "\n    input: dense or blocked [N, C, *spatial], of 3 to 5 dims." + _OPTIONS.format(
    format=f"that of a blocked `input`, or {_FASTEST}", dtype="`input`'s"
)


_Factory = TypeVar("_Factory", bound=Callable[..., BlockedTensor])


class OfSize(Protocol):
    """A factory of tensors of a size."""

    def __call__(
        self,
        *size: Any,
        format: str | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> BlockedTensor: ...


class OfInput(Protocol):
    """A factory of tensors as large as another."""

    def __call__(
        self,
        input: Tensor,
        *,
        format: str | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> BlockedTensor: ...


def _of_size(name: str) -> OfSize:
    def factory(
        *size: Any,
        format: str | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> BlockedTensor:
        dims = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return _made(name, _VALUES[name], dims, format, dtype, requires_grad)

    return _named(factory, name, f"Like torch.{name}, blocked.{_NOTES.get(name, '')}\n{_OF_SIZE}")


def _of_input(name: str) -> OfInput:
    def factory(
        input: Tensor,
        *,
        format: str | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> BlockedTensor:
        return _made(
            f"{name}_like",
            _VALUES[name],
            checked_tensor(f"{name}_like", input).shape,
            format or _format(input),
            dtype or input.dtype,
            requires_grad,
        )

    note = _NOTES.get(name, "")
    return _named(factory, f"{name}_like", f"Like torch.{name}_like, blocked.{note}\n{_OF_INPUT}")


def _named(function: _Factory, name: str, doc: str) -> _Factory:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


empty, zeros, ones, rand, randn = (_of_size(name) for name in _VALUES)
empty_like, zeros_like, ones_like, rand_like, randn_like = (_of_input(name) for name in _VALUES)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    def values(dims: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return torch.full(tuple(dims), fill_value, dtype=dtype)

    return _made("full", values, size, format, dtype, requires_grad)


def full_like(
    input: Tensor,
    fill_value: Any,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    return full(
        checked_tensor("full_like", input).shape,
        fill_value,
        format=format or _format(input),
        dtype=dtype or input.dtype,
        requires_grad=requires_grad,
    )


@overload
def randint(
    high: int,
    size: Sequence[int],
    /,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor: ...
@overload
def randint(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor: ...
def randint(
    low: int,
    high: Any,
    size: Sequence[int] | None = None,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    first, end, dims = (0, low, high) if size is None else (low, high, size)

    def values(dims: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return torch.randint(first, end, tuple(dims), dtype=dtype)

    return _made("randint", values, dims, format, dtype, requires_grad)


def randint_like(
    input: Tensor,
    low: int,
    high: int | None = None,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    return randint(
        0 if high is None else low,
        low if high is None else high,
        checked_tensor("randint_like", input).shape,
        format=format or _format(input),
        dtype=dtype or input.dtype,
        requires_grad=requires_grad,
    )


def normal(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    def values(dims: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return torch.normal(mean, std, tuple(dims), dtype=dtype)

    return _made("normal", values, size, format, dtype, requires_grad)


full.__doc__ = f"Like torch.full, blocked; the tail is zero.\n{_OF_SIZE}"
full_like.__doc__ = f"Like torch.full_like, blocked; the tail is zero.\n{_OF_INPUT}"
_BOUNDS = "integers from `low`, or 0 if one bound is given, to `high` - 1"
randint.__doc__ = (
    f"Like torch.randint, blocked: {_BOUNDS}, int64 unless dtype says otherwise."
    f"{_NOTES['rand']}\n{_OF_SIZE}"
)
randint_like.__doc__ = f"Like torch.randint_like, blocked: {_BOUNDS}.{_NOTES['rand']}\n{_OF_INPUT}"
normal.__doc__ = (
    "Like torch.normal with two numbers, blocked; means or deviations that are tensors need "
    f"torch.normal itself.{_NOTES['rand']}\n{_OF_SIZE}"
)


def _format(input: Tensor) -> str | None:
    return input.format if isinstance(input, BlockedTensor) else None


def _is_dim(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) or type(value).__module__ == "numpy"


def _checked_size(name: str, size: Any) -> tuple[int, ...]:
    """`size` as dims. Raises TypeError if it is no size."""
    is_size = isinstance(size, Sequence) and not isinstance(size, str)
    if not is_size or not all(map(_is_dim, size)):
        got = f"a {type(size).__name__}" if not is_size or len(size) > 6 else repr(tuple(size))
        like = f"torch_blocked.{name}_like(x) takes a tensor"
        advice = like if isinstance(size, Tensor) else "give the dims [N, C, *spatial]"
        raise TypeError(
            f"torch_blocked::{name}: expected a size of integers, got {_C.shortened(got)}; {advice}"
        )
    return tuple(size)


def _made(
    name: str,
    values: Callable[..., Tensor],
    size: Sequence[int],
    format: str | None,
    dtype: torch.dtype | None,
    requires_grad: bool,
) -> BlockedTensor:
    dims = _checked_size(name, size)
    if not 3 <= len(dims) <= 5:
        raise ValueError(
            f"torch_blocked::{name}: expected 3 to 5 dims [N, C, *spatial], got {dims}; "
            "use torch's own factories for other ranks"
        )
    if values is torch.zeros:  # nothing to reorder
        block = default_block() if format is None else block_of(format, len(dims))
        blocked = wrapper_class()(torch.zeros(blocked_dims(dims, block), dtype=dtype), dims[1])
    else:
        blocked = to_blocked(values(dims, dtype=dtype), format)
    blocked.requires_grad_(requires_grad)
    return blocked
