"""Searches for inputs that break a target, led by the code that they reach.

    python test/fuzz/fuzz.py --minutes 30
    python test/fuzz/fuzz.py --minutes 5 --only saved raw
    python test/fuzz/fuzz.py --only saved --replay test/fuzz/found/saved-crash-...

It begins from test/fuzz/corpus. New inputs go to build/fuzz/corpus, and what fails goes to
test/fuzz/found with what the process said. Exit status 1 if anything was found."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fuzz_targets
from fuzz_targets import BY_NAME, FOUND, GROWN, TARGETS, Target

MOST_CRASHES = 5  # then a target ends: it would find the same again
MOST_FILES, MOST_BYTES = 30, 4096  # of a kept corpus, and of a file there
_SLACK = 600  # seconds for the start of a process and for its end, on a busy machine


@dataclass
class Row:
    target: Target
    runs: int = 0
    coverage: int = 0
    crashes: int = 0
    seconds: float = 0

    def __str__(self) -> str:
        size = sum(1 for _ in (GROWN / self.target.name).iterdir())
        return (
            f"{self.target.name:12}{self.runs:10}{self.coverage:10}{size:8}{self.crashes:9}"
            f"{self.seconds:8.0f} s"
        )


HEAD = f"{'target':12}{'runs':>10}{'coverage':>10}{'corpus':>8}{'crashes':>9}{'time':>10}"


def largest(pattern: str, text: str) -> int:
    return max(map(int, re.findall(pattern, text)), default=0)


def fuzzed(target: Target, seconds: float) -> Row:
    """Starts the fuzzer again after each crash, until the time is over."""
    row, start = Row(target), time.monotonic()
    grown = GROWN / target.name
    for folder in (grown, FOUND, target.corpus):
        folder.mkdir(parents=True, exist_ok=True)
    while row.crashes < MOST_CRASHES:
        left = int(seconds - (time.monotonic() - start))
        if left < 1:
            break
        options = [f"-max_total_time={left}", str(grown), str(target.corpus)]
        said, status = output_of(target.fuzz(options), left + _SLACK)
        row.runs += largest(r"number_of_executed_units: (\d+)", said) or largest(r"^#(\d+)", said)
        row.coverage = max(row.coverage, largest(r"\bcov: (\d+)", said))
        if status == 0:
            break
        row.crashes += 1
        note_crash(target, said)
    row.seconds = time.monotonic() - start
    return row


def output_of(command: list[str], limit: float) -> tuple[str, int]:
    try:
        done = fuzz_targets.run_command(command, limit)
    except subprocess.TimeoutExpired as late:
        said = late.stderr or b""
        text = said if isinstance(said, str) else said.decode(errors="replace")
        return f"{text}\nno end in {limit:.0f} s\n", 1
    return done.stdout + done.stderr, done.returncode


def note_crash(target: Target, said: str) -> None:
    """Prints the end of what it said, and keeps it beside the input."""
    written = re.findall(r"Test unit written to (.+)", said)
    name = Path(written[-1]).name if written else f"{target.name}-without-input"
    words = "\n".join(
        line for line in said.splitlines() if not line.startswith(("#", "[W", "INFO:"))
    )
    (FOUND / f"{name}.txt").write_text(words[-20000:])
    print(f"{target.name}: {FOUND / name}\n{words[-2500:]}", flush=True)


def keep(target: Target) -> None:
    """Adds to the kept corpus what reaches code that it does not reach. If that is too much, some
    of it, large inputs and small ones."""
    merged = GROWN / f"{target.name}.merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir()
    for each in target.corpus.iterdir():
        shutil.copy(each, merged)
    folders = [str(merged), str(GROWN / target.name)]
    said, status = output_of(target.fuzz(["-set_cover_merge=1", *folders]), 1800)
    if status:
        raise SystemExit(f"fuzz: the corpus of {target.name} is not merged:\n{said[-2000:]}")
    kept = {each.name for each in target.corpus.iterdir()}
    new = [each for each in merged.iterdir() if each.name not in kept]
    new = [each for each in new if each.stat().st_size <= MOST_BYTES]
    new = sorted(new, key=size_of, reverse=True)
    room = max(0, MOST_FILES - len(kept))
    step = max(1, -(-len(new) // room)) if room else len(new) + 1
    for each in new[::step] if room else []:
        shutil.copy(each, target.corpus)
    print(f"{target.name}: {len(list(target.corpus.iterdir()))} files are kept", flush=True)


def size_of(path: Path) -> int:
    return path.stat().st_size


def replayed(target: Target, files: list[Path]) -> int:
    done = fuzz_targets.run_command(target.replay(files))
    print(done.stdout + done.stderr, end="")
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="for all targets together")
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--keep", action="store_true", help="add what is new to the corpus")
    parser.add_argument("--replay", nargs="+", type=Path, help="run these files, and no others")
    options = parser.parse_args()
    chosen = [each for each in TARGETS if each.name in options.only]
    if options.replay:
        files = [each.resolve() for each in options.replay]
        return int(any([replayed(each, files) for each in chosen]))
    GROWN.mkdir(parents=True, exist_ok=True)
    rows = []
    for target in chosen:
        rows.append(fuzzed(target, 60 * options.minutes / len(chosen)))
        print(HEAD, rows[-1], sep="\n", flush=True)
    if options.keep:
        for target in chosen:
            keep(target)
    print("", HEAD, *rows, sep="\n")
    return int(any(row.crashes for row in rows))


if __name__ == "__main__":
    sys.exit(main())
