"""What the scripts in this folder share: options, cases in processes of their own, tables, JSON.

A script is a list of cases and what is special about them. Its `main(argv)` parses with `parser`,
measures, and hands its tables to `finish`, which prints them and writes --json in the form of the
files in results/. A case that needs a process of its own is a function `case(...)` of the script,
which `in_process` calls there."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_blocked.bench.arguments import output_path, positive, unknown
from torch_blocked.bench.packages import NoModel
from torch_blocked.bench.report import WrongResult, circumstances, describe
from torch_blocked.optimized_module import OptimizedModule
from torch_blocked.text_table import markdown

CASE = "--case"  # in front of the arguments of a case, as JSON


@dataclass(frozen=True)
class Table:
    """title: what the columns and rows have in common. Cells are as they are printed; the first
    `text_columns` columns are words, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    def data(self) -> dict[str, Any]:
        """As a file has it; "l" and "r" are the sides on which the cells of each column stand."""
        align = "l" * self.text_columns + "r" * (len(self.columns) - self.text_columns)
        rows = [list(row) for row in self.rows]
        return {"title": self.title, "columns": [*self.columns], "rows": rows, "align": align}


@contextlib.contextmanager
def bfloat16_everywhere() -> Iterator[None]:
    """dtype=torch.bfloat16 means all that has kernels, also where float32 is faster: for results
    that are to show what bfloat16 makes of them."""
    before, OptimizedModule._computes = OptimizedModule._computes, "narrow"
    try:
        yield
    finally:
        OptimizedModule._computes = before


class Failed(RuntimeError):
    """A case's process ended without an answer; the message is the last that it said."""


def numbers(text: str) -> list[int]:
    """Parses `1,2,4`."""
    return [positive(part) for part in text.split(",")]


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Parses `a,b,c` of known names."""

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(unknown("name", name, known))
        return list(dict.fromkeys(text.split(",")))

    return parse


def parser(
    doc: str | None,
    *,
    threads: int | list[int] | None = None,
    rounds: int | None = None,
    seconds: float | None = None,
    models: str = "",
) -> argparse.ArgumentParser:
    """With the options that scripts share. doc: the script's docstring. threads: the default; all
    that torch uses without one, and with a list the option takes several. rounds, seconds: defaults
    of options that exist where these are given. models: the help of the positional MODEL, of which
    there is one at least."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if models:
        made.add_argument("models", nargs="+", metavar="MODEL", help=models)
    made.add_argument(
        "--threads",
        type=numbers if isinstance(threads, list) else positive,
        default=threads or torch.get_num_threads(),
        help="default: %(default)s",
    )
    if rounds:
        made.add_argument("--rounds", type=positive, default=rounds, help="default: %(default)s")
    if seconds:
        made.add_argument("--seconds", type=float, default=seconds, help="of timing for a row")
    made.add_argument("--json", type=output_path, metavar="PATH", help="write tables and results")
    made.set_defaults(title=(doc or "").partition(".\n")[0].replace("\n", " "))
    return made


def in_process(script: str, *arguments: Any, env: Mapping[str, str] | None = None) -> Any:
    """What `case(*arguments)` of the script returns in a process of its own; both as JSON. Raises
    Failed. env: added to the environment."""
    done = subprocess.run(
        [sys.executable, script, CASE, json.dumps(arguments)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def on_cores(threads: int) -> dict[str, str]:
    """The environment of a process that computes with so many threads."""
    return {"OMP_NUM_THREADS": str(threads)}


def run(main: Callable[[], int], case: Callable[..., Any] | None = None) -> int:
    """The exit status of a script: of its case where the command line asks for one, else of main,
    with a sentence for models that are not there, results that are wrong, and cases that failed."""
    if case and sys.argv[1:2] == [CASE]:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what packages print must not reach the parent
        print(json.dumps(case(*json.loads(sys.argv[2]))), file=answers, flush=True)
        return 0
    try:
        return main()
    except (NoModel, WrongResult, Failed) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1


def progress(*cells: object) -> None:
    """A row on stderr, as soon as it is there."""
    print(*cells, file=sys.stderr, flush=True)


def finish(
    args: argparse.Namespace,
    tables: Sequence[Table],
    notes: Sequence[str] = (),
    results: Sequence[Mapping[str, Any]] = (),
    **others: Any,
) -> None:
    """Prints where and how it was measured, the tables and the notes, and writes --json. others:
    circumstances beside those of the machine."""
    context = circumstances() | {"threads": args.threads} | others
    words = [f"{key} {value}" for key, value in others.items()]
    if isinstance(args.threads, list):
        words.insert(0, f"threads {', '.join(map(str, args.threads))}")
        print(describe({key: each for key, each in context.items() if key != "threads"}, *words))
    else:
        print(describe(context, *words))
    for table in tables:
        title = [table.title] if table.title else []
        print("", *title, markdown(table.columns, table.rows, table.text_columns), sep="\n")
    if notes:
        print("", *notes, sep="\n")
    if args.json:
        write(args.json, args.title, context, tables, notes, results)


def write(
    path: Path,
    title: str,
    context: Mapping[str, Any],
    tables: Sequence[Table],
    notes: Sequence[str] = (),
    results: Sequence[Mapping[str, Any]] = (),
) -> None:
    """A file as those in results/: `results` has what `bench compare` and `bench plot` read."""
    command = f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip()
    report: dict[str, Any] = {
        "title": title,
        "context": {**context, "command": command},
        "tables": [table.data() for table in tables],
        "notes": list(notes),
    }
    path.write_text(text_of(report | ({"results": results} if results else {})))


def text_of(report: Mapping[str, Any]) -> str:
    """JSON with a line for each row of a table."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r",\n\s+", ", ", found[1]) + "]"


def speed(theirs: float | None, ours: float | None) -> str:
    """How many times as fast ours is."""
    return f"{theirs / ours:.2f}x" if theirs and ours else "-"


def mean_speed(words: str, ratios: Collection[float]) -> list[str]:
    """A sentence of speeds beside something, none without any."""
    if not ratios:
        return []
    mean, least = statistics.geometric_mean(ratios), min(ratios)
    return [f"{words}: geometric mean {mean:.2f}x, least {least:.2f}x"]
