"""Draws docs/peers.svg, the picture of the tables in README.md beside this file.

python benchmarks/chart.py"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from engines import ENGINES

from torch_blocked.bench import plot

FOLDER = Path(__file__).parent
PICTURE = FOLDER.parent / "docs" / "peers.svg"
HEADING = "\nTwo threads"  # of the table that is drawn
TITLE = "Speed at batch 1 on two threads, best peer = 1 (to the right is faster)"
OURS = [name for name, engine in ENGINES.items() if engine.ours]


def times_of_page(page: str) -> dict[str, dict[str, float]]:
    """Milliseconds by model and engine, of the table below HEADING."""
    lines = page[page.index(HEADING) :].split("\n\n")[1].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
    return {
        row[0]: {
            engine: float(cell.strip("*"))
            for engine, cell in zip(header, row, strict=False)
            if engine in ENGINES and cell not in ("-", "")
        }
        for row in rows
        if row[0] != "geometric mean"
    }


def speeds(times: Mapping[str, float], ours: Collection[str] = OURS) -> dict[str, float]:
    """Of each engine of a row, relative to the fastest that is not ours; none without such."""
    peers = [ms for engine, ms in times.items() if engine not in ours]
    return {engine: min(peers) / ms for engine, ms in times.items()} if peers else {}


def draw(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """rows: milliseconds by row and engine."""
    drawn = {name: speeds(times) for name, times in rows.items()}
    return plot.marks(title, {name: row for name, row in drawn.items() if row}, OURS)


if __name__ == "__main__":
    PICTURE.write_text(draw(TITLE, times_of_page((FOLDER / "README.md").read_text())))
