"""Conversions between memory formats, and what format a tensor has."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from torch_blocked import _C
from torch_blocked.descriptor import blocked_dims, canonical_tag, checked_tag
from torch_blocked.export import ExportedTensor
from torch_blocked.tensor import BlockedTensor, default_block, format_name, known_when_traced

_ops = torch.ops.torch_blocked

# Plain tags by number of dims: contiguous and channels-last.
_CONTIGUOUS = {3: "ncw", 4: "nchw", 5: "ncdhw"}
_CHANNELS_LAST = {3: "nwc", 4: "nhwc", 5: "ndhwc"}
_MEMORY_FORMATS = {
    torch.contiguous_format: False,
    torch.channels_last: True,
    torch.channels_last_3d: True,
}


def is_blocked(tensor: object) -> bool:
    """Whether `tensor` is a BlockedTensor."""
    return isinstance(tensor, BlockedTensor)


def to_blocked(
    input: Tensor, format: str | None = None, dtype: torch.dtype | None = None
) -> BlockedTensor:
    """`input` [N, C, *spatial] in a blocked format. Differentiable.

    input: dense with any strides, or blocked; 3 to 5 dims; any dtype.
    format: a tag such as "nChw16c" or "aBcd8b" (blocks of 4, 8, 16 or 32); None takes the block
        that is fastest on this CPU, 16 with AVX-512 and else 8.
    dtype: of the result; conversion follows `Tensor.to`.
    Returns a BlockedTensor of physical shape [N, ceil(C/b), *spatial, b], or `input` itself if it
    has that format and dtype already.
    Raises ValueError for a tag that is not blocked over the channels or has another rank, TypeError
    for a sparse or mkldnn tensor.
    Source: oneDNN, "Understanding Memory Formats"."""
    block = default_block() if format is None else _block_of(format, input.dim())
    dtype = dtype or input.dtype
    if isinstance(input, BlockedTensor) and input.block == block and input.dtype == dtype:
        return input
    if input.layout != torch.strided:
        raise TypeError(
            f"torch_blocked::to_blocked: expected a strided tensor, got layout {input.layout}; "
            "call .to_dense() first"
        )
    return _ToBlocked.apply(input, block, dtype)


def to_dense(
    input: Tensor,
    dtype: torch.dtype | None = None,
    *,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """`input` as an ordinary strided tensor. Differentiable.

    memory_format: torch.contiguous_format, torch.channels_last (4 dims) or torch.channels_last_3d
        (5 dims); channels-last comes straight from the blocked format.
    A tensor that is not blocked goes through `Tensor.to`, which may return it unchanged."""
    if not isinstance(input, BlockedTensor):
        return input.to(dtype=dtype or input.dtype, memory_format=memory_format)
    channels_last = _MEMORY_FORMATS.get(memory_format)
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format, input.dim())
    if channels_last is None or rank != input.dim():
        raise ValueError(
            "torch_blocked::to_dense: expected torch.contiguous_format, or the channels-last "
            f"format of {input.dim()} dims, got {memory_format}; use to_format for nwc"
        )
    return _ToDense.apply(input, channels_last, dtype or input.dtype)


def to_format(input: Tensor, tag: str) -> Tensor:
    """`input` in the format `tag`: plain ("nchw", "nhwc", "nwc", "ncdhw", ...) or blocked.

    Raises ValueError if the tag is not one of activations with the rank of `input`."""
    channels_last = _is_channels_last(tag, input.dim())
    if channels_last is None:
        return to_blocked(input, tag)
    if isinstance(input, BlockedTensor):
        return _ToDense.apply(input, channels_last, input.dtype)
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


def empty(*size, format: str | None = None, dtype=None, requires_grad: bool = False):
    """Like torch.empty, blocked: `empty(8, 64, 56, 56, format="nChw16c")`. The tail is zero."""
    return zeros(*size, format=format, dtype=dtype, requires_grad=requires_grad)


def zeros(*size, format: str | None = None, dtype=None, requires_grad: bool = False):
    """Like torch.zeros, blocked."""
    dims = _dims(size)
    block = default_block() if format is None else _block_of(format, len(dims))
    physical = torch.zeros(blocked_dims(dims, block), dtype=dtype)
    return _wrapper()(physical, dims[1]).requires_grad_(requires_grad)


def ones(*size, format: str | None = None, dtype=None, requires_grad: bool = False):
    """Like torch.ones, blocked."""
    dense = torch.ones(*_dims(size), dtype=dtype)
    return to_blocked(dense, format).requires_grad_(requires_grad)


def randn(*size, format: str | None = None, dtype=None, requires_grad: bool = False):
    """Like torch.randn, blocked; the same seed gives the same values."""
    dense = torch.randn(*_dims(size), dtype=dtype)
    return to_blocked(dense, format).requires_grad_(requires_grad)


def _wrapper() -> type[BlockedTensor]:
    return ExportedTensor if torch.compiler.is_exporting() else BlockedTensor


_NO_VMAP = (
    "torch_blocked::{0}: expected a tensor outside torch.vmap, got one that it batches; "
    "call {0} before torch.vmap or after it"
)


def _tangent_by(reorder: type[torch.autograd.Function], tangent: Tensor | None, arguments: tuple):
    """The tangent in the format of its primal. Tangents that vmap batches, as jacfwd and hessian
    make them, stay dense: they have a dim more than any blocked format."""
    inner = tangent
    while inner is not None and torch._C._functorch.is_functorch_wrapped_tensor(inner):
        if torch._C._functorch.is_batchedtensor(inner):
            return tangent.to(arguments[-1])
        inner = torch._C._functorch.get_unwrapped(inner)
    return None if tangent is None else reorder.apply(tangent, *arguments)


class _ToBlocked(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, block: int, dtype: torch.dtype) -> BlockedTensor:
        if isinstance(input, BlockedTensor):
            physical = _ops.reblock(input._read(), input._channels, block, dtype=dtype)
        else:
            physical = _ops.to_blocked(input, block, dtype=dtype)
        return _wrapper()(physical, input.shape[1])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        input = inputs[0]
        ctx.dtype = input.dtype
        ctx.block = input.block if isinstance(input, BlockedTensor) else None
        ctx.result = inputs[1:]  # its block and dtype

    @staticmethod
    def jvp(ctx, tangent: Tensor | None, *_):
        return _tangent_by(_ToBlocked, tangent, ctx.result)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        raise NotImplementedError(_NO_VMAP.format("to_blocked"))

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.block is None:
            return to_dense(grad, ctx.dtype).contiguous(), None, None  # see ops.table.regular
        return to_blocked(grad, format_name(grad.dim(), ctx.block), ctx.dtype), None, None


class _ToDense(torch.autograd.Function):
    @staticmethod
    def forward(input: BlockedTensor, channels_last: bool, dtype: torch.dtype) -> Tensor:
        return _ops.to_dense(
            input._read(), input._channels, channels_last=channels_last, dtype=dtype
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.format, ctx.dtype = inputs[0].format, inputs[0].dtype
        ctx.result = inputs[1:]  # whether channels-last, and its dtype

    @staticmethod
    def jvp(ctx, tangent: Tensor | None, *_):
        return _tangent_by(_ToDense, tangent, ctx.result)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        raise NotImplementedError(_NO_VMAP.format("to_dense"))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return to_blocked(grad, ctx.format, ctx.dtype), None, None


@known_when_traced
def _is_channels_last(tag: str, ndim: int) -> bool | None:
    """False for the contiguous tag of `ndim` dims, True for channels-last, None for any other."""
    canonical = canonical_tag(tag)
    for plain, channels_last in ((_CONTIGUOUS, False), (_CHANNELS_LAST, True)):
        if ndim in plain and canonical == _C.canonical_tag(plain[ndim]):
            return channels_last
    return None


@known_when_traced
def _block_of(tag: str, ndim: int) -> int:
    return _parsed_block(checked_tag(tag), ndim)


@lru_cache(maxsize=256)
def _parsed_block(tag: str, ndim: int) -> int:
    block = _C.activation_block(tag)
    if block is None or ndim not in _CONTIGUOUS or _rank(tag) != ndim:
        wanted = f" such as {format_name(ndim, 16)}" if ndim in _CONTIGUOUS else " and 3 to 5 dims"
        raise ValueError(
            f"torch_blocked::to_blocked: expected a tag blocked over the channels{wanted}, got "
            f"{_C.shortened(tag)} for {ndim} dims; use to_format for plain formats"
        )
    return block


def _rank(tag: str) -> int:
    return len({letter.lower() for letter in _C.canonical_tag(tag) if letter.isalpha()})


def _to_plain(input: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return input.contiguous()
    return input.movedim(1, -1).contiguous().movedim(-1, 1)


def _dims(size: tuple) -> tuple[int, ...]:
    dims = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
    if len(dims) not in _CONTIGUOUS:
        raise ValueError(
            f"torch_blocked::empty: expected 3 to 5 dims [N, C, *spatial], got {dims}; "
            "use torch's own factories for other ranks"
        )
    return dims
