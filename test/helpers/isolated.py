"""Work in forked processes, so that a signal ends a case and not the run.

The parent imports torch and forks before any op, on one thread: libgomp's threads do not survive a
fork. A child takes many cases, one after the other, and a new one takes over where one dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from typing import Any


@dataclass
class Outcome:
    """What a case gave: `value`, or how its process ended and what it was at then."""

    case: Any
    value: Any = None
    death: str = ""
    note: str = ""


class _Child:
    def __init__(self, work: Callable, cases: list, quiet: bool) -> None:
        self.cases = cases  # those not finished
        self.note = ""
        self.since = time.monotonic()
        self.pipe, end = Pipe()
        self.process = os.fork()
        if self.process == 0:
            self.pipe.close()  # or it waits for itself where the parent dies
            _serve(work, cases, end, quiet)
        end.close()

    def end(self) -> str:
        """Waits for the process; how it ended."""
        self.pipe.close()
        _, status = os.waitpid(self.process, 0)
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        return f"exit {os.WEXITSTATUS(status)}"


def _serve(work: Callable, cases: list, pipe, quiet: bool) -> None:
    """The child's life: it never returns."""
    try:
        if quiet:  # what a dying oneDNN or an allocator says is not the report
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 2)
        for case in cases:
            pipe.send(("note", ""))
            try:
                value = work(case, lambda note: pipe.send(("note", note)))
            except Exception:
                value = "the test itself failed:\n" + traceback.format_exc()
            pipe.send(("value", value))
    finally:
        os._exit(0)


def run(
    work: Callable,
    cases: list,
    *,
    jobs: int = 1,
    limit: float = 120,
    at_once: int = 200,
    quiet: bool = True,
) -> Iterator[Outcome]:
    """work(case, note) for each case, as they are done. `note` says what comes next, for the case
    that dies. limit: seconds without a word after which a process is ended."""
    waiting, children = list(cases), []
    try:
        while waiting or children:
            while waiting and len(children) < jobs:
                children.append(_Child(work, waiting[:at_once], quiet))
                del waiting[:at_once]
            ready = connection.wait([each.pipe for each in children], timeout=1.0)
            for child in list(children):
                if child.pipe in ready:
                    yield from _answers(child, children, waiting)
                elif time.monotonic() - child.since > limit:
                    os.kill(child.process, signal.SIGKILL)
                    child.end()
                    yield _give_back(child, children, waiting, f"no answer in {limit:.0f} s")
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process, signal.SIGKILL)
            child.end()


def _answers(child: _Child, children: list, waiting: list) -> Iterator[Outcome]:
    try:
        kind, content = child.pipe.recv()
    except (EOFError, ConnectionResetError):
        death = child.end()
        if child.cases:
            yield _give_back(child, children, waiting, death)
        else:
            children.remove(child)
        return
    child.since = time.monotonic()
    if kind == "note":
        child.note = content
    else:
        yield Outcome(child.cases.pop(0), content)


def _give_back(child: _Child, children: list, waiting: list, death: str) -> Outcome:
    children.remove(child)
    waiting[:0] = child.cases[1:]
    return Outcome(child.cases[0], None, death, child.note)


def alone(work: Callable, case: Any, limit: float = 60) -> Outcome:
    """One case in a process of its own."""
    return next(iter(run(work, [case], limit=limit)))
