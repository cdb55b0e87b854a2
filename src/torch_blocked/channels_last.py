"""Finds where a channels-last model loses its format. torch does not say; the model gets slower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_blocked import module_paths
from torch_blocked.schema import is_view_op

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Loss:
    """An op that reads channels-last and returns another format."""

    module: str  # its path; "" is the model itself
    op: str  # "aten.cat.default"
    dims: tuple[int, ...]  # of the result
    line: str  # of the user's code: "model.py:12"

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.op} gives contiguous {self.dims} ({self.line})"


def channels_last_losses(model: nn.Module, *inputs: Any) -> list[Loss]:
    """The ops at which a channels-last model loses its format, each once for every place in the
    code. An empty list means that the model keeps the format from its input to its result.

    inputs: the model's arguments, at least one of them in torch.channels_last or channels_last_3d.
        Only tensors of 4 or 5 dims count. A tensor of one channel or one pixel is in both formats.
    Raises ValueError if no input is channels-last, and whatever the model raises."""
    if not any(_is_channels_last(each) for each in pytree.tree_leaves(inputs)):
        raise ValueError(
            "torch_blocked::channels_last_losses: expected an input in channels-last, got none; "
            "call .to(memory_format=torch.channels_last) on it"
        )
    with module_paths.known(), module_paths.from_here(), torch.no_grad(), _Watch() as watch:
        model(*inputs)
    return list(dict.fromkeys(watch.losses))


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.losses: list[Loss] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_view_op(func):
            return out  # moves nothing
        if any(_is_channels_last(each) for each in pytree.tree_leaves((args, kwargs))):
            for each in pytree.tree_leaves(out):
                if _is_contiguous_only(each):
                    path, line = module_paths.current(), module_paths.user_line()
                    self.losses.append(Loss(path, str(func), tuple(each.shape), line))
        return out


def _is_channels_last(value: Any) -> bool:
    """Whether it is channels-last and not contiguous as well."""
    return (
        isinstance(value, Tensor)
        and value.dim() in _FORMATS
        and value.is_contiguous(memory_format=_FORMATS[value.dim()])
        and not value.is_contiguous()
    )


def _is_contiguous_only(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() in _FORMATS
        and value.is_contiguous()
        and not value.is_contiguous(memory_format=_FORMATS[value.dim()])
    )
