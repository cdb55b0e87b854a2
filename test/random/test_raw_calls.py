"""Raw ops with garbage arguments raise or compute. raw_calls.py makes the calls; as a command, more
of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import raw_calls
from helpers.draws import draws
from raw_calls import make_call

pytestmark = pytest.mark.any_isa

CALLS = draws("1000", "5000")
COMMAND = [sys.executable, str(Path(__file__).parent / "raw_calls.py")]


def test_no_call_ends_the_process():
    done = subprocess.run(
        [*COMMAND, "--calls", CALLS, "--seed", "0"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{CALLS} calls, 0 failures" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("raised")]
    assert set(row[0] for row in rows) == set(raw_calls.EXAMPLES)
    assert sum(int(row[1]) for row in rows) > int(CALLS) / 5, (
        "most calls are refused: that finds little"
    )
    assert all(int(row[3]) > int(CALLS) / 1000 for row in rows)


def test_calls_are_made_again_from_their_number():
    assert [str(make_call(7, index)) for index in range(50)] == [
        str(make_call(7, index)) for index in range(50)
    ]


def test_a_signal_and_a_hang_are_reported():
    code = """
import os, signal, time, raw_calls
raw_calls.SECONDS = 1
acts = {3: lambda: os.kill(os.getpid(), signal.SIGSEGV), 5: lambda: time.sleep(60)}
raw_calls.outcome_of = lambda call: acts.pop(call, lambda: None)() or (raw_calls.RAISED, None)

raw_calls.make_call = lambda seed, index: index
print(raw_calls.run(0, 8))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert "seed 0 call 3: SIGSEGV in 3" in done.stdout, done.stdout + done.stderr
    assert "seed 0 call 5: more than 1 s in 5" in done.stdout
    assert "6 calls, 2 failures" in done.stdout
