"""`python -m torch_blocked bench plot RESULTS.json PICTURE.svg`: the times of any benchmark's JSON,
each with its quartiles, or those of layers with what reorders take of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from . import arguments, by_layer, plot
from .report import WrongResult

# What a section of the picture is about, and what tells its bars apart.
SECTION = ("model", "layer", "batch", "threads")
BAR = ("engine", "op", "format", "mode", "implementation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    parser.description = (
        "Draws the times in a JSON file of a benchmark as SVG, with their spread; those of\n"
        "`bench layers` with what reorders take of them."
    )
    parser.add_argument("results", type=arguments.input_path, metavar="RESULTS.json")
    parser.add_argument("picture", type=arguments.output_path, metavar="PICTURE.svg")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns 0. Raises WrongResult for a file without timed rounds."""
    records = json.loads(args.results.read_text())["results"]
    if by_layer.are_rows(records):
        args.picture.write_text(by_layer.draw([by_layer.Row(**each) for each in records]))
    else:
        args.picture.write_text(draw(records))
    return 0


def draw(records: Iterable[dict[str, Any]]) -> str:
    """A section for each model (layer, batch, threads), a bar for each format or engine in it. The
    slowest of a section takes its whole width."""
    found: dict[str, list[plot.Bar]] = {}
    for record in records:
        if record.get("rounds_ms"):
            heading, name = (words(record, keys) for keys in (SECTION, BAR))
            found.setdefault(heading, []).append(plot.time_bar(name, record["rounds_ms"]))
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
