"""Runs a target in Python over files: python test/fuzz/replay.py saved FILE...

The process ends with the first input that fails, as it does in a fuzzer. Its name is the last one
that was printed."""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

from fuzz_targets import SECONDS, module_of

# A busy machine needs more for the first of them: torch loads what it has put off.
_FIRST = 60


def main() -> None:
    name, *files = sys.argv[1:]
    target = module_of(name)
    contents = [(file, Path(file).read_bytes()) for file in files]
    faulthandler.enable()
    target.prepare()
    seconds = _FIRST
    for file, content in contents:
        print(f"Running: {file}", file=sys.stderr, flush=True)
        signal.alarm(seconds)
        target.run(content)
        signal.alarm(0)
        seconds = 4 * SECONDS
    print(f"Executed {len(files)} inputs", file=sys.stderr)


if __name__ == "__main__":
    main()
