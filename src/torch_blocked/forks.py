"""Python's state in a child of fork() (in C++: csrc/runtime/fork.h).

The child has one thread, the one that forked. A lock that another thread held would stay held for
ever."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
_then: list[Callable[[], None]] = []


def lock() -> threading.RLock:
    """A lock that is free in a child of fork(), unless the forking thread holds it. The data that
    it guards must be consistent between any two lines, because a fork may come there."""
    made = threading.RLock()
    _locks.add(made)
    return made


def in_children(then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` in each child of fork(), where all locks are free."""
    _then.append(then)
    return then


def _begin_anew() -> None:
    for each in list(_locks):
        if not each._is_owned():  # type: ignore[attr-defined]
            each._at_fork_reinit()  # type: ignore[attr-defined]
    for then in _then:
        then()


os.register_at_fork(after_in_child=_begin_anew)
