"""Memory descriptors: the rule that maps a logical index to an offset in memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_blocked import _C

__all__ = ["Descriptor", "canonical_tag", "physical_shape"]

_DTYPE_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.int32: "s32",
    torch.int8: "s8",
    torch.uint8: "u8",
    torch.float64: "f64",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def _dtype_name(dtype: torch.dtype | str) -> str:
    if isinstance(dtype, str):
        return dtype
    name = _DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if name is None:
        raise TypeError(
            "torch_blocked::Descriptor: expected a dtype that oneDNN has "
            f"({', '.join(str(known) for known in _DTYPE_NAMES)}), got "
            f"{_C.shortened(repr(dtype))}; cast the data to one of them"
        )
    return name


def _ints(what: str, values: Sequence[int]) -> list[int]:
    if isinstance(values, Tensor):
        raise TypeError(
            f"torch_blocked::Descriptor: expected {what} to be a sequence of integers, got a "
            f"tensor {tuple(values.shape)}; Descriptor.of(tensor) describes a tensor's memory"
        )
    try:
        result = [operator.index(value) for value in values]
    except TypeError:
        raise TypeError(
            f"torch_blocked::Descriptor: expected {what} to be a sequence of integers, "
            f"got {_C.shortened(repr(values))}; pass a tuple such as (2, 17, 5, 4)"
        ) from None
    limit = 31 if what in ("permutation", "inner_idxs") else 63
    for value in result:
        if not -(2**limit) <= value < 2**limit:
            raise ValueError(
                f"torch_blocked::Descriptor: expected {what} to fit {limit + 1} bits, "
                f"got {_C.shortened(str(value))}; check the values"
            )
    return result


def checked_tag(tag: str) -> str:
    """`tag`. Raises TypeError if it is no string."""
    if not isinstance(tag, str):
        raise TypeError(
            "torch_blocked::format_tag: expected a string such as 'nChw16c', got "
            f"{_C.shortened(repr(tag))}; pass strides by keyword: "
            "Descriptor(dims, dtype, strides=...)"
        )
    return tag


def canonical_tag(tag: str) -> str:
    """The domain-agnostic spelling of a format tag: `canonical_tag("nChw16c") == "aBcd16b"`.

    Two names of the same format have the same canonical tag.
    Raises ValueError if `tag` is not a format tag.
    Source: oneAPI specification, "Memory", format_tag."""
    return _C.canonical_tag(checked_tag(tag))


def physical_shape(dims: Sequence[int], tag: str) -> tuple[int, ...]:
    """Sizes of a dense tensor that holds logical `dims` in the format `tag`.

    dims in logical order -> outer dims in memory order, blocked ones divided by their block and
    rounded up, then the inner blocks: `physical_shape((2, 17, 5, 4), "nChw8c") == (2, 3, 5, 4, 8)`.
    Raises ValueError for an unknown tag, for `undef` and `any`, and for a rank not the tag's.
    Source: oneDNN, "Understanding Memory Formats"."""
    return _C.physical_shape(_ints("dims", dims), checked_tag(tag))


def blocks_of(channels: int, block: int) -> int:
    """ceil(C/b): the blocks that `channels` take. Either may be a symbol of a traced program."""
    return -(-channels // block)


def blocked_dims(dims: Sequence[int], block: int) -> list[int]:
    """[N, C, *spatial] -> the physical [N, ceil(C/b), *spatial, b]. Unlike `physical_shape` it
    takes symbols."""
    n, channels, *spatial = dims
    return [n, blocks_of(channels, block), *spatial, block]


class Descriptor:
    """A memory descriptor: logical dims, data type and format. Immutable; it holds no data.

    Sizes, strides and offsets count elements, `get_size` bytes. Dims are always in logical order
    (N, C, spatial; or G, O, I, spatial), whatever the format.

    Descriptor(dims, dtype, tag)       dense memory in the order of a format tag
    Descriptor(dims, dtype, strides=)  one stride for each dim, 0 to broadcast
    Descriptor(dims, dtype, strides=, inner_blks=, inner_idxs=, padded_dims=, inner_strides=)
                                       strides between blocks, and blocks, filled in by hand
    Descriptor()                       the zero descriptor, which stands for an absent argument
    Descriptor.of(tensor)              the descriptor of a tensor's memory

    dtype is a torch.dtype (float16, bfloat16, float32, int32, int8, uint8, float64) or oneDNN's
    name ("f32"). `tag` may be "any" (format left open) or "undef" (gives the zero descriptor).
    padded_dims are whole blocks and at least dims; left out, dims rounded up to their blocks.
    inner_strides has one stride for each inner block; oneDNN describes dense blocks only, so other
    strides raise NotImplementedError, and it may be left out.
    At most 12 dims, each at least 0. Where a call has `allow_empty`, True makes it return the zero
    descriptor instead of raising when the described memory is impossible or unsupported; an
    unknown name or an argument of the wrong kind raises all the same.

    Accessors have the names of the oneAPI specification; those of oneDNN's v3 API (`get_dims`,
    `get_strides`, ...) are accepted as well.

    Raises ValueError for impossible memory, TypeError for arguments of the wrong kind,
    NotImplementedError for memory that oneDNN cannot describe.
    Source: oneAPI specification, "Memory", struct desc."""

    __slots__ = ("_desc",)

    def __init__(
        self,
        dims: Sequence[int] = (),
        dtype: torch.dtype | str = "undef",
        tag: str | None = None,
        *,
        strides: Sequence[int] | None = None,
        inner_blks: Sequence[int] | None = None,
        inner_idxs: Sequence[int] | None = None,
        padded_dims: Sequence[int] | None = None,
        inner_strides: Sequence[int] | None = None,
        allow_empty: bool = False,
    ) -> None:
        dims = _ints("dims", dims)
        if tag is None and strides is None and not dims:
            self._desc = _C.Descriptor()
            return
        self._desc = _C.Descriptor(
            dims,
            _dtype_name(dtype),
            None if tag is None else checked_tag(tag),
            None if strides is None else _ints("strides", strides),
            _ints("inner_blks", inner_blks or ()),
            _ints("inner_idxs", inner_idxs or ()),
            _ints("padded_dims", padded_dims or ()),
            _ints("inner_strides", inner_strides or ()),
            allow_empty,
        )

    @classmethod
    def of(cls, tensor: Tensor) -> Descriptor:
        """The descriptor of a strided or blocked tensor's memory, from its first element on.

        Raises TypeError for other layouts and for a dtype that oneDNN lacks. Raises ValueError for
        a scalar, for more than 12 dims, and for elements that overlap by oneDNN's rule. That rule
        counts whole strides, so the elements of `x[:, ::2]` overlap if C is odd."""
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            got = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                "torch_blocked::Descriptor.of: expected a strided or blocked tensor, got "
                f"{got}; call .to_dense() first"
            )
        if not tensor.dim():
            raise ValueError(
                "torch_blocked::Descriptor.of: expected a tensor with dims, got a scalar; "
                "view it as one dim of size 1"
            )
        blocked: Any = tensor
        physical: Tensor | None = getattr(tensor, "_physical", None)  # of a BlockedTensor
        if physical is None:
            return cls(tensor.shape, tensor.dtype, strides=tensor.stride())
        if physical.is_contiguous():  # the stride of a single block means nothing
            return cls(tensor.shape, tensor.dtype, blocked.format)
        *strides, lane = physical.stride()
        if lane != 1:
            raise ValueError(
                "torch_blocked::Descriptor.of: expected the channels of a block side by side, got "
                f"strides {physical.stride()}; call .contiguous() first"
            )
        block = physical.shape[-1]
        return cls(
            tensor.shape, tensor.dtype, strides=strides, inner_blks=(block,), inner_idxs=(1,)
        )

    @classmethod
    def _wrap(cls, desc: _C.Descriptor) -> Descriptor:
        result = object.__new__(cls)
        result._desc = desc
        return result

    def ndims(self) -> int:
        """Number of logical dims; 0 for the zero descriptor."""
        return self._desc.ndims()

    def dims(self) -> tuple[int, ...]:
        """Logical dims."""
        return self._desc.dims()

    def data_type(self) -> torch.dtype | None:
        """The data type; None for the zero descriptor."""
        return _DTYPES.get(self._desc.data_type())

    def format_kind(self) -> str:
        """Either "blocked" (strides, maybe inner blocks), "any", or "undef" (zero descriptor)."""
        return self._desc.format_kind()

    def strides(self) -> tuple[int, ...]:
        """Strides between blocks, in elements and logical order; empty for `any` and zero."""
        return self._desc.strides()

    def padded_dims(self) -> tuple[int, ...]:
        """Dims rounded up to their blocks."""
        return self._desc.padded_dims()

    def padded_offsets(self) -> tuple[int, ...]:
        """Where data starts inside the padding: all 0, since padding is at the end."""
        return self._desc.padded_offsets()

    def submemory_offset(self) -> int:
        """Elements between the start of the whole memory and the start of this region."""
        return self._desc.submemory_offset()

    def inner_nblks(self) -> int:
        """Number of inner blocks."""
        return len(self._desc.inner_blks())

    def inner_blks(self) -> tuple[int, ...]:
        """Sizes of the inner blocks, outer-most first."""
        return self._desc.inner_blks()

    def inner_idxs(self) -> tuple[int, ...]:
        """Logical dim of each inner block, counted from 0."""
        return self._desc.inner_idxs()

    def inner_strides(self) -> tuple[int, ...]:
        """Elements between neighbours in each inner block, outer-most first: `OIhw4i16o4i` has
        (64, 4, 1). The `strides[1]` of MKL-DNN 0.95, by block and not by dim."""
        return self._desc.inner_strides()

    def get_size(self) -> int:
        """Bytes that a buffer for this memory must have, padding included.

        0 for the zero descriptor, for tag `any` and for zero volume. A submemory counts from the
        start of the whole memory to its own last element."""
        return self._desc.get_size()

    def is_zero(self) -> bool:
        """Whether this is the zero descriptor."""
        return self._desc.is_zero()

    def offset(self, index: Sequence[int], *, padded: bool = False) -> int:
        """Offset in elements of a logical index; with `padded`, of an index into padded_dims.

        Raises ValueError if the index is out of range, or if there is no data (zero descriptor, tag
        `any`, zero volume)."""
        return self._desc.offset(_ints("index", index), padded)

    def submemory_desc(
        self, dims: Sequence[int], offsets: Sequence[int], allow_empty: bool = False
    ) -> Descriptor:
        """The region of size `dims` that starts at the logical index `offsets`.

        Raises ValueError if it is not inside, NotImplementedError if it cuts a block: along a
        blocked dim the offset must be a multiple of the block, and the size a multiple of it, less
        than it, or up to the right border."""
        return self._wrap(
            self._desc.submemory_desc(_ints("dims", dims), _ints("offsets", offsets), allow_empty)
        )

    def reshape(self, dims: Sequence[int], allow_empty: bool = False) -> Descriptor:
        """The same memory with other dims and the same elements in the same logical order.

        Adds a dim of size 1; drops one that is not padded; splits a dim that is not padded; joins
        consecutive dims that are dense, in order, not padded and not blocked.
        Raises ValueError for anything else."""
        return self._wrap(self._desc.reshape(_ints("dims", dims), allow_empty))

    def permute_axes(self, permutation: Sequence[int], allow_empty: bool = False) -> Descriptor:
        """The same memory with axes renamed: `new.dims()[permutation[i]] == dims()[i]`.

        Raises ValueError if `permutation` does not name each axis once."""
        return self._wrap(self._desc.permute_axes(_ints("permutation", permutation), allow_empty))

    def tag(self) -> str | None:
        """A canonical tag that gives this descriptor; None if strides or offset fit no tag.

        Dims of size 1 leave a choice between tags: ask `matches_tag` about a certain one."""
        return self._desc.tag()

    def matches_tag(self, tag: str) -> bool:
        """Whether Descriptor(dims, dtype, tag) equals this descriptor."""
        return self._desc.matches_tag(checked_tag(tag))

    def physical_shape(self) -> tuple[int, ...]:
        """Sizes of this memory as a tensor: outer dims in memory order, then the inner blocks."""
        return self._desc.physical_shape()

    # oneDNN v3 names of the accessors.
    get_ndims = ndims
    get_dims = dims
    get_data_type = data_type
    get_format_kind = format_kind
    get_strides = strides
    get_padded_dims = padded_dims
    get_padded_offsets = padded_offsets
    get_submemory_offset = submemory_offset
    get_inner_nblks = inner_nblks
    get_inner_blks = inner_blks
    get_inner_idxs = inner_idxs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptor):
            return NotImplemented
        return self._desc.equals(other._desc)

    def __hash__(self) -> int:
        return self._desc.hash()

    def __repr__(self) -> str:
        return self._desc.to_string()

    def __copy__(self) -> Descriptor:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Descriptor:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Descriptor._of_state, self._desc.state()

    @classmethod
    def _of_state(cls, *state: Any) -> Descriptor:
        return cls._wrap(_C.Descriptor.from_state(*state))
