"""Plain and blocked formats by their tags, what format a tensor has, and blocked factories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_blocked import _C
from torch_blocked.descriptor import blocked_dims, canonical_tag
from torch_blocked.tensor import (
    BlockedTensor,
    ToDense,
    block_of,
    default_block,
    known_when_traced,
    to_blocked,
    wrapper_class,
)

# Plain tags by number of dims: contiguous and channels-last.
_CONTIGUOUS = {3: "ncw", 4: "nchw", 5: "ncdhw"}
_CHANNELS_LAST = {3: "nwc", 4: "nhwc", 5: "ndhwc"}


def is_blocked(tensor: object) -> bool:
    """Whether `tensor` is a BlockedTensor."""
    return isinstance(tensor, BlockedTensor)


def to_format(input: Tensor, tag: str) -> Tensor:
    """`input` in the format `tag`: plain ("nchw", "nhwc", "nwc", "ncdhw", ...) or blocked.

    Raises ValueError if the tag is not one of activations with the rank of `input`."""
    channels_last = _is_channels_last(tag, input.dim())
    if channels_last is None:
        return to_blocked(input, tag)
    if isinstance(input, BlockedTensor):
        dense: Tensor = ToDense.apply(  # type: ignore[no-untyped-call]
            input, channels_last, input.dtype
        )
        return dense
    return _to_plain(input, channels_last)


def format_of(tensor: Tensor) -> str:
    """The tag of a tensor's memory format: "nChw16c", "nchw", "nhwc", ...; "strided" if none fits.

    Where contiguous and channels-last are the same memory (C = 1, or no spatial extent), the
    contiguous tag is given."""
    if isinstance(tensor, BlockedTensor):
        return tensor.format
    ndim = tensor.dim()
    if ndim in _CONTIGUOUS:
        if tensor.is_contiguous():
            return _CONTIGUOUS[ndim]
        if tensor.movedim(1, -1).is_contiguous():
            return _CHANNELS_LAST[ndim]
    return "strided"


def empty(
    *size: Any,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    """Like torch.empty, blocked: `empty(8, 64, 56, 56, format="nChw16c")`. The tail is zero."""
    return zeros(*size, format=format, dtype=dtype, requires_grad=requires_grad)


def zeros(
    *size: Any,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    """Like torch.zeros, blocked."""
    dims = _dims(size)
    block = default_block() if format is None else block_of(format, len(dims))
    physical = torch.zeros(blocked_dims(dims, block), dtype=dtype)
    return _asking(wrapper_class()(physical, dims[1]), requires_grad)


def ones(
    *size: Any,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    """Like torch.ones, blocked."""
    dense = torch.ones(*_dims(size), dtype=dtype)
    return _asking(to_blocked(dense, format), requires_grad)


def randn(
    *size: Any,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> BlockedTensor:
    """Like torch.randn, blocked; the same seed gives the same values."""
    dense = torch.randn(*_dims(size), dtype=dtype)
    return _asking(to_blocked(dense, format), requires_grad)


def _asking(tensor: BlockedTensor, requires_grad: bool) -> BlockedTensor:
    tensor.requires_grad_(requires_grad)
    return tensor


@known_when_traced
def _is_channels_last(tag: str, ndim: int) -> bool | None:
    """False for the contiguous tag of `ndim` dims, True for channels-last, None for any other."""
    canonical = canonical_tag(tag)
    for plain, channels_last in ((_CONTIGUOUS, False), (_CHANNELS_LAST, True)):
        if ndim in plain and canonical == _C.canonical_tag(plain[ndim]):
            return channels_last
    return None


def _to_plain(input: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return input.contiguous()
    return input.movedim(1, -1).contiguous().movedim(-1, 1)


def _dims(size: tuple[Any, ...]) -> tuple[int, ...]:
    dims = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
    if len(dims) not in _CONTIGUOUS:
        raise ValueError(
            f"torch_blocked::empty: expected 3 to 5 dims [N, C, *spatial], got {dims}; "
            "use torch's own factories for other ranks"
        )
    return dims
