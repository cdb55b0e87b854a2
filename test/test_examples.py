"""The examples run and end well: each checks its results, and exits with 1 if they are wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parent.parent
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
