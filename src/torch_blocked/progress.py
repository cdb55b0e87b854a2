"""Progress bars on a terminal for work of more than two seconds; nothing in pipes and logs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

_Thing = TypeVar("_Thing")

DELAY_SECONDS = 2.0  # shorter work shows no bar


class Bar(tqdm):  # type: ignore[misc]  # without stubs
    """A line on a terminal that goes away at the end. Call `update()` when one of `total` is
    done."""

    monitor_interval = 0  # tqdm starts no monitor thread

    def __init__(self, what: str, total: int | None = None) -> None:
        super().__init__(
            desc=what,
            total=total,
            delay=DELAY_SECONDS,
            disable=None,  # off without a terminal
            leave=False,
            dynamic_ncols=True,
        )


def each(what: str, things: Sequence[_Thing]) -> Iterator[_Thing]:
    """Yields `things` one by one; a bar counts those that are done."""
    with Bar(what, len(things)) as bar:
        for thing in things:
            yield thing
            bar.update()


_of_thread = threading.local()


def tuning(problem: str) -> None:
    """The tuner times `problem` next; "": a plan is made."""
    bar = getattr(_of_thread, "bar", None)
    if not problem:
        if bar is not None:
            bar.close()
        _of_thread.bar = None
        return
    if bar is None:
        bar = _of_thread.bar = Bar("torch_blocked: timing kernels")
    bar.set_postfix_str(problem, refresh=False)
    bar.update()
