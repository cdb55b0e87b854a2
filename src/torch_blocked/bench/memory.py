"""`python -m torch_blocked bench memory MODEL...`: what a process holds that runs a model.

Each form runs in a process of its own, which builds or loads the model and runs it twice; then its
resident memory is read, Python, torch and all libraries included."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_blocked
from torch_blocked.text_table import markdown

from . import arguments, models
from .report import circumstances, describe, progress, write_json

Inputs = tuple[Tensor, ...]
Run = Callable[..., Any]


def dense(model: nn.Module, inputs: Inputs, path: str) -> Run:
    return model


def optimized(model: nn.Module, inputs: Inputs, path: str) -> Run:
    fast = torch_blocked.optimize(model, inputs)
    fast.choice = "blocked"
    return fast


def released(model: nn.Module, inputs: Inputs, path: str) -> Run:
    fast = optimized(model, inputs, path)
    fast.release()
    return fast


def saved(model: nn.Module, inputs: Inputs, path: str) -> Run:
    fast = optimized(model, inputs, path)
    fast.save(path)
    return fast


def loaded(model: nn.Module, inputs: Inputs, path: str) -> Run:
    fast = torch_blocked.load(path)
    fast.release()
    return fast


# In this order: `saved` writes the file that `loaded` reads, and measures kernels for all.
FORMS: dict[str, Callable[[nn.Module, Inputs, str], Run]] = {
    "torch": dense,
    "optimize, save": saved,
    "optimize": optimized,
    "optimize, release": released,
    "load, release": loaded,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    arguments.add_models(parser)
    parser.description = "Tells the resident memory of processes that run a model."
    arguments.add_threads(parser)
    arguments.add_outputs(parser, csv=False)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    threads = args.threads or torch.get_num_threads()
    results = []
    for name in args.models:
        models.load(name, args.input).checked_inputs(1)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model")
            mib = {form: in_process(form, name, args.input, threads, path) for form in FORMS}
        results += [
            {"model": name, "form": form, "rss_mib": each, "of_torch": each / mib["torch"]}
            for form, each in mib.items()
        ]
    context = circumstances(dtype="float32", batch=1) | {"threads": threads}
    print(describe(context, "float32", "batch 1"), end="\n\n")
    rows = [
        (each["model"], each["form"], f"{each['rss_mib']:.0f}", f"{each['of_torch']:.2f}x")
        for each in results
    ]
    print(markdown(("model", "form", "MiB", "of torch"), rows, text_columns=2))
    if args.json:
        write_json(args.json, context, results)
    return 0


def in_process(form: str, name: str, input_dims: Any, threads: int, path: str) -> float:
    """Resident MiB of a new process that has run the form of the model."""
    progress(f"{name}: {form}")
    job = (form, name, input_dims, threads, path)
    code = f"from torch_blocked.bench import memory; memory.child{job}"
    result = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    progress()
    return json.loads(result.stdout)


def child(form: str, name: str, input_dims: Any, threads: int, path: str) -> None:
    torch.set_num_threads(threads)
    model = models.load(name, input_dims)
    inputs = model.random_inputs(1)
    module = model.module
    del model
    with torch.no_grad():
        run = FORMS[form](module, inputs, path)
        del module
        for _ in range(2):
            run(*inputs)
    gc.collect()
    print(resident_mib())


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("bench memory: expected VmRSS in /proc/self/status; run it on Linux")
