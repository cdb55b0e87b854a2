"""Python and the commands of test/random in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from torch_blocked import environment


def python(code: str, *arguments: str, cwd: Path | None = None, **variables: str):
    """Runs the code in a process of its own, without what the suite set in the environment."""
    limits = {*environment.ISA_LIMITS, "ATEN_CPU_CAPABILITY"}
    inherited = {name: value for name, value in os.environ.items() if name not in limits}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=inherited | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def command(script: str, *arguments: str) -> str:
    """What the command of test/random prints; fails with it if that ends in an error."""
    path = Path(__file__).parents[1] / "random" / script
    ended = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_BLOCKED_CHECK": "1"},
    )
    assert ended.returncode == 0, ended.stdout[-20000:] + ended.stderr[-5000:]
    return ended.stdout
