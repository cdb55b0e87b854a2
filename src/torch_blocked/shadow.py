"""Views that cannot share the memory of a blocked tensor, kept in step with it.

`y[0, 3]`, `y.permute(...)` and `y.view(...)` have no blocked form, and channels that are not whole
blocks have no memory of their own, so results are copies. PyTorch promises views, so each copy
keeps its base. Before a use it is renewed if the base was written, and writes to it reach the base.
Each costs a reorder, and only after a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from torch_blocked import _C, foreign
from torch_blocked.dispatch import dispatch, never_compiled, views_counted
from torch_blocked.foreign import StandIn, is_foreign
from torch_blocked.raw_memory import (
    array_for_numpy,
    as_array,
    capsule,
    refuse_address,
)
from torch_blocked.schema import is_view_op, written_arguments
from torch_blocked.strict import check_view
from torch_blocked.tensor import BlockedTensor, contiguous_strides, is_contiguous

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


class Shadow:
    """The tie of a copy to its base. pull() renews the copy, push() writes it back."""

    def __init__(self, base: BlockedTensor, pull: Callable[[], None], push: Callable[[], None]):
        self.base, self.pull, self.push = base, pull, push
        self.version = _version(base)

    def follow(self) -> None:
        """Renews the copy if the base was written since."""
        if isinstance(self.base, BlockedCopy):
            self.base._shadow.follow()
        version = _version(self.base)
        if version is None or version != self.version or _gave_data(self.base):
            self.pull()
            self.version = version

    def renew(self) -> None:
        if isinstance(self.base, BlockedCopy):
            self.base._shadow.renew()
        self.pull()

    def write_back(self) -> None:
        """Copies writes from the copy to the base, and to the base of that."""
        self.push()
        if isinstance(self.base, BlockedCopy):
            self.base._shadow.write_back()


# Ops that read their first argument in the order of its dims, with results that do not depend on
# its strides.
_READ_IN_ORDER = {aten.native_layer_norm.default}


def _write_back_all(written: Sequence[Tensor]) -> None:
    """Copies the views that an op has written to their bases."""
    views = [each for each in written if isinstance(each, DenseView)]
    if len(written) == 1 and views:
        views[0]._shadow.write_back()
        return
    values = [view._dense.clone() for view in views]  # clones, because views may share memory
    for view, value in zip(views, values, strict=True):
        _bring(view, value)


def _bring(view: DenseView, value: Tensor) -> None:
    """Writes `value` to a view. The same op may have written the base too, and then the rest of the
    view's copy is older than the base. (Versions count writes when an op is done.)"""
    view._shadow.renew()
    view._dense.copy_(value)
    view._shadow.write_back()


class DenseView(Tensor):
    """A dense view of a blocked tensor. It shows a dense copy; copy and tensor follow each other.

    Results of ops on it are ordinary tensors, except for further views."""

    _dense: Tensor
    _shadow: Shadow
    # Makes contiguous values in one reorder, for a view whose own copy would take two.
    _contiguous: Callable[[], Tensor] | None = None

    @staticmethod
    def __new__(
        cls, dense: Tensor, shadow: Shadow, contiguous: Callable[[], Tensor] | None = None
    ) -> DenseView:
        self = Tensor._make_wrapper_subclass(
            cls,
            dense.shape,
            strides=dense.stride(),
            storage_offset=dense.storage_offset(),
            dtype=dense.dtype,
            device=dense.device,
        )
        torch._C._set_conj(self, dense.is_conj())
        torch._C._set_neg(self, dense.is_neg())
        # The storage of the base, which nobody can read. Readers of the storage of `dense` would
        # not see later writes to the base.
        _C.share_storage(self, shadow.base)
        self._dense, self._shadow, self._contiguous = dense, shadow, contiguous
        return self

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    @never_compiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        views = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, DenseView)]
        for view in views:
            view._shadow.follow()
        if func in IN_PLACE_VIEWS and isinstance(args[0], DenseView):
            return _change_dims(func, *args, **kwargs)
        if _reads_in_order(func, kwargs) and isinstance(args[0], DenseView):
            make = args[0]._contiguous
            args = (make(), *args[1:]) if make else args
            if make and func is aten.clone.default:
                return args[0]

        def plain(value):
            return value._dense if isinstance(value, DenseView) else value

        plain_args, plain_kwargs = pytree.tree_map(plain, (args, kwargs))
        if is_foreign(func):
            given = {id(view): StandIn(view, view._dense, partial(_bring, view)) for view in views}
            return foreign.run(func, plain_args, plain_kwargs, list(given.values()))
        out = func(*plain_args, **plain_kwargs)
        _write_back_all(written_arguments(func, args, kwargs))
        original = {id(view._dense): view for view in views}

        def wrapped(value):
            if id(value) in original:
                return original[id(value)]
            if is_view_op(func) and isinstance(value, Tensor) and not _is_blocked(value):
                return DenseView(value, views[0]._shadow)
            return value

        return pytree.tree_map(wrapped, out)

    def _plain(self) -> Tensor:
        self._shadow.follow()
        return self._dense.clone()

    def data_ptr(self) -> NoReturn:
        refuse_address("data_ptr", f"a view {tuple(self.shape)} of a blocked one")

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._shadow.base.untyped_storage()

    def share_memory_(self) -> NoReturn:
        refuse_address("share_memory_", f"a view {tuple(self.shape)} of a blocked one")

    def numpy(self, *, force: bool = False):
        """A copy as a NumPy array. It is read-only unless force=True."""
        return as_array(self._plain().requires_grad_(self.requires_grad), force)

    def __array__(self, dtype=None, copy=None):
        return array_for_numpy(self._plain(), dtype, copy)

    def __dlpack__(self, **arguments):
        return capsule(self._plain(), arguments)

    def apply_(self, function):
        return self.copy_(self._plain().apply_(function))

    def map_(self, other, function):
        return self.copy_(self._plain().map_(torch.clone(other), function))

    def tolist(self):
        return self._plain().tolist()

    def __deepcopy__(self, memo) -> Tensor:
        return memo.setdefault(id(self), self._plain().requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        view: Any = self.detach()
        return torch._tensor_str._str(view._plain(), tensor_contents=tensor_contents)


def _reads_in_order(func, kwargs) -> bool:
    copies = func is aten.clone.default
    return func in _READ_IN_ORDER or (
        copies and kwargs.get("memory_format") is torch.contiguous_format
    )


def _change_dims(func, view: DenseView, *args, **kwargs) -> DenseView:
    """Runs an op that changes dims in place, on the tensor in the copy's memory."""
    dense = view._dense.detach()
    func(dense, *args, **kwargs)
    become(view, DenseView(dense, view._shadow))
    return view


class BlockedCopy(BlockedTensor):
    """A view of a blocked tensor that is a blocked copy, such as channels that are not whole
    blocks. Views of it share its memory and its tie."""

    _shadow: Shadow
    # Strides of the same view of a dense tensor, if these leave gaps; the copy has no gaps.
    _strides: list[int] | None = None

    @classmethod
    @never_compiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:  # type: ignore[override]
        """Runs `func`. Renews each copied view before, and updates its base after."""
        if torch.is_inference_mode_enabled() and views_counted(func, args):
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        for copy in (leaf for leaf in leaves if isinstance(leaf, BlockedCopy)):
            copy._shadow.follow()
        others = [t for t in types if t is not BlockedCopy]
        result = dispatch(BlockedTensor, func, others, args, kwargs)
        if is_view_op(func) and isinstance(args[0], BlockedCopy):
            return pytree.tree_map_only(Tensor, partial(tied_to, args[0]), result)
        if func._schema.is_mutable:
            for argument in written_arguments(func, args, kwargs):
                if isinstance(argument, BlockedCopy):
                    argument._shadow.write_back()
        return result

    def _read(self) -> Tensor:
        self._shadow.follow()
        return self._physical

    def _dense_strides(self) -> list[int] | None:
        if not self._strides or forward_ad._current_level >= 0:
            return super()._dense_strides()
        return None if is_contiguous(self.shape, self._strides) else self._strides


def anchor(input: BlockedTensor) -> BlockedTensor:
    """A blocked tensor that shares memory and write counts with `input`. Views are tied to it,
    because `input` itself may be given other dims or other memory."""
    if not _is_eager(input):
        return input  # traced: there are no ties
    same = type(input)(input._physical, input._channels)
    if isinstance(input, BlockedCopy) and isinstance(same, BlockedCopy):
        same._shadow, same._strides = input._shadow, input._strides
    _C.share_version(same, input)
    _C.share_storage(same, input)
    return same


def dense_view(func, input: BlockedTensor, *args, pixels_last: bool = False, **kwargs) -> Any:
    """The result of the view op `func` on a dense copy of `input`, tied to it.

    pixels_last: the view would be contiguous if the copy were channels-last. The copy is not,
    because contiguous() of such a view of a dense tensor gives memory of its own."""
    check_view(str(func), f"{input.format} {tuple(input.shape)}")
    input = anchor(input)
    memory = _without_repeats(input)
    is_repeated = memory is not input._physical

    def copy(channels_last: bool = False) -> Tensor:
        return _tb.to_dense(memory, input._channels, channels_last=channels_last)

    dense = copy()
    shown = dense.expand(input.shape) if is_repeated else dense
    if not _is_eager(input):
        return func(shown, *args, **kwargs)  # in a trace in-place ops are functional already
    if not is_repeated:
        shown = dense = _laid_as(dense, input._dense_strides())
    try:
        out = func(shown, *args, **kwargs)
    except RuntimeError:
        if func is not aten.view.default:
            raise
        return shown.reshape(*args)  # a slice cannot join these dims, so ATen's reshape copies

    def pull() -> None:
        dense.copy_(copy())

    def push() -> None:
        memory.copy_(_tb.to_blocked(dense, input.block))

    def contiguous() -> Tensor:
        return func(copy(channels_last=True), *args, **kwargs)

    shadow = Shadow(input, pull, push)
    made = contiguous if pixels_last and not is_repeated else None
    return pytree.tree_map_only(Tensor, lambda value: DenseView(value, shadow, made), out)


def tied_dense(value: Tensor, input: BlockedTensor, dense: Tensor) -> DenseView:
    """`value`, a view of `dense`, which is a copy of `input`, tied to `input`."""
    input = anchor(input)

    def pull() -> None:
        dense.copy_(_tb.to_dense(input._physical, input._channels))

    def push() -> None:
        input._physical.copy_(_tb.to_blocked(dense, input.block))

    return DenseView(value, Shadow(input, pull, push))


def _without_repeats(input: BlockedTensor) -> Tensor:
    """The physical tensor with each element that expand() has repeated in images and pixels once.
    Repeats share memory, and ATen refuses to write all of them at once."""
    physical = input._physical
    if not _is_eager(input):
        return physical
    for dim in (0, *range(2, physical.dim() - 1)):
        if physical.stride(dim) == 0 and physical.size(dim) > 1:
            physical = physical.narrow(dim, 0, 1)
    return physical


def _laid_as(tensor: Tensor, strides: list[int] | tuple[int, ...] | None) -> Tensor:
    """The same values with these strides."""
    if strides is None:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def channel_view(input: BlockedTensor, start: int, length: int) -> BlockedTensor:
    """Channels [start, start + length) of `input` as a copy tied to it."""
    check_view("slice", f"{input.format} {tuple(input.shape)}")
    input = anchor(input)
    memory = _without_repeats(input)

    def copy() -> Tensor:
        return _tb.slice_channels(memory, input._channels, start, length)

    if not _is_eager(input):
        return BlockedTensor(copy(), length)
    strides = input._dense_strides()
    part = _laid_as(copy(), strides and input._physical.stride())
    if memory is not input._physical:
        images, _, *rest = input._physical.shape
        part = part.expand(images, -1, *rest)
    view = BlockedCopy(part, length)
    view._strides = strides or contiguous_strides(input.shape)

    def pull() -> None:
        _without_repeats(view).copy_(copy())

    def push() -> None:
        dense = _tb.to_dense(memory, input._channels)
        dense[:, start : start + length] = _tb.to_dense(_without_repeats(view), length)
        memory.copy_(_tb.to_blocked(dense, input.block))

    view._shadow = Shadow(input, pull, push)
    return view


def tied_to(copy: BlockedCopy, view: Tensor) -> Tensor:
    """`view`, in memory of `copy`, with the same tie to the base."""
    if isinstance(view, (BlockedCopy, DenseView)):
        return view  # it already has a tie, to `copy`
    if not isinstance(view, BlockedTensor):
        return DenseView(view, copy._shadow)
    tied = BlockedCopy(view._physical, view._channels)
    tied._shadow = copy._shadow
    return tied


# Ops that change the dims of a tensor in place, and the view op with the same result.
IN_PLACE_VIEWS = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.as_strided_.default: aten.as_strided.default,
    aten.resize_.default: None,  # a dense view may become larger
    aten.resize_as_.default: None,
}

_OURS = ("_physical", "_channels", "_dense", "_shadow", "_strides", "_contiguous")


def become(self: Tensor, other: Tensor) -> None:
    """Turns `self`, which stays the same object, into `other`: blocked, a view or dense."""
    kinds = (Tensor, BlockedTensor, BlockedCopy, DenseView)
    for tensor in (self, other):
        if type(tensor) not in kinds:
            raise RuntimeError(
                f"torch_blocked::in place: expected a tensor that can change its dims, got a "
                f"{type(tensor).__name__}; call the op without the underscore"
            )
    _C.take_metadata(self, other)
    for name in _OURS:
        self.__dict__.pop(name, None)
    self.__class__ = type(other)
    self.__dict__.update({name: vars(other)[name] for name in _OURS if name in vars(other)})


def _gave_data(base: BlockedTensor) -> bool:
    return getattr(base._physical, "gave_data", False)


def _version(tensor: Tensor) -> int | None:
    """None for inference tensors, which do not count their writes."""
    return None if tensor.is_inference() else tensor._version


def _is_eager(tensor: BlockedTensor) -> bool:
    return type(tensor._physical) is Tensor


def _is_blocked(tensor: Tensor) -> bool:
    return isinstance(tensor, BlockedTensor)
