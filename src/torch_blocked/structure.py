"""Arguments and results as leaves and a spec, by pytree. Dataclasses are nodes too."""

from __future__ import annotations

import builtins
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _Size:
    """A node that becomes a torch.Size again; pytree itself would make a tuple of it."""

    def __init__(self, sizes: Iterable[Any]) -> None:
        self.sizes = list(sizes)


pytree.register_pytree_node(
    _Size,
    lambda node: (node.sizes, None),
    lambda children, _: torch.Size(children),
    serialized_type_name="torch_blocked.Size",
)


class _Fields:
    """The fields of a dataclass instance, as a node that becomes an instance again."""

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
    """The leaves of `value`, and the spec from which unflatten() makes the same structure."""
    return pytree.tree_flatten(_all_opened(value))


def with_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with the function's results in place of its tensors."""
    return pytree.tree_map_only(Tensor, function, value, is_leaf=_is_size)


unflatten = pytree.tree_unflatten


def dumps(spec: pytree.TreeSpec) -> str:
    """The spec as text for a file. Raises NotImplementedError for types of the program's own."""
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise NotImplementedError(
            "torch_blocked::save: expected tuples, lists and dicts as arguments and results, got "
            "types of the program's own; take and return one of these to save the model"
        ) from error


def loads(text: str) -> pytree.TreeSpec:
    """The spec that dumps() was given. Raises an exception for any other text.

    pytree imports modules that the text names, and takes objects from them. Here it may only take
    enums that are imported already, and Python's own types as the factory of a defaultdict."""
    for record in _records(json.loads(text)):
        if "__enum__" in record and not _is_enum(record["fqn"]):
            raise ValueError(f"the enum {record['fqn']}, which is not imported")
        if "default_factory_module" in record and not _is_builtin(record):
            raise ValueError(f"{record['default_factory_name']} as the factory of a defaultdict")
    spec = pytree.treespec_loads(text)
    unflatten([0] * spec.num_leaves, spec)  # raises if the names of fields fit no type
    return spec


def _records(value: Any) -> Iterator[dict[str, Any]]:
    """The dicts in decoded JSON, and in strings there that are JSON again."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return
        if isinstance(value, str):
            return
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value or ():
        if isinstance(each, (dict, list, str)):
            yield from _records(each)


def _is_enum(name: str) -> bool:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return isinstance(found, type) and issubclass(found, Enum)


def _is_builtin(record: dict[str, Any]) -> bool:
    kind = vars(builtins).get(record["default_factory_name"])
    return record["default_factory_module"] == "builtins" and isinstance(kind, type)
