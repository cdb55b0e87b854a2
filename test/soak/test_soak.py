"""The soak runs, and reports what is planted: a wrong result, and memory, descriptors and modules
that are never given back. soak.py is the command; it runs for as long as wanted."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_isa

SOAK = Path(__file__).parent
# Within seconds memory is not flat: each thread still meets models for the first time.
SHORT = ["--minutes", "0.25", "--seed", "0", "--within"]

PLANTED = textwrap.dedent(
    """
    import os, sys, time
    sys.path.insert(0, sys.argv.pop(1))
    import soak
    import torch
    from soak_activities import ACTIVITIES, Activity, Live, optimized

    begin, kept, modules, right = time.monotonic(), [], [], Live.__call__

    def keeps_memory(caller):  # 12 MiB a second, whatever else the machine does
        while len(kept) < min(12 * (time.monotonic() - begin), 3000):
            kept.append(torch.ones(2**18))

    def keeps_a_descriptor(caller):
        if len(os.listdir("/proc/self/fd")) < 200:
            os.open(os.devnull, os.O_RDONLY)

    def keeps_modules(caller):
        if len(modules) < 3:
            modules.append(optimized(caller.place().known, 0))

    def is_wrong_at_times(self, x):
        y = right(self, x)
        return y * 1.1 if torch.rand(()) < 0.2 else y

    Live.__call__ = is_wrong_at_times
    ACTIVITIES["keep memory"] = Activity(keeps_memory, 10)
    ACTIVITIES["keep a descriptor"] = Activity(keeps_a_descriptor, 1)
    ACTIVITIES["keep modules"] = Activity(keeps_modules, 1)
    sys.exit(soak.run(sys.argv[1:]))
    """
)


def test_a_short_run_without_failures():
    done = subprocess.run(
        [sys.executable, str(SOAK / "soak.py"), *SHORT, "50"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    rows = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines()}
    for activity in ("call", "train", "eager op", "save and load", "release", "explain", "profile"):
        calls, _, wrong, errors = rows[activity]
        assert int(calls) > 0 and wrong == errors == "0"
    for child in ("fork", "fork and SIGINT", "spawn", "deterministic"):
        assert rows[child][0] == "0:", rows[child]
    for figure in ("resident, MiB", "allocated, MiB", "descriptors", "threads"):
        assert len(rows[figure]) == 3 and all(float(each) > 0 for each in rows[figure])
    assert "seed 0: 0 failures" in done.stdout


def test_what_is_planted_is_reported():
    command = [sys.executable, "-c", PLANTED, str(SOAK), *SHORT, "20"]
    done = subprocess.run(command, capture_output=True, text=True)
    failures = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert done.returncode == 1, done.stdout[-8000:] + done.stderr[-4000:]
    for words in (
        "wrong results of call",
        "resident memory grew by",
        "descriptors: ",
        "optimized modules are alive at last, 8 in use",
    ):
        assert any(words in each for each in failures), (words, failures)
    assert "the first of call: Wrong at soak_models.py" in done.stdout
    assert "allowed: 0.0" in done.stdout  # and its traceback says how far it was off


JUDGED = textwrap.dedent(
    """
    import signal, sys
    sys.path.insert(0, sys.argv[1])
    import soak  # noqa: F401  finds the helpers
    from soak_figures import Figures, Sample, growth

    def samples(resident, modules=8, descriptors=6):
        return [
            Sample(float(i), mib * 2**20, mib * 2**20, 0, 0, 1, modules, descriptors, 9)
            for i, mib in enumerate(resident)
        ]

    def failures(resident):
        return Figures(100.0, 2.0, samples=samples(resident)).failures()

    # What grows before the first tenth does not count, and one high sample is no slope.
    flat = [100 + 30 * (i < 10) * i for i in range(100)]
    assert failures(flat) == [], failures(flat)
    assert failures([500] * 98 + [540, 500]) == []
    assert failures([500 - i for i in range(100)]) == []  # less memory is no leak
    (grown,) = failures([500 + i // 5 for i in range(100)])
    assert grown.startswith("resident memory grew by "), grown
    assert abs(growth(samples([100 + i for i in range(3)]), "resident") - 200 / 101) < 1e-9

    some, more = samples([500] * 90), samples([500] * 100, modules=9, descriptors=7)
    assert Figures(100.0, 2.0, samples=some + more[90:]).failures() == [
        "descriptors: 6 after the first tenth of the time, 7 at last",
        "9 optimized modules are alive at last, 8 in use",
    ]
    figures = Figures(100.0, 2.0, samples=samples([500] * 80))
    figures.counts.ended("fork", -signal.SIGSEGV, "")
    figures.counts.ended("spawn", 0, "")
    try:
        raise ValueError("no")
    except ValueError as error:
        figures.counts.failed("call", error)
    figures.counts.signals["sent"] = 3
    assert figures.failures() == [
        "1 errors of call",
        "1 children of fork ended with signal 11",
        "no handler ran for 3 signals",
    ], figures.failures()
    """
)


def test_what_counts_as_a_failure():
    """Slopes, descriptors, ends of children, errors and signals, of figures made up."""
    done = subprocess.run([sys.executable, "-c", JUDGED, str(SOAK)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
