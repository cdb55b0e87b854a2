"""`python -m torch_blocked bench compare BEFORE.json AFTER.json`: two runs of one benchmark.

Each row is one measurement that both files hold. A ratio above 1 says that the second run was
faster. Its spread is that of the quartiles: the second's slowest quarter against the first's
fastest, and the other way round; where it holds 1, the runs do not tell them apart."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from typing import Any

from torch_blocked.text_table import markdown

from .arguments import input_path
from .measure import quartiles
from .report import WrongResult

Record = dict[str, Any]
# What tells the measurements of a file apart, in any of the benchmarks.
KEYS = ("model", "engine", "layer", "op", "format", "mode", "implementation", "batch", "threads")
# What may differ between two runs without being the reason for other times.
TOLD = ("cpu", "isa", "isa_limits", "torch", "onednn", "torch_blocked", "threads", "dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    parser.description = (
        "Compares the times in two JSON files of the same benchmark, with their spread."
    )
    parser.add_argument("before", type=input_path, metavar="BEFORE.json")
    parser.add_argument("after", type=input_path, metavar="AFTER.json")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns 0. Raises WrongResult for files that have nothing in common."""
    before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
    rows = compare(before["results"], after["results"])
    if not rows:
        raise WrongResult(f"{args.before} and {args.after} have no timed measurement in common")
    for key in TOLD:
        old, new = (report["context"].get(key) for report in (before, after))
        if old != new:
            print(f"{key}: {old} before, {new} after")
    keys = [key for key in KEYS if any(key in row for row in rows)]
    header = (*keys, "before ms", "after ms", "ratio", "spread", "")
    print(markdown(header, [cells(row, keys) for row in rows], len(keys)))
    mean = statistics.geometric_mean(row["ratio"] for row in rows)
    print(f"\ngeometric mean {mean:.3f}x of {len(rows)}; above 1 the second run is faster")
    return 0


def compare(before: Iterable[Record], after: Iterable[Record]) -> list[Record]:
    """The keys of each measurement of both, its medians, their ratio, and its low and high end."""
    old = {key_of(record): record for record in before if record.get("rounds_ms")}
    rows = []
    for record in after:
        key = key_of(record)
        if key not in old or not record.get("rounds_ms"):
            continue
        first, second = (quartiles(each["rounds_ms"]) for each in (old[key], record))
        rows.append(
            {
                **{name: record[name] for name in KEYS if name in record},
                "before_ms": first[1],
                "after_ms": second[1],
                "ratio": first[1] / second[1],
                "low": first[0] / second[2],
                "high": first[2] / second[0],
            }
        )
    return rows


def key_of(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(key) for key in KEYS)


def cells(row: Record, keys: list[str]) -> list[str]:
    verdict = "faster" if row["low"] > 1 else "slower" if row["high"] < 1 else "same"
    return [
        *(str(row.get(key, "")) for key in keys),
        f"{row['before_ms']:.3f}",
        f"{row['after_ms']:.3f}",
        f"{row['ratio']:.3f}x",
        f"{row['low']:.2f}-{row['high']:.2f}",
        verdict,
    ]
