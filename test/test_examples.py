"""The examples run, and end well: each checks its own results and exits with 1 if they are wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "channels_last_1d": [],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    command = [sys.executable, f"examples/{name}.py", *EXAMPLES[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
