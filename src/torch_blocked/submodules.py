"""Optimizes the modules of a model that can be captured, if the model as a whole cannot: the
backbone and the heads of a detector, say, between which Python decides on values.

The model itself runs. During its call, in the calling thread, an optimized module runs the forward
of each such module. In other threads, and between calls, the modules are as they were. Dynamo would
cut the model where Python decides, but it traces all of that Python again for new sizes, which
takes minutes for some detectors."""

from __future__ import annotations

import copy
import enum
import functools
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_blocked import forks
from torch_blocked.captured import CONSTANTS
from torch_blocked.judgement import judgement_of
from torch_blocked.optimized_module import OptimizedModule
from torch_blocked.state import version_of

# Parts are worth it if they hold this share of the model's layers, and this many each on average: a
# single layer has nothing to fuse with.
_SHARE, _LAYERS = 0.75, 8
# A part is planned for its first four sizes when they come, and for others when they come a second
# time. The number of boxes that a detector finds differs from call to call.
_AT_ONCE, _KNOWN = 4, 4096
# How often a part is captured again because its module has changed.
_CHANGES = 3

# Attributes that every module has.
_OWN = nn.Module().__dict__.keys() - {"training"} | {"forward"}
# Types of values that cannot change unnoticed.
_FIXED = (
    *CONSTANTS,
    torch.layout,
    torch.memory_format,
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    functools.partial,
)
_CONTAINERS = (list, tuple, set, frozenset, dict)


@dataclass
class _Part:
    """A captured module, and its state at the capture, which it must still have."""

    path: str
    optimized: OptimizedModule
    guards: list[tuple[dict[str, Any], str, Any]]
    weights: list[tuple[dict[str, Any], str, Any, int]]
    taken: set[Any] = field(default_factory=set)
    met: set[Any] = field(default_factory=set)

    def holds(self) -> bool:
        """Whether the module is as it was captured: its attributes, parts and weights."""
        return all(
            (now := attributes.get(name, _Part)) is value
            or (type(now) is type(value) and not isinstance(now, Tensor) and now == value)
            for attributes, name, value in self.guards
        ) and all(
            of.get(name) is value and (value is None or version_of(value) == version)
            for of, name, value, version in self.weights
        )

    def plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it has a plan for arguments like these, or should make one."""
        call = self.optimized._call(args, kwargs)
        key = call.signature, call.inputs.key
        if key in self.taken:
            return True
        # Under deterministic algorithms the first call must give the same bits as the next.
        at_once = len(self.taken) < _AT_ONCE or torch.are_deterministic_algorithms_enabled()
        if at_once or key in self.met:
            if len(self.taken) == _KNOWN:
                self.taken.clear()
            self.taken.add(key)
            return True
        if len(self.met) == _KNOWN:
            self.met.clear()
        self.met.add(key)
        return False


class _Running(threading.local):
    def __init__(self) -> None:
        self.of: Submodules | None = None
        self.handed: Counter[nn.Module] = Counter()  # the part of _handed by this thread


_running = _Running()
_lock = forks.lock()
_handed: Counter[nn.Module] = Counter()


@contextmanager
def _handing(modules: Iterable[nn.Module], to: Submodules | None) -> Iterator[None]:
    """Inside, `to` runs the forwards of these modules in this thread."""
    modules = list(modules)
    with _lock:
        for module in modules:
            _handed[module] += 1
            _running.handed[module] += 1
            module.__dict__["forward"] = functools.partial(_forward, module)
    try:
        with _run_by(to):
            yield
    finally:
        with _lock:
            for module in modules:
                _handed[module] -= 1
                _running.handed[module] -= 1
            _take_back(modules)


def _take_back(modules: Iterable[nn.Module]) -> None:
    """Restores the modules whose forwards no thread hands over any more."""
    for module in modules:
        if not _handed[module]:
            module.__dict__.pop("forward", None)
            del _handed[module]
        if not _running.handed[module]:
            del _running.handed[module]


@forks.in_children
def _forget_other_threads() -> None:
    for module in list(_handed):
        _handed[module] = _running.handed[module]
    _take_back(list(_handed))


@contextmanager
def _run_by(owner: Submodules | None) -> Iterator[None]:
    before, _running.of = _running.of, owner
    try:
        yield
    finally:
        _running.of = before


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _running.of is None:
        return type(module).forward(module, *args, **kwargs)
    return _running.of._run(module, args, kwargs)


class Submodules:
    """The largest modules of a model that can be captured, found in its first run."""

    def __init__(self, model: nn.Module, make: Callable[..., OptimizedModule]) -> None:
        """make: makes an OptimizedModule from a module and its path."""
        self._model, self._make = model, make
        self._paths = {module: name for name, module in model.named_modules() if name}
        self._parts: dict[nn.Module, _Part | None] = {}  # None: it cannot be captured
        self._changes: Counter[nn.Module] = Counter()
        self._searches = True
        self._lock = forks.lock()

    def parts(self) -> list[tuple[str, OptimizedModule]]:
        """The parts that were found, with their paths in the model."""
        found = list(self._parts.values())  # at once, because another thread may add one
        return [(each.path, each.optimized) for each in found if each]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward. The first call searches for parts."""
        if not self._searches:
            with _handing([each for each, part in self._parts.items() if part], self):
                return self._model(*args, **kwargs)
        with self._lock:
            candidates = [each for each in self._paths if _is_candidate(each)]
            with _handing(candidates, self):
                results = self._model(*args, **kwargs)
            self._searches = False
        return results

    def are_worth_it(self) -> bool:
        """Whether the parts hold most of the model, in large pieces."""
        parts = [module for module, part in self._parts.items() if part]
        held = {layer for module in parts for layer in _layers(module)}
        enough = len(held) >= _SHARE * len(_layers(self._model))
        return bool(parts) and enough and len(held) >= _LAYERS * len(parts)

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part = self._part_for(module, args, kwargs)
        if part is None:  # perhaps a module inside it can be captured
            return type(module).forward(module, *args, **kwargs)
        with _run_by(None):
            if _are_plain(args, kwargs) and part.plans(args, kwargs):
                return part.optimized(*args, **kwargs)
            return type(module).forward(module, *args, **kwargs)

    def _part_for(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Part | None:
        part = self._parts.get(module)
        if part is None and (module in self._parts or not self._searches):
            return None
        if part is not None and part.holds():
            return part
        with self._lock:
            self._changes[module] += 1
            tries = self._changes[module] <= _CHANGES
            with _run_by(None):
                found = self._captured(module, args, kwargs) if tries else None
            self._parts[module] = found
            return found

    def _captured(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Part | None:
        if not _are_plain(args, kwargs) or not all(_is_plain(each) for each in module.modules()):
            return None
        path = self._paths[module]
        optimized = self._make(module, path=path)
        part = _Part(path, optimized, *_guards(module))
        try:
            optimized._prepare(args, kwargs)
        except Exception:  # after any error the module itself runs
            return None
        ran, optimized._ran = optimized._ran, None
        if ran is not None:
            call = optimized._call(args, kwargs)
            if judgement_of(optimized, call, ran.results, optimized(*args, **kwargs)).what:
                return None
        return part if optimized.choice == "blocked" else None


def _layers(module: nn.Module) -> set[nn.Module]:
    """The modules that have parameters of their own."""
    return {each for each in module.modules() if any(True for _ in each.parameters(recurse=False))}


def _is_candidate(module: nn.Module) -> bool:
    """Whether another module can run its forward, and it has parameters to compute with."""
    return (
        type(module).__call__ is nn.Module.__call__
        and "forward" not in module.__dict__
        and not isinstance(module, torch.jit.ScriptModule)
        and any(True for _ in module.parameters())
    )


def _are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no argument hides tensors, and all tensors are of kinds that kernels read."""
    return all(
        each.layout == torch.strided and not each.is_meta and not each.is_quantized
        if type(each) in (Tensor, nn.Parameter)
        else isinstance(each, CONSTANTS)
        for each in pytree.tree_leaves((args, kwargs))
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing that the forward reads can change unnoticed (_Part.holds), and no hooks are
    set. A tensor that is neither parameter nor buffer may be a result of another module."""
    if isinstance(module, torch.jit.ScriptModule) or module._forward_hooks:
        return False
    if module._forward_pre_hooks:
        return False
    return all(_is_fixed(each) for name, each in module.__dict__.items() if name not in _OWN)


def _is_fixed(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        held = value.values() if isinstance(value, dict) else value
        return all(_is_fixed(each) for each in held)
    return isinstance(value, _FIXED)


def _guards(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """The values that _Part.holds compares: attributes and submodules, and weights with their
    versions."""
    guards: list[Any] = []
    weights: list[Any] = []
    for each in module.modules():
        for name, value in each.__dict__.items():
            if name not in _OWN:
                guards.append((each.__dict__, name, _copied(value)))
        guards += [(each._modules, name, part) for name, part in each._modules.items()]
        for of in (each._parameters, each._buffers):
            weights += [(of, name, t, 0 if t is None else version_of(t)) for name, t in of.items()]
    return guards, weights


def _copied(value: Any) -> Any:
    """A copy of a container with its contents, so that a change of them shows."""
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value
