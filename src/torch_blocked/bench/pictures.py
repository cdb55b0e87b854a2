"""`python -m torch_blocked bench plot RESULTS.json PICTURE.svg`: the times of any benchmark's JSON,
each with its quartiles, or those of layers with what reorders take of them."""

from __future__ import annotations

import argparse
import json

from . import arguments, by_layer, time_bars


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
        args.picture.write_text(time_bars.draw(records))
    return 0
