"""Writes all tables as text: plans, profiles and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Sequence

Row = Sequence[str]


def padded(rows: Sequence[Row], alignment: str) -> list[list[str]]:
    """The rows with cells of equal width in each column: "l" to the left, "r" to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(alignment))]
    return [
        [
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, alignment, strict=True)
        ]
        for row in rows
    ]


def columns(header: Row, rows: Sequence[Row], alignment: str) -> str:
    """Columns two spaces apart, for a terminal."""
    return "\n".join("  ".join(row).rstrip() for row in padded([header, *rows], alignment))


def markdown(header: Row, rows: Sequence[Row], text_columns: int = 1) -> str:
    """A Markdown table, aligned as text too: the first `text_columns` left, the others right."""
    alignment = "l" * text_columns + "r" * (len(header) - text_columns)
    first, *others = padded([header, *rows], alignment)
    rules = [
        "-" * (len(cell) + 2) if side == "l" else "-" * (len(cell) + 1) + ":"
        for cell, side in zip(first, alignment, strict=True)
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (first, *others)]
    return "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])


def written(text: str, path: str | os.PathLike[str] | None) -> str:
    """`text`, which is also written to a file if a path is given."""
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text
