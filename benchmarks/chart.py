"""Draws docs/peers.svg, the picture of the table of peers in the repository's README.md.

python benchmarks/chart.py"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from engines import ENGINES

from torch_blocked.bench import plot

FOLDER = Path(__file__).parent
PICTURE = FOLDER.parent / "docs" / "peers.svg"
PAGE = FOLDER.parent / "README.md"
HEADER = "| model | best peer | its ms | ours, ms | faster |"  # of the table that is drawn
TITLE = "Speed at batch 1 on two threads, best peer = 1 (to the right is faster)"
OURS = [name for name, engine in ENGINES.items() if engine.ours]


def times_of_page(page: str) -> dict[str, dict[str, float]]:
    """Milliseconds by model and engine, of the table below HEADER: the best peer's and ours."""
    _, _, *rows = page[page.index(HEADER) :].split("\n\n")[0].splitlines()
    cells = ([cell.strip(" *") for cell in line.strip("| ").split("|")] for line in rows)
    return {
        model: {peer: float(its_ms), "torch_blocked": float(ours)}
        for model, peer, its_ms, ours, _ in cells
        if peer in ENGINES
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
    PICTURE.write_text(draw(TITLE, times_of_page(PAGE.read_text())))
