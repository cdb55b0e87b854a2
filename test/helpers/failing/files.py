"""Calls for files that fail, one after the other, while a model is saved, loaded, or optimized with
the files that are kept between processes. The last line of the output is a report: which calls
there are, how many cases ran, and the faults.

Usage: python -m helpers.failing.files <scenario> <step>; only every step-th case is tried.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torch_blocked as tb

from .. import isolated
from . import ALL_CALLS, ERRORS, Calls, import_once
from .scenarios import image, net

SECONDS = 300
calls = Calls()
# Of each time that calls were armed: their names, and whether one failed.
armed: list[tuple[list[str], bool]] = []


class Case(NamedTuple):
    """The calls that fail: `times` of them, from that of number `first`; 0: none."""

    first: int
    times: int
    error: str


def quietly_optimized(seed: int = 0, tune: bool = False) -> Any:
    model = net()
    with torch.no_grad():
        for each in model.parameters():
            each += seed
        return tb.optimize(model, image(), tune=tune, verify=tune)


def result_of(fast: Any) -> torch.Tensor:
    with torch.no_grad():
        return fast(image())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def failing_call(folder: Path, case: Case, work: Callable[[], Any]) -> tuple[Any, str]:
    """What `work` returns, and what is wrong with how it ended."""
    before = open_files()
    result, wrong = None, ""
    try:
        with calls.files_fail(folder, case.first, case.times, ERRORS[case.error]):
            result = work()
    except (OSError, ValueError, RuntimeError) as error:
        result = error
        clear = isinstance(error, OSError) or "torch_blocked::" in str(error)
        wrong = "" if clear else f"{type(error).__name__}: {str(error)[:200]}"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"
    armed.append((calls.names, calls.fired))
    if open_files() != before:
        wrong += f"; {open_files() - before} files are open"
    return result, wrong


def saved(folder: Path, case: Case) -> list[str]:
    """The older file stays, or the new one is complete. A save with no error has made the new."""
    older, newer, path = quietly_optimized(0), quietly_optimized(1), folder / "model.pt"
    older.save(path)
    content, wanted = path.read_bytes(), result_of(newer)
    raised, wrong = failing_call(folder, case, lambda: newer.save(path))
    faults = [wrong]
    if os.listdir(folder) != ["model.pt"]:
        faults.append(f"other files are left: {os.listdir(folder)}")
    is_new = path.exists() and path.read_bytes() != content
    if is_new and not torch.equal(result_of(tb.load(path)), wanted):
        faults.append("a file that is neither the older nor the newer")
    if not is_new and raised is None:
        faults.append("no error, and the older file")
    newer.save(path)
    if not torch.equal(result_of(tb.load(path)), wanted):
        faults.append("another result of a later file")
    return faults


def saved_to_file(folder: Path, case: Case) -> list[str]:
    """The same for a file that the caller has opened."""
    fast = quietly_optimized()

    def save() -> None:
        with open(folder / "model.pt", "wb") as file:
            fast.save(file)

    raised, wrong = failing_call(folder, case, save)
    if raised is None and not torch.equal(result_of(tb.load(folder / "model.pt")), result_of(fast)):
        wrong += "; no error, and a file with another result"
    return [wrong]


def loaded(folder: Path, case: Case) -> list[str]:
    fast, path = quietly_optimized(), folder / "model.pt"
    fast.save(path)
    content, wanted = path.read_bytes(), result_of(fast)
    result, wrong = failing_call(folder, case, lambda: tb.load(path))
    faults = [wrong]
    if not isinstance(result, Exception | None) and not torch.equal(result_of(result), wanted):
        faults.append("no error, and another result")
    if path.read_bytes() != content or not torch.equal(result_of(tb.load(path)), wanted):
        faults.append("another result of a later load")
    return faults


def kept(folder: Path, case: Case, known: bool = False) -> list[str]:
    """Files that are optional: nobody hears of an error, now or later."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    expected = net()(image()).detach()
    if known:
        quietly_optimized(0, tune=True)
    faults = []
    for number in range(3):

        def work() -> torch.Tensor:
            fast = quietly_optimized(0, tune=True)
            tb.env()
            return result_of(fast)

        none = Case(0, 0, case.error)
        result, wrong = failing_call(folder, case if number == 0 else none, work)
        if isinstance(result, Exception):
            wrong += f"; an error of an optional file: {result!r}"
        elif result is not None and not torch.allclose(result, expected, atol=1e-4):
            wrong += "; another result"
        faults.append(wrong and f"run {number}: {wrong}")
    return faults


def kept_before(folder: Path, case: Case) -> list[str]:
    return kept(folder, case, known=True)


SCENARIOS = {each.__name__: each for each in (saved, saved_to_file, loaded, kept, kept_before)}


def tried(name: str, case: Case) -> tuple[list[str], bool, list[str], list[str]]:
    """The calls, whether one failed, the faults, and what is imported. It is a child's work."""
    armed.clear()
    folder = Path(tempfile.mkdtemp())
    try:
        faults = [each for each in SCENARIOS[name](folder, case) if each]
    finally:
        shutil.rmtree(folder)
    return *armed[0], faults, [*sys.modules]


def cases(names: list[str]) -> list[Case]:
    """Each call fails alone, and with all later ones: a disk stays full. Half of the work is what
    only a read or a write can do."""
    return [
        Case(number, times, error)
        for number, name in enumerate(names, 1)
        for times in (1, ALL_CALLS)
        for error in ERRORS
        if error != "short" or "read" in name or "write" in name
    ]


def report(name: str, step: int) -> dict[str, Any]:
    none = Case(0, 0, "full")
    told = isolated.alone(lambda case, _: tried(name, case), none, SECONDS).value
    assert isinstance(told, tuple) and not told[2], told
    names = told[0]
    import_once(told[3])
    some = cases(names)[::step]
    unmet, found = 0, []
    # A process keeps the times that it measured, so each case of these files is in a new one.
    at_once = 1 if name.startswith("kept") else len(some)
    for outcome in isolated.run(
        lambda case, _: tried(name, case), some, limit=SECONDS, at_once=at_once
    ):
        case = f"{outcome.case.error} from call {outcome.case.first} ("
        case += f"{names[outcome.case.first - 1]}), {outcome.case.times} times"
        if not isinstance(outcome.value, tuple):
            found.append(f"{case}: {outcome.death or outcome.value}")
            continue
        unmet += not outcome.value[1]
        found += [f"{case}: {each}" for each in outcome.value[2]]
    return {"calls": names, "tried": len(some), "unmet": unmet, "faults": found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]))))
