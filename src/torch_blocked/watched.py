"""Tensors that report Python's questions to a running capture.

While a model runs for its capture, every tensor that depends on its inputs has this class: C++
changes the class of each result before Python sees it. A question about sizes is noted with its
answer (csrc/graph/running/guards.cpp holds other inputs against it); a look at values or memory
means that the ops alone do not tell the forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Kinds of questions other than the size of one dim, as in csrc/graph/graph.h.
SIZES, RANK, ELEMENTS, ONE_PIXEL, AT_LEAST = -1, -2, -3, -4, -5

_current = threading.local()


class Watch:
    """Collects Python's questions to tensors. It calls ask(tensor, what, answer) for the size of a
    watched tensor, is_constant(tensor) for a look at values, which returns whether these are the
    same for all inputs, and expose(tensor) for an array that shares its memory."""

    def __init__(
        self,
        ask: Callable[[Tensor, int, list[int]], None],
        is_constant: Callable[[Tensor], bool],
        expose: Callable[[Tensor], None],
    ) -> None:
        self.ask, self.is_constant, self.expose = ask, is_constant, expose
        self.reads_values = False
        self.takes_data = False
        self.asks_strides = False

    def __enter__(self) -> Watch:
        _current.watch = self
        return self

    def __exit__(self, *_error) -> None:
        _current.watch = None


@contextmanager
def _unwatched():
    watch, _current.watch = _watch(), None
    try:
        yield
    finally:
        _current.watch = watch


def _watch() -> Watch | None:
    return getattr(_current, "watch", None)


def _sizes(tensor: Tensor) -> torch.Size:
    with torch._C.DisableTorchFunction():  # hidden from FreeQuestions
        return Tensor.shape.__get__(tensor)


def _asked(tensor: Tensor, what: int, answer: list[int]) -> None:
    watch = _watch()
    if watch is not None:
        watch.ask(tensor, what, answer)


def _size(self: Tensor, dim: int | None = None):
    sizes = _sizes(self)
    if dim is None:
        _asked(self, SIZES, list(sizes))
        return sizes
    if not -len(sizes) <= dim < len(sizes):
        return Tensor.size(self, dim)  # raises in torch's words
    _asked(self, dim % len(sizes), [sizes[dim]])
    return sizes[dim]


def _rank(self: Tensor) -> int:
    rank = len(_sizes(self))
    _asked(self, RANK, [rank])
    return rank


def _elements(self: Tensor) -> int:
    count = _sizes(self).numel()
    _asked(self, ELEMENTS, [count])
    return count


def _length(self: Tensor) -> int:
    sizes = _sizes(self)
    if not sizes:
        raise TypeError("len() of a 0-d tensor")
    _asked(self, 0, [sizes[0]])
    return sizes[0]


def at_least(tensor: Tensor, dim: int, length: int) -> bool:
    """Whether a dim has at least this length. A capture with this question serves every size that
    gives the same answer."""
    if not isinstance(tensor, WatchedTensor):
        return tensor.size(dim) >= length
    holds = _sizes(tensor)[dim] >= length
    _asked(tensor, AT_LEAST, [dim, length, int(holds)])
    return holds


def _bytes(self: Tensor) -> int:
    return _elements(self) * self.itemsize


# Methods and properties that reveal strides or values.
_STRIDES = ("stride", "is_contiguous", "storage_offset", "dim_order", "is_set_to")
_VALUES = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
_VALUES += ("__dlpack__", "apply_", "map_", "share_memory_", "resize_", "set_")


def _noting(name: str, field: str) -> Callable:
    original = getattr(Tensor, name)

    def method(self, *args, **kwargs):
        watch = _watch()
        if watch is not None:
            setattr(watch, field, True)
        return original(self, *args, **kwargs)

    method.__name__ = name
    return method


def _read(tensor: Tensor) -> None:
    """Notes a look at values that no op reports."""
    watch = _watch()
    if watch is not None and tensor.layout == torch.strided and not watch.is_constant(tensor):
        watch.reads_values = True


def _list(self: Tensor) -> Any:
    _read(self)
    with torch._C.DisableTorchFunction():
        return Tensor.tolist(self)


def _array(self: Tensor, *args, **kwargs) -> Any:
    """The array of a constant is read-only, because the recorder would miss writes."""
    _read(self)
    array = Tensor.numpy(self, *args, **kwargs)
    watch = _watch()
    if watch is not None and not watch.reads_values:
        watch.expose(self)
        array.flags.writeable = False
    return array


def _format(self: Tensor, spec: str) -> str:
    """Formats it as a Tensor, whose own method tests for the exact class."""
    return format(self.item(), spec) if not _sizes(self) else object.__format__(self, spec)


def _get_data(self: Tensor) -> Tensor:
    watch = _watch()
    if watch is not None:
        watch.takes_data = True
    return Tensor.data.__get__(self)


def _set_data(self: Tensor, value: Tensor) -> None:
    watch = _watch()
    if watch is not None:
        watch.takes_data = True
    Tensor.data.__set__(self, value)


class WatchedTensor(Tensor):
    """A tensor that depends on the inputs of a capture."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    shape = property(_size)
    ndim = property(_rank)
    nbytes = property(_bytes)
    data = property(_get_data, _set_data)
    size = _size
    dim = ndimension = _rank
    numel = nelement = _elements
    __len__ = _length
    tolist = _list
    numpy = _array
    __format__ = _format


for _name in _STRIDES:
    setattr(WatchedTensor, _name, _noting(_name, "asks_strides"))
for _name in _VALUES:
    setattr(WatchedTensor, _name, _noting(_name, "reads_values"))

# Functions that ask without calling a method of the class, and the methods to call for them.
_FREE: dict[Callable, Callable] = {
    torch.numel: _elements,
    Tensor.numel: _elements,
    Tensor.nelement: _elements,
    Tensor.size: _size,
    Tensor.shape.__get__: _size,
    Tensor.dim: _rank,
    Tensor.ndim.__get__: _rank,
    Tensor.__len__: _length,
}
# Functions that look at the values of tensors that are not watched, such as the model's.
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
# Functions that ask for sizes to fill in arguments that are None, which we can see beforehand.
_FILLING = {
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
    F.adaptive_max_pool2d,
    F.adaptive_max_pool3d,
}


# Functions that ask for sizes to refuse images of one pixel, some of them only for a single image.
_REFUSING = {F.instance_norm, F.group_norm}


def _has_pixels(input: Tensor) -> bool:
    """Whether it is an image of more than one pixel; notes the question."""
    sizes = _sizes(input)
    if len(sizes) < 3 or sizes[2:].numel() <= 1:
        return False
    _asked(input, ONE_PIXEL, [0])
    return True


# Indexing drops a slice that is as long as its dim: x[:, :3] of three channels.
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


def _note_whole_slices(input: Tensor, index) -> None:
    sizes = _sizes(input)
    items = list(index) if isinstance(index, tuple) else [index]
    used = [_dims_of(each) for each in items]
    dim = 0
    for item, count in zip(items, used, strict=True):
        if item is Ellipsis:
            dim += max(0, len(sizes) - sum(used))
        elif isinstance(item, slice) and dim < len(sizes) and _is_whole(item, sizes[dim]):
            _asked(input, dim, [sizes[dim]])
        dim += count


def _dims_of(item) -> int:
    """The number of the tensor's dims that an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return len(_sizes(item))
    return 1


def _is_whole(item: slice, size: int) -> bool:
    """Whether a slice with a start or an end takes all of a dim of `size`."""
    is_named = item.start is not None or item.stop is not None
    return is_named and item.indices(size) == (0, size, 1)


class FreeQuestions(TorchFunctionMode):
    """Sees the questions that functions ask instead of methods."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asks = _FREE.get(func)
        if asks is not None and args and isinstance(args[0], WatchedTensor):
            return asks(*args, **kwargs)
        if func in _READING and type(args[0]) in (Tensor, nn.Parameter):
            _read(args[0])
        if func in _INDEXING and isinstance(args[0], WatchedTensor):
            _note_whole_slices(*args[:2])
        idle = func in _FILLING and len(args) > 1 and _is_filled(args[1])
        if idle or (func in _REFUSING and args and _has_pixels(args[0])):
            with _unwatched():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_filled(output_size) -> bool:
    return isinstance(output_size, int) or all(isinstance(size, int) for size in output_size)
