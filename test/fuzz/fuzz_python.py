"""Fuzzes a target in Python with atheris, which counts the lines of torch_blocked that an input
reaches: python test/fuzz/fuzz_python.py saved [options of libFuzzer]"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

try:
    import atheris
except ImportError as error:
    raise SystemExit(
        "fuzz: expected atheris to fuzz Python, got none; install the dependency group: "
        "pip install --group fuzz"
    ) from error

with atheris.instrument_imports(include=["torch_blocked"]):
    import torch_blocked  # noqa: F401

from fuzz_targets import GROWN, module_of  # noqa: E402


def main() -> None:
    name, *options = sys.argv[1:]
    GROWN.mkdir(parents=True, exist_ok=True)
    target = module_of(name)
    target.prepare()

    def run(content: bytes) -> None:
        try:
            target.run(content)
        except BaseException:
            traceback.print_exc()
            # A signal: the libraries that torch brings end an exit before the input is written.
            os.abort()

    atheris.Setup([str(launcher(name)), *options], run)
    atheris.Fuzz()


def launcher(name: str) -> Path:
    """A program of this target alone. To merge a corpus, libFuzzer starts itself by its name."""
    path = GROWN / f"{name}.sh"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{sys.argv[0]}" {name} "$@"\n')
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main()
