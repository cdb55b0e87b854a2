"""The circumstances of a run, its progress, and its results as JSON and CSV."""

from __future__ import annotations

import csv
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import torch_blocked


class WrongResult(RuntimeError):
    """What was to be timed gave a result that is not the model's."""


def circumstances(**others: Any) -> dict[str, Any]:
    """What holds for every result of a run, for JSON and CSV."""
    environment = torch_blocked.env()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": environment["cpu"],
        "isa": environment["isa"],
        "isa_limits": " ".join(f"{k}={v}" for k, v in environment["isa_limits"].items()),
        "threads": torch.get_num_threads(),
        "torch": environment["torch"],
        "onednn": environment["onednn"],
        "torch_blocked": environment["torch_blocked"],
        **others,
    }


def describe(c: dict[str, Any], *others: str) -> str:
    """The circumstances in a line."""
    isa = f"{c['isa']} by {c['isa_limits']}" if c["isa_limits"] else c["isa"]
    threads = f"{c['threads']} thread{'s' * (c['threads'] > 1)}, " if "threads" in c else ""
    return (
        f"{c['cpu']} ({isa}), {threads}torch {c['torch']}, "
        f"oneDNN {c['onednn']}, torch_blocked {c['torch_blocked']}, {c['date']}; "
        + ", ".join(others)
    )


def progress(text: str = "") -> None:
    """Shows on a terminal what is going on, in a line that the next call overwrites."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def write(args: Any, context: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """The files that --json and --csv name."""
    if args.json:
        write_json(args.json, context, records)
    if args.csv:
        write_csv(args.csv, context, records)


def write_json(path: Path, context: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """One object: `context` (what held for every result) and `results`, a list of flat objects."""
    path.write_text(json.dumps({"context": context, "results": results}, indent=2) + "\n")


def write_csv(path: Path, context: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """One line for each round of each result; context and summary are repeated on every line.

    Each result has a list `rounds_ms`; the columns `round` (from 0) and `ms` take its place."""
    lines = [
        {**context, **{key: flat(value) for key, value in result.items() if key != "rounds_ms"}}
        | {"round": i, "ms": ms}
        for result in results
        for i, ms in enumerate(result["rounds_ms"])
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def flat(value: Any) -> Any:
    """Dims as 1x3x224x224; anything else as it is."""
    return "x".join(map(str, value)) if isinstance(value, (list, tuple)) else value
