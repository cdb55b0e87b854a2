"""The state that a forward may change: attributes of modules, and buffers."""

from __future__ import annotations

import collections
import enum
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torch_blocked import _C

_TREES = (dict, list, tuple)
# Attributes in which nn.Module keeps parameters, buffers and modules, which have their own paths.
_OF_TORCH = {"_parameters", "_buffers", "_modules"}
# The most containers and objects in a snapshot, and the most items in one of them.
_MOST, _MOST_ITEMS = 10_000, 10_000
_PLAIN = (int, float, bool, str, type(None))
# Objects of these packages hold no state that belongs to a model.
_OTHER_PACKAGES = sys.stdlib_module_names | {"torch", "numpy"}


class Changes:
    """Names of the attributes and buffers that have changed."""

    def __init__(self, attributes: set[str], buffers: set[str]) -> None:
        self.attributes, self.buffers = attributes, buffers

    def __bool__(self) -> bool:
        return bool(self.attributes or self.buffers)

    def first(self) -> str:
        return sorted(self.attributes or self.buffers)[0]


class State:
    """A snapshot of a model: the contents of its attributes, and of containers and objects in
    these; the values of its buffers and of tensors in attributes (batch norm writes into buffers
    unseen); attributes of scripts (csrc/graph/capture/script_state.h). Parameters are not copied;
    writes to them pass the dispatcher, and the recorder puts them back.

    Only a second run reveals state elsewhere, as in closures and globals (capture.py)."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(each, dict(vars(each))) for each in _python_modules(model)]
        self._held = list(itertools.islice(_held_by(self._modules), _MOST))
        self._tensors = [
            (name, each, each.detach().clone())
            for name, each in _tensors_in(self._modules, self._held)
        ]
        self._buffers = [
            (name, each, each.detach().clone())
            for name, each in model.named_buffers()
            if _has_values(each)
        ]
        self._scripts = [(each.original_name, _C.ScriptState(each._c)) for each in _scripts(model)]

    def changes(self) -> Changes:
        attributes = {
            f"{type(module).__name__}.{name}"
            for module, before in self._modules
            for name in before.keys() | vars(module).keys()
            if not _same(vars(module).get(name, self), before.get(name, self))
            and not _is_derived(module, name)
        }
        attributes |= {name for name, each, before in self._held if _content(each) != before}
        attributes |= {name for name, now, before in self._tensors if not _equal(now, before)}
        for name, script in self._scripts:
            attributes |= {f"{name}.{each}" for each in script.changes()}
        buffers = {name for name, now, before in self._buffers if not _equal(now, before)}
        return Changes(attributes, buffers)

    def restore(self) -> None:
        """Puts everything back."""
        for module, before in self._modules:
            for name in vars(module).keys() - before.keys():
                del module.__dict__[name]
            module.__dict__.update(before)
        for _, each, content in self._held:
            if _content(each) != content:
                content.put_into(each)
        for _, now, values in (*self._tensors, *self._buffers):
            if not _equal(now, values):
                now.copy_(values)
        for _, script in self._scripts:
            script.restore()


class _Content:
    """The items that a container or an object held. Two are equal if their items are: the same
    objects, or equal plain values."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Content) or len(self.items) != len(other.items):
            return False
        if isinstance(self.items, dict):
            mine, its = self.items, other.items
            return mine.keys() == its.keys() and all(_same(mine[key], its[key]) for key in its)
        if isinstance(self.items, set):
            return bool(self.items == other.items)
        return all(map(_same, self.items, other.items))

    def put_into(self, holder: Any) -> None:
        if isinstance(holder, (list, collections.deque)):
            holder.clear()
            holder.extend(self.items)
        elif isinstance(holder, (dict, set)):
            holder.clear()
            holder.update(self.items)
        else:
            for name in _content(holder).items.keys() - self.items.keys():
                object.__delattr__(holder, name)
            for name, value in self.items.items():
                object.__setattr__(holder, name, value)


_Attributes = list[tuple[nn.Module, dict[str, Any]]]
_Held = tuple[str, Any, _Content]  # the attribute's name, the container or object, and its items


def _content(holder: Any) -> _Content:
    if isinstance(holder, (list, collections.deque)):
        return _Content(list(holder))
    if isinstance(holder, (dict, set)):
        return _Content(dict(holder) if isinstance(holder, dict) else set(holder))
    slots = [
        name for kind in type(holder).__mro__ for name in _names(vars(kind).get("__slots__", ()))
    ]
    items = {name: getattr(holder, name) for name in slots if hasattr(holder, name)}
    items.pop("__dict__", None)
    items.pop("__weakref__", None)
    return _Content(items | getattr(holder, "__dict__", {}))


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _holds(value: Any) -> bool:
    """Whether it is a container, or an object of a class of the program's own."""
    if isinstance(value, (dict, list, set, collections.deque)):
        return len(value) <= _MOST_ITEMS
    others = (Tensor, nn.Module, type, types.ModuleType, enum.Enum)
    if isinstance(value, others) or callable(value):
        return False
    package = type(value).__module__.partition(".")[0]
    has_attributes = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return has_attributes and package not in _OTHER_PACKAGES


def _held_by(
    modules: list[tuple[nn.Module, dict[str, Any]]],
) -> Iterator[tuple[str, Any, _Content]]:
    """The containers and objects that attributes lead to, each once, by the attribute's name."""
    seen: set[int] = set()
    for module, attributes in modules:
        for name, value in attributes.items():
            left = [value]
            while left:
                each = left.pop()
                if isinstance(each, tuple):
                    left.extend(each)
                elif id(each) not in seen and _holds(each):
                    seen.add(id(each))
                    content = _content(each)
                    yield f"{type(module).__name__}.{name}", each, content
                    items = content.items
                    left.extend(items.values() if isinstance(items, dict) else items)


def _tensors_in(modules: _Attributes, held: list[_Held]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes and in the containers and objects there, without parameters and
    buffers."""
    seen: set[int] = set()
    torchs = {
        id(attributes[name]) for _, attributes in modules for name in _OF_TORCH & attributes.keys()
    }
    own = [
        (f"{type(module).__name__}.{name}", value)
        for module, attributes in modules
        for name, value in attributes.items()
    ]
    inner = [
        (name, value)
        for name, each, content in held
        if id(each) not in torchs
        for value in (content.items.values() if isinstance(content.items, dict) else content.items)
    ]
    for name, value in (*own, *inner):
        for each in value if isinstance(value, tuple) else (value,):
            is_own = isinstance(each, Tensor) and not isinstance(each, nn.Parameter)
            if is_own and id(each) not in seen and type(each) is Tensor and _has_values(each):
                seen.add(id(each))
                yield name, each


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def _scripts(model: nn.Module) -> list[torch.jit.ScriptModule]:
    """The scripts that no other script contains."""
    scripts = [each for each in model.modules() if isinstance(each, torch.jit.ScriptModule)]
    inner = {id(part) for each in scripts for part in list(each.modules())[1:]}
    return [each for each in scripts if id(each) not in inner]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by their paths, then the tensors in attributes of modules, also in
    lists, tuples and dicts."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OF_TORCH:
                continue
            for leaf in pytree.tree_leaves(value) if isinstance(value, _TREES) else [value]:
                if isinstance(leaf, Tensor):
                    yield f"{path}.{name}".removeprefix("."), leaf


def check_devices(op: str, model: nn.Module) -> None:
    """Raises TypeError if a tensor of the model is not in the memory of the CPU."""
    for name, tensor in named_tensors(model):
        if tensor.device.type != "cpu":
            meta = "it has no values: load the weights into a model on the CPU"
            raise TypeError(
                f"torch_blocked::{op}: expected a model in the memory of the CPU, got {name} on "
                f"{tensor.device}; {meta if tensor.is_meta else 'move it by model.cpu()'}"
            )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undoes, at the end, the changes that a run makes to the model."""
    state = State(model)
    try:
        yield
    finally:
        state.restore()


def _python_modules(model: nn.Module) -> list[nn.Module]:
    kinds = (torch.jit.ScriptModule, fx.GraphModule)  # compile themselves when first called
    return [each for each in model.modules() if not isinstance(each, kinds)]


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    return isinstance(now, _PLAIN) and now == before


def _equal(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape:
        return False
    same = now == before
    return bool(same.all()) or bool((same | (now != now) & (before != before)).all())


def _is_derived(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch sets the attribute, as torch.nn.utils.weight_norm does."""
    return any(
        getattr(hook, "name", None) == name and type(hook).__module__.startswith("torch.")
        for hook in module._forward_pre_hooks.values()
    )


def version_of(tensor: Tensor) -> int:
    """A tensor's count of writes. torch counts none for tensors made under
    torch.inference_mode()."""
    return 0 if tensor.is_inference() else tensor._version
