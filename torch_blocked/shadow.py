"""Views that cannot share the memory of a blocked tensor, kept in step with it.

`y[0, 3]`, `y.permute(...)` and `y.view(...)` have no blocked form, and channels that are not whole
blocks no memory of their own: their results are copies. PyTorch promises views, so each copy keeps
its base: before a use it follows what was written to the base, and what is written to it reaches
the base. Both cost a reorder, and only when something was written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_blocked.tensor import BlockedTensor

_tb = torch.ops.torch_blocked


class Shadow:
    """The tie of a copy to its base. pull() renews the copy, push() writes it back."""

    def __init__(self, base: BlockedTensor, pull: Callable[[], None], push: Callable[[], None]):
        self.base, self.pull, self.push = base, pull, push
        self.version = _version(base)

    def follow(self) -> None:
        """Renews the copy if the base was written since."""
        version = _version(self.base)
        if version is None or version != self.version:
            self.pull()
            self.version = version


class DenseView(Tensor):
    """A dense view of a blocked tensor: a view of a dense copy that follows it, and is followed.

    Results of ops on it are ordinary tensors, further views excepted."""

    _dense: Tensor
    _shadow: Shadow

    @staticmethod
    def __new__(cls, dense: Tensor, shadow: Shadow) -> DenseView:
        self = Tensor._make_subclass(cls, dense)
        self._dense, self._shadow = dense, shadow
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        views = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, DenseView)]
        for view in views:
            view._shadow.follow()

        def plain(value):
            return value._dense if isinstance(value, DenseView) else value

        out = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
        for argument in written_arguments(func, args, kwargs):
            if isinstance(argument, DenseView):
                argument._shadow.push()
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

    def numpy(self, *, force: bool = False):
        """A copy as a NumPy array."""
        return self._plain().numpy(force=force)

    def tolist(self):
        return self._plain().tolist()

    def __deepcopy__(self, memo) -> Tensor:
        return memo.setdefault(id(self), self._plain().requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return torch._tensor_str._str(self.detach()._plain(), tensor_contents=tensor_contents)


class BlockedCopy(BlockedTensor):
    """Channels of a blocked tensor that are not whole blocks of it."""

    _shadow: Shadow

    def _read(self) -> Tensor:
        self._shadow.follow()
        return self._physical


def dense_view(func, input: BlockedTensor, *args, channels_last: bool = False, **kwargs) -> Any:
    """The result of the view op `func` on a dense copy of `input`, tied to it.

    channels_last: the memory format of the copy."""

    def copy() -> Tensor:
        return _tb.to_dense(input._physical, input._channels, channels_last=channels_last)

    dense = copy()
    out = func(dense, *args, **kwargs)
    if not _is_eager(input):
        return out  # tracing has made in-place ops functional already

    def pull() -> None:
        dense.copy_(copy())

    def push() -> None:
        input._physical.copy_(_tb.to_blocked(dense, input.block))

    shadow = Shadow(input, pull, push)
    return pytree.tree_map_only(Tensor, lambda value: DenseView(value, shadow), out)


def channel_view(input: BlockedTensor, start: int, length: int) -> BlockedTensor:
    """Channels [start, start + length) of `input` as a copy tied to it."""

    def copy() -> Tensor:
        return _tb.slice_channels(input._physical, input._channels, start, length)

    if not _is_eager(input):
        return BlockedTensor(copy(), length)
    view = BlockedCopy(copy(), length)

    def pull() -> None:
        view._physical.copy_(copy())

    def push() -> None:
        dense = _tb.to_dense(input._physical, input._channels)
        dense[:, start : start + length] = _tb.to_dense(view._physical, length)
        input._physical.copy_(_tb.to_blocked(dense, input.block))

    view._shadow = Shadow(input, pull, push)
    return view


def written_arguments(func, args, kwargs) -> list[Tensor]:
    """The tensors that the op's schema says it writes."""
    values = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return values


@cache
def is_view_op(func) -> bool:
    """Whether the op's results alias its arguments without being written."""
    infos = [ret.alias_info for ret in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _version(tensor: Tensor) -> int | None:
    """None for inference tensors, which do not count their writes."""
    return None if tensor.is_inference() else tensor._version


def _is_eager(tensor: BlockedTensor) -> bool:
    return type(tensor._physical) is Tensor


def _is_blocked(tensor: Tensor) -> bool:
    return isinstance(tensor, BlockedTensor)
