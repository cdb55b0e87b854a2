"""The examples run and end well: each checks its results, and exits with 1 if they are wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# What runs each one.
EXAMPLES = {
    "channels_last_1d": [],
    "distributed": TORCHRUN,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    command = [sys.executable, *EXAMPLES[name], f"examples/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wrong_results_are_told_by_the_exit_status():
    """Although the processes leave without the interpreter's clean-up."""
    code = """
import sys
sys.path.insert(0, "examples")
import distributed
distributed.TOLERANCE = -1.0
distributed.leave(distributed.main())
"""
    done = subprocess.run(
        [sys.executable, *TORCHRUN[:-1], "1", "--no-python", sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout.count("WRONG") == 2, done.stdout + done.stderr
