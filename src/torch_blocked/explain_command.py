"""`python -m torch_blocked explain MODEL`: the layers of a model on the terminal and as files."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torch_blocked.bench import models
from torch_blocked.bench.arguments import (
    add_batch,
    add_models,
    add_threads,
    output_path,
)
from torch_blocked.bench.report import progress
from torch_blocked.explain import explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Says of each layer whether it is blocked, what it costs, and why."
    add_models(parser)
    add_batch(parser, 1)
    add_threads(parser)
    parser.add_argument("--html", type=output_path, metavar="PATH", help="write a page to look at")
    parser.add_argument("--json", type=output_path, metavar="PATH", help="write it all as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in args.models:
        progress(f"explain: {name}")
        model = models.load(name, args.input)
        explained = explain(model.module, model.checked_inputs(args.batch))
        explained.name = name
        progress()
        print(explained.table())
        if args.html:
            explained.to_html(_of_one(args.html, name, args.models))
        if args.json:
            _of_one(args.json, name, args.models).write_text(explained.to_json())
    return 0


def _of_one(path: Path, name: str, names: list[str]) -> Path:
    """The file for one model. With several models its name becomes part of the file's."""
    if len(names) == 1:
        return path
    return path.with_stem(f"{path.stem}_{name.replace(':', '_')}")
