"""Plain and blocked formats by their tags, and what format a tensor has."""

from __future__ import annotations

from torch import Tensor

from torch_blocked import _C
from torch_blocked.descriptor import checked_tag
from torch_blocked.tensor import BlockedTensor, ToDense, known_when_traced, to_blocked

# Plain tags by number of dims: contiguous and channels-last.
CONTIGUOUS = {ndim: _C.Format.PLAIN.name(ndim) for ndim in (3, 4, 5)}
CHANNELS_LAST = {ndim: _C.Format.CHANNELS_LAST.name(ndim) for ndim in (3, 4, 5)}


def is_blocked(tensor: object) -> bool:
    """Whether `tensor` is a BlockedTensor."""
    return isinstance(tensor, BlockedTensor)


def to_format(input: Tensor, tag: str) -> Tensor:
    """`input` in the format `tag`. Differentiable.

    tag: the dims in the order in which memory has them ("nhwc", "chwn", "ba", ...; 1 to 12 dims),
        which gives a strided tensor, or blocks of channels ("nChw16c"), a blocked one.
    Returns `input` itself if it has the format, else a copy with its dims and dtype.
    Raises ValueError for other tags and for those of another rank than `input`'s."""
    order = _memory_order(checked_tag(tag), input.dim())
    if order is None:
        return to_blocked(input, tag)
    if isinstance(input, BlockedTensor):
        channels_last = input.dim() in CHANNELS_LAST and order[-1] == 1
        input = ToDense.apply(  # type: ignore[no-untyped-call]
            input, channels_last, input.dtype
        )
    return _in_order(input, order)


def format_of(tensor: Tensor) -> str:
    """The tag of a tensor's memory format: "nChw16c", "nchw", "nhwc", ...; "strided" if none fits.

    tensor: strided of any dtype and rank, or blocked. Where several tags fit, as where C = 1 or
        there is no spatial extent, the contiguous one is given, or else channels-last."""
    if isinstance(tensor, BlockedTensor):
        return tensor.format
    ndim = tensor.dim()
    if ndim in CONTIGUOUS:  # what may be asked of symbols, in a program that is traced
        if tensor.is_contiguous():
            return CONTIGUOUS[ndim]
        if tensor.movedim(1, -1).is_contiguous():
            return CHANNELS_LAST[ndim]
    return _name_of(tuple(tensor.shape), tensor.stride())


@known_when_traced
def _name_of(sizes: tuple[int, ...], strides: tuple[int, ...]) -> str:
    desc = _C.Descriptor(sizes, "u8", None, strides, [], [], [], [], True)  # any type will do
    return desc.activation_name() or "strided"


@known_when_traced
def _memory_order(tag: str, ndim: int) -> tuple[int, ...] | None:
    """The dims from outer-most to inner-most in memory; None for blocks of channels."""
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


def _in_order(input: Tensor, order: tuple[int, ...]) -> Tensor:
    """`input`, with its dims in memory in this order."""
    ordered = input.permute(order)
    if ordered.is_contiguous():
        return input
    return ordered.contiguous().permute([order.index(dim) for dim in range(len(order))])
