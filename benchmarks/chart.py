"""Speeds of engines as SVG: a row for each model, a mark for each engine, on a logarithmic axis on
which the best peer is 1."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from xml.sax.saxutils import escape

from engines import ENGINES

from torch_blocked.bench import plot

OURS = [name for name, engine in ENGINES.items() if engine.ours]
LABEL, RIGHT = 150, 30  # widths of a row's name, and of what is free on the right
ROW, TOP, AXIS = 24, 44, 26  # heights of a row, of the title with the legend, and of the axis


def speeds(times: Mapping[str, float], ours: Collection[str] = OURS) -> dict[str, float]:
    """Of each engine of a row, relative to the fastest that is not ours; none without such."""
    peers = [ms for engine, ms in times.items() if engine not in ours]
    return {engine: min(peers) / ms for engine, ms in times.items()} if peers else {}


def draw(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """rows: milliseconds by row and engine."""
    drawn = {name: speeds(times) for name, times in rows.items()}
    return marks(title, {name: row for name, row in drawn.items() if row}, OURS)


def marks(title: str, rows: Mapping[str, Mapping[str, float]], ours: Collection[str]) -> str:
    """rows: by name, the speed of each rival; 1 has a line of its own. ours: in bold colours.

    The axis is logarithmic: twice as fast is as far to the right as half as fast is to the left."""
    rivals = list(dict.fromkeys(rival for row in rows.values() for rival in row))
    looks = {rival: look for rival, look in zip(rivals, _looks(rivals, ours), strict=True)}
    speeds = [speed for row in rows.values() for speed in row.values()]
    low, high = _powers(speeds)
    parts = [f'<text class="title" x="8" y="17">{escape(title)}</text>', *plot.legend(looks)]
    bottom, right = TOP + ROW * len(rows), plot.WIDTH - RIGHT

    def x_of(speed: float) -> float:
        return LABEL + (math.log2(speed) - low) / (high - low) * (right - LABEL)

    for power in range(low, high + 1):
        x, kind = x_of(2**power), "one" if power == 0 else "line"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}">{2**power:g}x</text>')
    for index, (name, row) in enumerate(rows.items()):
        y = TOP + ROW * index + ROW / 2
        parts.append(f'<text class="name" x="{LABEL - 10}" y="{y + 4}">{escape(name)}</text>')
        parts.append(f'<line class="line" x1="{LABEL}" x2="{right}" y1="{y}" y2="{y}"/>')
        # Ours last, so that nothing lies over it.
        for rival in sorted(row, key=lambda rival: rival in ours):
            text = f"{name}, {rival}: {row[rival]:.2f}"
            parts.append(plot.mark(looks[rival], x_of(row[rival]), y, text))
    return plot.picture(title, parts, bottom + AXIS)


def _looks(rivals: list[str], ours: Collection[str]) -> list[tuple[str, str]]:
    """(shape, colour) of each rival."""
    looks, counts = [], [0, 0]
    for rival in rivals:
        mine = rival in ours
        colours = plot.OURS_COLOURS if mine else plot.COLOURS
        shape = plot.SHAPES[(counts[mine] + 3 * mine) % len(plot.SHAPES)]
        looks.append((shape, colours[counts[mine] % len(colours)]))
        counts[mine] += 1
    return looks


def _powers(speeds: list[float]) -> tuple[int, int]:
    """The powers of 2 between which all speeds lie, 1 among them."""
    low = min([0, *(math.floor(math.log2(speed)) for speed in speeds)])
    return low, max([low + 1, *(math.ceil(math.log2(speed)) for speed in speeds)])
