"""Changed files of saved models: what load() makes of them.

    python test/random/fuzz_files.py --files 20000 --seed 1
    python test/random/fuzz_files.py --seed-only 4711

Three in four are changed in their data, under a checksum that fits, one in four in their bytes
(random_files.py). Loading one must raise ValueError of load()'s own words, or give a model that can
be called once: a result, or an exception. No signal, no time without an answer, no file that
appears beside, no other exception from load().
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

for _library in ("OMP", "MKL"):  # a team of threads made before a fork would be waited for after it
    os.environ[f"{_library}_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_BLOCKED_CHECK", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import isolated  # noqa: E402
from random_files import World, outcome, write_files  # noqa: E402

# Seconds without an answer: of a case that waits for a core while others work, too.
LIMIT = 600


@dataclass
class Case:
    seed: int
    files: list[Path]
    folder: Path  # where nothing may appear


_worlds: list[World] = []


def check(case: Case, note) -> str:
    """In a process for some hundred of them."""
    if not _worlds:
        note("the beginning")
        os.chdir(case.folder)
        _worlds.append(World(case.files))
    content, said = _worlds[0].changed(case.seed)
    note(said)
    what = outcome(content)
    return what if is_right(what) else f"{what}\n  {said}"


def make_files(folder: Path) -> list[Path]:
    """In a process of its own: here no op may run before the others fork."""
    found = isolated.alone(lambda case, note: write_files(case), folder, limit=300)
    if not isinstance(found.value, list):
        raise RuntimeError(f"no files to change: {found.death or found.value}")
    return found.value


def is_right(what: str) -> bool:
    return re.match(r"(refused|loaded(, \w+)?)$", what) is not None


def run(seeds, jobs: int = 1, say=print) -> tuple[Counter, list[str]]:
    """How often what came of a file, and what is wrong."""
    counts: Counter = Counter()
    wrong: list[str] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_CACHE_HOME"] = str(Path(temporary) / "cache")
        folder = Path(temporary) / "folder"
        folder.mkdir()
        files = make_files(Path(temporary))
        cases = [Case(seed, files, folder) for seed in seeds]
        for found in isolated.run(check, cases, jobs=jobs, limit=LIMIT, at_once=400):
            what = found.death or str(found.value)
            counts[what.split(":")[0][:80]] += 1
            if not is_right(what):
                wrong.append(f"seed {found.case.seed}: {what}\n  {found.note}")
                say(wrong[-1])
            if counts.total() % 1000 == 0:
                taken = time.monotonic() - start
                say(f"{counts.total()} files, {len(wrong)} wrong, {taken:.0f} s")
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="the first one; default: a new one")
    parser.add_argument("--seed-only", type=int, help="this one alone")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    first, count = options.seed, options.files
    if options.seed_only is not None:
        first, count = options.seed_only, 1
    if first is None:
        first = random.SystemRandom().randrange(10**9)
    start = time.monotonic()
    seeds = range(first, first + count)
    counts, wrong = run(seeds, options.jobs, lambda text: print(text, flush=True))
    for what, times in counts.most_common():
        print(f"{times:7} {what}")
    taken = time.monotonic() - start
    print(f"{counts.total()} files from seed {first} on: {len(wrong)} wrong, {taken:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
