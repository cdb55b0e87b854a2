"""Results as an aligned text table (which is also a Markdown table), as JSON and as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table with aligned columns: the first `text_columns` left, the others right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(aligned) + " |"

    rules = [
        "-" * (width + 2) if i < text_columns else "-" * (width + 1) + ":"
        for i, width in enumerate(widths)
    ]
    return "\n".join([line(header), "|" + "|".join(rules) + "|", *map(line, rows)])


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
