"""Which module of a model runs, by its path in the model: "layer1.0.conv2".

Known only while somebody asks (a profile, strict mode, a capture): then torch's hooks for all
modules are installed; else nothing is. The outermost module that a thread calls is the model, whose
own path is empty. A module that runs a second time within one call of the model is called as torch
calls it, "conv@1", and the third time "conv@2"."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as hooks

from torch_blocked import _C, forks

# Code in these folders is not the user's, nor is what they write and run.
_NOT_THE_USERS = (
    *(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, __file__)),
    "<contract of ",
    "<eval_with_key>",
    "<frozen ",
)
# What Dynamo puts before the path of a module: "L['self'].layer1".
_PREFIX = re.compile(r"^L\['\w+'\]\.?")
# What Dynamo calls a module that lies on Python's stack where a graph begins.
_ON_STACK = re.compile(r"^L\['___stack\d+'\]")
# What torch.compile calls the module that it wraps.
_COMPILED = "_orig_mod"


# The frame of every module that runs.
_CALL = nn.Module._call_impl.__code__


class _Running(threading.local):
    """The modules that this thread is in, the model first, with their paths and what they are shown
    as; and how often each path was called since the model was."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, str, str]] = []
        self.places: list[int] = []  # of those which a profile was told of (_C.trace_enter)
        self.calls: Counter[str] = Counter()


class _Asks(threading.local):
    """How often this thread asks."""

    count = 0


_running = _Running()
_asks = _Asks()
_lock = forks.lock()
_askers = 0
_installed = ExitStack()

# What torch.compile's wrapper of a module says when it is called and there are hooks for all
# modules. Ours count the wrapper as the module in it (_path_of), so nobody need know.
_ABOUT_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


@contextmanager
def from_here() -> Iterator[None]:
    """Paths of what this thread calls inside begin anew: the next module is a model."""
    before = _running.__dict__.copy()
    _running.__init__()  # type: ignore[misc]
    try:
        yield
    finally:
        _running.__dict__.update(before)


@contextmanager
def known() -> Iterator[None]:
    """While it lasts, current() tells the path of what runs, in every thread. A model that runs
    already when it begins stays unknown."""
    global _askers
    with _lock:
        _asks.count += 1
        _askers += 1
        if _askers == 1:
            _handing_ns()  # measured without ours
            if not hooks._has_any_global_hook():
                _ignore_while_installed(_ABOUT_HOOKS)
            for handle in (
                hooks.register_module_forward_pre_hook(_enter),
                hooks.register_module_forward_hook(_leave, always_call=True),
            ):
                _installed.callback(handle.remove)
    try:
        yield
    finally:
        with _lock:
            _asks.count -= 1
            _askers -= 1
            if not _askers:
                _installed.close()


@forks.in_children
def _forget_other_askers() -> None:
    global _askers
    _askers = _asks.count
    if not _askers:
        _installed.close()


def _ignore_while_installed(message: str) -> None:
    warnings.filterwarnings("ignore", message)
    added = warnings.filters[0]

    def remove() -> None:
        with suppress(ValueError):  # it is gone if catch_warnings() ended meanwhile
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    _installed.callback(remove)


def current() -> str:
    """The path of the module that this thread runs; "" in the model itself, and outside of it."""
    return _running.modules[-1][2] if _running.modules else ""


class _Place(nn.Module):
    """Stands for a module whose code runs without it."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line


@contextmanager
def entered(path: str, line: str) -> Iterator[None]:
    """Lets place() be this, for code that was taken out of its module."""
    stack, places = _running.modules, _running.places
    stack.append((_Place(line), path, path))
    places.append(_C.trace_enter("", path))
    try:
        yield
    finally:
        stack.pop()
        _C.trace_leave(places.pop())


def user_line() -> str:
    """The line of code outside of torch and of this package that runs: "model.py:12", with the
    file's whole path; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def here() -> str:
    """What a sentence says of where it happens: " in layer1.0.conv2 (model.py:12)". From Python's
    frames, so that it is known though nobody has asked before."""
    path, line = by_frames(), user_line()
    return (f" in {path}" if path else "") + (f" ({line})" if line else "")


def by_frames() -> str:
    """The path of the module whose forward runs, as current() tells it, less how often it did."""
    modules = _of_frames()
    with from_here():
        for module in modules:
            _push(module)
        return _running.modules[-1][1] if modules else ""


def parts_by_frames() -> dict[str, str]:
    """The path from it of each module in the module whose forward runs, by what of_node() gets of
    a module: its id."""
    modules = _of_frames()
    return {str(id(each)): name for name, each in modules[-1].named_modules()} if modules else {}


def _of_frames() -> list[nn.Module]:
    """The modules whose forwards run in this thread, the model first."""
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules[::-1]


def place() -> tuple[str, str]:
    """current() and user_line(), or what entered() says."""
    told = _running.modules[-1][0] if _running.modules else None
    if isinstance(told, fx.GraphModule):
        within = _of_graph(told)
        return ".".join(filter(None, (current(), within))), user_line()
    return current(), told.line if isinstance(told, _Place) else user_line()


def _of_graph(module: fx.GraphModule) -> str:
    """Which module a line of a graph's code, which runs, was in before the graph was made of it, as
    torch.export tells: from `module`, or "" if the graph does not say."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_locals.get("self") is not module:
        frame = frame.f_back
    # The innermost frame of the module is that of its code.
    lines: dict[int, int | None] = getattr(module, "_lineno_map", None) or {}
    if frame is None or not frame.f_code.co_filename.startswith("<eval_with_key>"):
        return ""
    index = lines.get(frame.f_lineno - getattr(module, "_prologue_start", 0))
    nodes = list(module.graph.nodes)
    if index is None or index >= len(nodes):
        return ""
    return of_node(nodes[index].meta.get("nn_module_stack"))


def of_node(
    stack: dict[str, tuple[str, Any]] | None, parts: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The path that a node of torch.export or torch.compile says in its "nn_module_stack".
    parts: as of parts_by_frames(), for modules that Dynamo found on the stack."""
    if not stack:
        return ""
    key, (path, _) = next(reversed(stack.items()))
    name, again, count = key.partition("@")
    if _ON_STACK.match(path) and name in parts:
        return parts[name] + again + count
    return _PREFIX.sub("", path) + again + count


def line_of_node(trace: str | None) -> str:
    """As user_line(), of the "stack_trace" of such a node."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace or "")
    own = [each for each in lines if not each[0].startswith(_NOT_THE_USERS)]
    return ":".join(own[-1]) if own else ""


@cache
def _handing_ns() -> int:
    """What torch takes to call a module with hooks for all modules, beyond what the hooks do."""
    module = nn.Identity()

    def fastest() -> int:
        rounds, calls = 8, 40
        times = []
        for _ in range(rounds):
            begin = time.perf_counter_ns()
            for _ in range(calls):
                module(None)
            times.append(time.perf_counter_ns() - begin)
        return min(times) // calls

    alone = fastest()
    with ExitStack() as empty:
        for handle in (
            hooks.register_module_forward_pre_hook(lambda *_: None),
            hooks.register_module_forward_hook(lambda *_: None, always_call=True),
        ):
            empty.callback(handle.remove)
        return max(0, fastest() - alone)


def _enter(module: nn.Module, _inputs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # it is traced, not run; the nodes of the trace know their modules
    since = time.perf_counter_ns() - _handing_ns()
    _push(module)
    shown = _running.modules[-1][2]
    _running.places.append(_C.trace_enter(type(module).__name__, shown, since))


def _push(module: nn.Module) -> None:
    """The module runs now, in the one that ran."""
    stack = _running.modules
    if not stack:
        _running.calls.clear()
        stack.append((module, "", ""))
    elif (path := _path_of(module)) is None:
        stack.append((module, *stack[-1][1:]))
    else:
        count = _running.calls[path]
        _running.calls[path] += 1
        stack.append((module, path, f"{path}@{count}" if count else path))


def _leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    at = time.perf_counter_ns()
    stack, places = _running.modules, _running.places
    # One that entered before known() began is not here, and those above it never left: a hook
    # raised.
    if any(each is module for each, _, _ in stack):
        while stack.pop()[0] is not module:
            places.pop()
        _C.trace_leave(places.pop(), at)


def _path_of(module: nn.Module) -> str | None:
    """From the module that calls it, if it is a part of that; else from the model. None if it is no
    part of either, or torch.compile's wrapper of the caller: then it counts as the caller."""
    stack = _running.modules
    (caller, path, _), (model, _, _) = stack[-1], stack[0]
    for name, child in caller._modules.items():
        if child is module:
            return f"{path}.{name}".strip(".") if name != _COMPILED else None
    for parent, before in ((caller, path), (model, "")):
        for name, each in parent.named_modules():
            if each is module and name:
                return f"{before}.{name.removeprefix(_COMPILED + '.')}".strip(".")
    return None
