"""Requests for memory that fail, one site after the other, while a scenario runs.

A site is a place in our code, or in torch's allocator of tensors, that asks for memory. Children of
one process try many sites each; the next child goes on where one dies. The last line of the output
is a report: how many sites there are, how many cases ran, how many met no request, and the faults.

Usage: python -m helpers.failing.memory <scenario> <step> [-v]; only every step-th case is tried;
with -v it prints each case.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

import torch_blocked as tb
from torch_blocked import _C

from .. import isolated
from . import Calls, import_once
from .scenarios import SCENARIOS, Values

# Exceptions that may reach the caller. No other kind says that memory is missing.
ALLOWED = (MemoryError, RuntimeError)
WARM_UP = 4  # runs until all caches are full
REPEATS = 4  # of a run after which more lives than before
MOST_CALLS = 24  # of torch's allocator, whose only site gives the memory of every tensor
SECONDS = 300  # without an answer, a case counts as hung

# Where pybind11 registers an object that Python has just made, it catches nothing. A refusal there
# ends the process or loses the object, whoever's module it is.
BEYOND_US = re.compile(r"^(void )?pybind11::(detail::register_instance|class_<.*>::init_instance)")

calls = Calls()


class Case(NamedTuple):
    """The request that fails: the call of this number at this site. `first`: in the first run of
    the process, where what is made only once is made."""

    site: int
    call: int
    first: bool


@dataclass
class Counted:
    """What a scenario gives, and its sites with the number of their calls: in the first run of a
    process and in later ones. `modules`: what it imports."""

    expected: list[Any]
    modules: list[str]
    first: dict[int, int]
    later: dict[int, int]


def plain(values: Values) -> list[Any]:
    return [each.numpy().copy() if isinstance(each, torch.Tensor) else each for each in values]


def agree(values: list[Any], expected: list[Any]) -> bool:
    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, str) or isinstance(b, str):
            return a == b
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-4)

    return len(values) == len(expected) and all(map(alike, values, expected))


def live() -> dict[int, int]:
    """Blocks by site that neither a cache nor garbage holds."""
    gc.collect()
    tb.clear_packed_weights()
    _C.release_pool()
    if "torch._dynamo" in sys.modules:  # it keeps what runs in parts
        torch._dynamo.reset()
        gc.collect()
    return calls.live()


def grown(now: dict[int, int], before: dict[int, int]) -> Counter[int]:
    return Counter(now) - Counter(before)  # only what is more than 0


def prepared(name: str) -> Callable[[], list[Any]]:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    run = SCENARIOS[name]()
    return lambda: plain(run())


def count(name: str, _: Any) -> Counted:
    run = prepared(name)
    calls.count_anew()
    run()
    first = calls.counted()
    for _ in range(WARM_UP):
        run()
    live()
    calls.count_anew()
    expected = run()
    return Counted(expected, [*sys.modules], first, calls.counted())


class Child:
    """What a child knows after its first case: a scenario with full caches, and what lives then."""

    run: Callable[[], list[Any]] | None = None
    before: dict[int, int] = {}


def warm_run(name: str) -> Callable[[], list[Any]]:
    if Child.run is None:
        Child.run = prepared(name)
        for _ in range(WARM_UP):
            Child.run()
        Child.before = live()
    return Child.run


def failing_run(run: Callable[[], list[Any]], case: Case, expected: list[Any]) -> str:
    """Runs while the case's request fails. What is wrong with what comes, or ""."""
    unraisable: list[Any] = []
    sys.unraisablehook = lambda ignored: unraisable.append(repr(ignored.exc_value))
    try:
        with calls.memory_fails(case.site, case.call):
            values = run()
    except ALLOWED as error:
        said = str(error).strip()
        if not said:
            return f"{type(error).__name__} without a word"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    else:
        if not agree(values, expected):
            return "no exception, and other values"
    gc.collect()
    return f"an exception that nobody gets: {unraisable}" if unraisable else ""


def leak(run: Callable[[], list[Any]], case: Case, expected: list[Any]) -> str:
    """What is lost each time. What is lost now and then is a cache that grew: for one, which layers
    are timed depends on the times of others."""
    now = live()
    lost = grown(now, Child.before)
    for _ in range(REPEATS):
        if not lost:
            break
        failing_run(run, case, expected)
        run()
        before, now = now, live()
        lost &= grown(now, before)
    Child.before = now
    return (
        f"lost each time: {[(*calls.place(site), n) for site, n in lost.items()]}" if lost else ""
    )


def try_case(name: str, case: Case, expected: list[Any]) -> tuple[bool, str]:
    """Whether a request failed, and what is wrong then."""
    run = prepared(name) if case.first else warm_run(name)
    wrong = failing_run(run, case, expected)
    fired = calls.fired
    try:
        if not agree(run(), expected):
            wrong += "; then other values"
    except Exception as error:
        wrong += f"; then {type(error).__name__}: {error}"
    if not wrong and not case.first:
        wrong = leak(run, case, expected)
    return fired, wrong


def cases(counted: Counted) -> list[Case]:
    found = [Case(site, 1, False) for site in sorted(counted.later)]
    found += [
        Case(site, call, False)
        for site, n in counted.later.items()
        if calls.place(site)[0] == 1
        for call in range(2, min(n, MOST_CALLS) + 1)
    ]
    return found + [Case(site, 1, True) for site in sorted(counted.first.keys() - counted.later)]


def is_beyond_us(site: str, wrong: str) -> bool:
    return bool(BEYOND_US.match(site)) and wrong.startswith(("SIGABRT", "lost each time"))


def named(case: Case) -> str:
    """The function that a site is in, and the address after its call."""
    library, at = calls.place(case.site)
    if library:
        return f"tensor memory, call {case.call}"
    tool = ["addr2line", "-f", "-C", "-e", _C.__file__, hex(at - 1)]
    plain_environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    told = subprocess.run(tool, capture_output=True, text=True, env=plain_environment)
    function = told.stdout.partition("\n")[0]
    return f"{function} +{at:#x}{', first run' if case.first else ''}"


def report(name: str, step: int) -> dict[str, Any]:
    counted = isolated.alone(count, name, SECONDS).value
    assert isinstance(counted, Counted), counted
    import_once(counted.modules)
    every = cases(counted)
    # A child for each case of a first run, one for as many others as it survives.
    parts = [[each] for each in every[::step] if each.first]
    parts.append([each for each in every[::step] if not each.first])
    faults, unmet = [], 0
    for part in parts:
        for outcome in isolated.run(
            lambda case, _: try_case(name, case, counted.expected),
            part,
            limit=SECONDS,
            at_once=len(part) or 1,
            quiet="-v" not in sys.argv,
        ):
            known = type(outcome.value) is tuple
            fired, wrong = outcome.value if known else (True, outcome.value)
            unmet += not fired
            if wrong or outcome.death:
                faults.append((named(outcome.case), outcome.death or wrong))
            if "-v" in sys.argv:
                print(named(outcome.case), fired, outcome.death or wrong, flush=True)
    kinds = Counter("first" if each.first else "later" for each in every)
    ours = [each for each in faults if not is_beyond_us(*each)]
    return {"sites": kinds, "tried": len(every[::step]), "unmet": unmet, "faults": ours}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    calls.watch(_C.__file__)
    gc.freeze()
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]))))
