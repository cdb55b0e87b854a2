"""Memory objects: a descriptor and the memory that it describes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from torch_blocked import _C
from torch_blocked.descriptor import Descriptor, blocked_dims
from torch_blocked.tensor import BlockedTensor

__all__ = ["Memory"]


class Memory:
    """A memory object: a descriptor, and the memory that it describes.

    Memory(descriptor)                     owns new memory of `descriptor.get_size()` bytes, all 0
    Memory.from_handle(descriptor, handle) takes memory that somebody else owns
    Memory.of(tensor)                      the memory of a strided or blocked tensor, shared

    A handle is one of: an address; a writable buffer (bytearray, NumPy array) or dense CPU tensor,
    which is kept alive; None, for no memory yet (oneDNN's DNNL_MEMORY_NONE). At an address there
    must be `descriptor.get_size()` bytes for as long as they are used. Nothing can check that.

    Raises TypeError for another kind of descriptor or handle. Raises ValueError for a descriptor of
    an open format (tag `any`), for too few bytes, for an address that is not a multiple of an
    element's size, and for memory that is read-only or has gaps.
    Source: oneAPI specification, "Memory", struct memory."""

    __slots__ = ("_bytes", "_desc")

    _desc: Descriptor
    _bytes: Tensor | None  # uint8 [bytes]

    def __init__(self, descriptor: Descriptor) -> None:
        self._desc = _checked(descriptor)
        self._bytes = torch.zeros(descriptor.get_size(), dtype=torch.uint8)

    @classmethod
    def from_handle(cls, descriptor: Descriptor, handle: Any) -> Memory:
        """A Memory at `handle`, described by `descriptor`. Padding is left as it is."""
        memory = cls.__new__(cls)
        memory._desc = _checked(descriptor)
        memory.set_data_handle(handle)
        return memory

    @classmethod
    def of(cls, tensor: Tensor) -> Memory:
        """A tensor's memory, shared, without its autograd graph.

        Raises what `Descriptor.of` raises."""
        memory = cls.__new__(cls)
        memory._desc = Descriptor.of(tensor)
        memory._bytes = _bytes_of(tensor)
        return memory

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of this memory."""
        return self._desc

    @property
    def data_handle(self) -> int | None:
        """The address of the first element; None if there is no memory yet."""
        return None if self._bytes is None else self._bytes.data_ptr()

    def set_data_handle(self, handle: Any) -> None:
        """Uses the memory at `handle` from now on. Nothing is written, as in oneDNN since 2.1.

        Raises the errors of the class, and then keeps the handle that it had."""
        self._bytes = None if handle is None else _bytes_at(handle, self._desc)

    def tensor(self) -> Tensor:
        """A tensor of the descriptor's dims on this memory.

        It is strided if strides give the format, and a BlockedTensor if channels are in blocks of
        4, 8, 16 or 32.
        Raises ValueError if there is no memory, or if the tail of blocks is not zero, which every
        BlockedTensor requires. Raises NotImplementedError for formats that tensors do not have,
        such as weights in blocks."""
        desc, memory = self._desc, self._bytes
        if memory is None or desc.is_zero():
            got = "no memory" if memory is None else "the zero descriptor"
            raise ValueError(
                f"torch_blocked::Memory.tensor: expected memory to look at, got {got}; "
                "give it a handle by set_data_handle()"
            )
        dtype = desc.data_type()
        assert dtype is not None
        elements = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        start = elements.storage_offset() + desc.submemory_offset()
        strides = [max(stride, 0) for stride in desc.strides()]  # of dims of size 1 they may be < 0
        if not desc.inner_blks() and desc.padded_dims() == desc.dims():
            return elements.as_strided(desc.dims(), strides, start)
        sizes = _physical_sizes(desc)
        physical = elements.as_strided(sizes, [*strides, 1], start)
        channels = desc.dims()[1]
        if not torch.ops.torch_blocked.tail_is_zero(physical.contiguous(), channels):
            raise ValueError(
                f"torch_blocked::Memory.tensor: expected a zero tail beyond channel {channels}, "
                "got other values; write zeros there, or reorder_to() a memory of its own"
            )
        return BlockedTensor(physical, channels)

    def reorder_to(self, descriptor: Descriptor) -> Memory:
        """A new memory with the same values in the format and dtype of `descriptor`.

        Any two formats of the same dims will do, formats of weights included. Values are converted
        as in oneDNN: to integers they are rounded to the nearest, ties to even, and cut at the ends
        of the range. Padding becomes zero.
        Raises ValueError for other dims, and if there is no memory."""
        return self.reorder_into(Memory(descriptor))

    def reorder_into(self, other: Memory) -> Memory:
        """Writes the values to `other` in its format and dtype, and returns it.

        Raises what `reorder_to` raises, and ValueError if elements of `other` share memory
        (stride 0)."""
        if not isinstance(other, Memory):
            raise TypeError(
                "torch_blocked::reorder: expected a Memory to write to, got "
                f"{type(other).__name__}; reorder_to(descriptor) makes one"
            )
        for memory in (self, other):
            if memory._bytes is None:
                raise ValueError(
                    "torch_blocked::reorder: expected memory on both sides, got none for "
                    f"{memory._desc}; give it a handle by set_data_handle()"
                )
        assert self._bytes is not None and other._bytes is not None
        _C.reorder(self._desc._desc, self._bytes, other._desc._desc, other._bytes)
        return other

    # oneDNN v3 names.
    def get_desc(self) -> Descriptor:
        """`descriptor`."""
        return self._desc

    def get_data_handle(self) -> int | None:
        """`data_handle`."""
        return self.data_handle

    def __repr__(self) -> str:
        handle = self.data_handle
        return f"Memory({self._desc}, {'no handle' if handle is None else hex(handle)})"


def _checked(descriptor: Descriptor) -> Descriptor:
    if not isinstance(descriptor, Descriptor):
        raise TypeError(
            "torch_blocked::Memory: expected a Descriptor, got "
            f"{type(descriptor).__name__}; Memory.of(tensor) is a tensor's memory"
        )
    if descriptor.format_kind() == "any":
        raise ValueError(
            f"torch_blocked::Memory: expected a descriptor of a defined format, got {descriptor}; "
            "ask wanted_formats() which one a module wants"
        )
    return descriptor


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory between a tensor's first and last element, as uint8 [bytes]."""
    read = tensor._read() if isinstance(tensor, BlockedTensor) else tensor
    if read.device.type != "cpu":
        raise TypeError(
            f"torch_blocked::Memory: expected memory of the CPU, got a tensor on {read.device}; "
            "call .cpu() first"
        )
    pairs = zip(read.shape, read.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    size = (last + 1) * read.itemsize if read.numel() else 0
    start = read.storage_offset() * read.itemsize
    return torch.empty(0, dtype=torch.uint8).set_(read.untyped_storage(), start, (size,), (1,))


def _bytes_at(handle: Any, descriptor: Descriptor) -> Tensor:
    size = descriptor.get_size()
    if isinstance(handle, int) and not isinstance(handle, bool):
        found = _bytes_at_address(handle, size)
    elif isinstance(handle, Tensor):
        found = _bytes_of_dense(handle)
    else:
        found = _bytes_of_buffer(handle)
    if found.numel() < size:
        raise ValueError(
            f"torch_blocked::Memory: expected at least {size} bytes for {descriptor}, got "
            f"{found.numel()}; take the size from get_size()"
        )
    dtype = descriptor.data_type()
    if dtype is not None and found.data_ptr() % dtype.itemsize:
        raise ValueError(
            f"torch_blocked::Memory: expected an address that is a multiple of {dtype.itemsize}, "
            f"got {found.data_ptr():#x}; align the buffer to its elements"
        )
    return found


def _bytes_at_address(address: int, size: int) -> Tensor:
    if size == 0:  # memory of zero volume is never touched
        return torch.empty(0, dtype=torch.uint8)
    if not 0 < address < 2**64 - size:
        raise ValueError(
            f"torch_blocked::Memory: expected an address, got {_C.shortened(str(address))}; "
            "None stands for no memory yet"
        )
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _bytes_of_dense(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise TypeError(
            f"torch_blocked::Memory: expected a strided or blocked tensor, got {tensor.layout}; "
            "call .to_dense() first"
        )
    found = _bytes_of(tensor)
    elements = tensor._read() if isinstance(tensor, BlockedTensor) else tensor
    if found.numel() != elements.numel() * elements.itemsize:
        raise ValueError(
            "torch_blocked::Memory: expected a tensor whose elements lie side by side, got strides "
            f"{elements.stride()} for {tuple(elements.shape)}; Memory.of(tensor) takes gaps"
        )
    return found


def _bytes_of_buffer(buffer: Any) -> Tensor:
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(
            "torch_blocked::Memory: expected an address, a buffer, a tensor or None, got "
            f"{type(buffer).__name__}; pass what holds the memory"
        ) from None
    if view.readonly or not view.c_contiguous:
        raise ValueError(
            "torch_blocked::Memory: expected a buffer that can be written and has no gaps, got "
            f"one that is {'read-only' if view.readonly else 'strided'}; pass a copy"
        )
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view.cast("B") if view.format != "B" else view, dtype=torch.uint8)


def _physical_sizes(descriptor: Descriptor) -> list[int]:
    """The physical sizes of a BlockedTensor in this format."""
    dims, blocks = descriptor.dims(), descriptor.inner_blks()
    if 3 <= len(dims) <= 5 and len(blocks) == 1 and blocks[0] in _C.Format.BLOCKS:
        sizes = blocked_dims(dims, blocks[0])
        padded = (dims[0], sizes[1] * blocks[0], *dims[2:])
        if descriptor.inner_idxs() == (1,) and descriptor.padded_dims() == padded:
            return sizes
    raise NotImplementedError(
        "torch_blocked::Memory.tensor: expected a format that tensors have (strides, or channels "
        f"in blocks of 4, 8, 16 or 32), got {descriptor}; reorder_to() one of them"
    )
