"""What a forward may change besides its results: attributes of modules, and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

_CONTAINERS = (dict, list, set)


class Changes:
    """Names of the attributes and buffers that are not what they were."""

    def __init__(self, attributes: set[str], buffers: set[str]) -> None:
        self.attributes, self.buffers = attributes, buffers

    def __bool__(self) -> bool:
        return bool(self.attributes or self.buffers)

    def first(self) -> str:
        return sorted(self.attributes or self.buffers)[0]


class State:
    """A snapshot of a model: which objects its attributes and their containers hold, and the values
    of its buffers (batch norm writes into them unseen). Parameters are not copied; writes to them
    pass the dispatcher, and the recorder puts them back."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(each, _copied(each.__dict__)) for each in _python_modules(model)]
        self._buffers = [
            (name, each, each.detach().clone())
            for name, each in model.named_buffers()
            if each.layout == torch.strided and not each.is_meta
        ]

    def changes(self) -> Changes:
        attributes = {
            f"{type(module).__name__}.{name}"
            for module, before in self._modules
            for name in before.keys() | module.__dict__.keys()
            if not _same(module.__dict__.get(name, self), before.get(name, self))
            and not _is_derived(module, name)
        }
        buffers = {name for name, now, before in self._buffers if not _equal(now, before)}
        return Changes(attributes, buffers)

    def restore(self) -> None:
        """Puts all back."""
        for module, before in self._modules:
            for name in module.__dict__.keys() - before.keys():
                del module.__dict__[name]
            for name, (value, content) in before.items():
                module.__dict__[name] = value
                if content is not None and not _same_content(value, content):
                    _refill(value, content)
        for _, now, values in self._buffers:
            if not _equal(now, values):
                now.copy_(values)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back what a run of the model changes in it."""
    state = State(model)
    try:
        yield
    finally:
        state.restore()


def _python_modules(model: nn.Module) -> list[nn.Module]:
    kinds = (torch.jit.ScriptModule, fx.GraphModule)  # compile themselves when first called
    return [each for each in model.modules() if not isinstance(each, kinds)]


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each value, and what it holds if it is a container."""
    return {
        name: (value, value.copy() if isinstance(value, _CONTAINERS) else None)
        for name, value in attributes.items()
    }


def _same(now: Any, before: Any) -> bool:
    if not isinstance(before, tuple):
        return False  # new or gone
    value, content = before
    if now is value:
        return content is None or _same_content(now, content)
    plain = (int, float, bool, str, tuple, type(None))
    return type(now) is type(value) and isinstance(now, plain) and now == value


def _same_content(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in before and before[key] is value for key, value in now.items())
    if isinstance(now, set):
        return bool(now == before)
    return all(a is b for a, b in zip(now, before, strict=True))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _equal(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape:
        return False
    same = now == before
    return bool(same.all()) or bool((same | (now != now) & (before != before)).all())


def _is_derived(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch's own sets the attribute, as torch.nn.utils.weight_norm does."""
    return any(
        getattr(hook, "name", None) == name and type(hook).__module__.startswith("torch.")
        for hook in module._forward_pre_hooks.values()
    )
