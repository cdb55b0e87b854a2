"""Arguments and results as leaves and a spec: pytree's, with dataclasses as nodes, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _Size:
    """A torch.Size, as a node of a tree that becomes one again: pytree makes a tuple of it."""

    def __init__(self, sizes: Iterable[Any]) -> None:
        self.sizes = list(sizes)


pytree.register_pytree_node(
    _Size,
    lambda node: (node.sizes, None),
    lambda children, _: torch.Size(children),
    serialized_type_name="torch_blocked.Size",
)


class _Fields:
    """The fields of a dataclass instance, as a node of a tree that becomes an instance again."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields


def _instance(children: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    instance: Any = object.__new__(kind)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(instance, name, child)
    return instance


pytree.register_pytree_node(
    _Fields,
    lambda node: (list(node.fields.values()), (node.kind, tuple(node.fields))),
    _instance,
)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _opened(leaf: Any) -> Any:
    if _is_size(leaf):
        return _Size(leaf)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    values = {each.name: getattr(leaf, each.name) for each in dataclasses.fields(leaf)}
    return _Fields(type(leaf), {name: _all_opened(v) for name, v in values.items()})


def _all_opened(value: Any) -> Any:
    return pytree.tree_map(_opened, value, is_leaf=_is_size)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of `value`, and what unflatten() needs to make the like of it."""
    return pytree.tree_flatten(_all_opened(value))


def with_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with what the function makes of its tensors."""
    return pytree.tree_map_only(Tensor, function, value, is_leaf=_is_size)


unflatten = pytree.tree_unflatten


def dumps(spec: pytree.TreeSpec) -> str:
    """For a file. Raises NotImplementedError for types that only their own program knows."""
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise NotImplementedError(
            "torch_blocked::save: expected tuples, lists and dicts as arguments and results, got "
            "types of the program's own; take and return one of these to save the model"
        ) from error


loads = pytree.treespec_loads
