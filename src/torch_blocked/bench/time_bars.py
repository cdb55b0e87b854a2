"""The times in the records of a benchmark as bars, each with its quartiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import plot
from .measure import quartiles
from .report import WrongResult

# What a section of the picture is about, and what tells its bars apart.
SECTION = ("model", "layer", "batch", "threads")
BAR = ("engine", "op", "format", "mode", "implementation")


def draw(records: Iterable[dict[str, Any]]) -> str:
    """A section for each model (layer, batch, threads), a bar for each format or engine in it. The
    slowest of a section takes its whole width. Records have the times of their rounds, or just
    quartiles."""
    found: dict[str, list[plot.Bar]] = {}
    for record in records:
        if record.get("rounds_ms") or "quartiles_ms" in record:
            heading, name = (words(record, keys) for keys in (SECTION, BAR))
            times = record.get("quartiles_ms") or quartiles(record["rounds_ms"])
            found.setdefault(heading, []).append(plot.time_bar(name, times))
    if not found:
        raise WrongResult("expected a file with timed rounds, got one without")
    sections = [
        plot.Section(heading, bars, max(bar.length for bar in bars))
        for heading, bars in found.items()
    ]
    return plot.bars("Time: median, first and third quartile", sections, plot.TIME)


def words(record: dict[str, Any], keys: Iterable[str]) -> str:
    """The record's values of these keys; numbers with their key: "resnet50, batch 8"."""
    values = [(key, record[key]) for key in keys if key in record]
    return ", ".join(f"{k} {v}" if isinstance(v, int) else str(v) for k, v in values)
