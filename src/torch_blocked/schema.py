"""Questions to the schema of a torch op about its arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree


@cache
def is_view_op(func: OpOverload) -> bool:
    """Whether the op's results alias its arguments without being written."""
    infos = [ret.alias_info for ret in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def written_arguments(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that the op writes, by its schema."""
    values: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return values


def has_out(func: OpOverload) -> bool:
    """Whether results are written into arguments named for it, such as `out`."""
    return any(argument.is_out for argument in func._schema.arguments)
