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

import torch
from torch import Tensor

import torch_blocked

from .inference import INPUT_SEED, output_path, positive
from .models import MODELS, build_model
from .report import table, write_json

Run = Callable[[Tensor], Tensor]


def dense(name: str, input: Tensor, path: str) -> Run:
    return build_model(name)[0]


def optimized(name: str, input: Tensor, path: str) -> Run:
    fast = torch_blocked.optimize(build_model(name)[0], input)
    fast.choice = "blocked"
    return fast


def released(name: str, input: Tensor, path: str) -> Run:
    fast = optimized(name, input, path)
    fast.release()
    return fast


def saved(name: str, input: Tensor, path: str) -> Run:
    fast = optimized(name, input, path)
    fast.save(path)
    return fast


def loaded(name: str, input: Tensor, path: str) -> Run:
    fast = torch_blocked.load(path)
    fast.release()
    return fast


# In this order: `saved` writes the file that `loaded` reads, and measures kernels for all.
FORMS: dict[str, Callable[[str, Tensor, str], Run]] = {
    "torch": dense,
    "optimize, save": saved,
    "optimize": optimized,
    "optimize, release": released,
    "load, release": loaded,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    parser.description = "Tells the resident memory of processes that run a model."
    parser.add_argument("models", nargs="+", choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=output_path, metavar="PATH", help="write the results as JSON"
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    results = []
    for name in dict.fromkeys(args.models):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model")
            mib = {form: in_process(form, name, args.threads, path) for form in FORMS}
        results += [
            {"model": name, "form": form, "rss_mib": each, "of_torch": each / mib["torch"]}
            for form, each in mib.items()
        ]
    environment = torch_blocked.env()
    context = {key: environment[key] for key in ("cpu", "isa", "torch", "torch_blocked")}
    context["threads"] = args.threads
    print(", ".join(f"{key} {value}" for key, value in context.items()), end="\n\n")
    rows = [
        (each["model"], each["form"], f"{each['rss_mib']:.0f}", f"{each['of_torch']:.2f}x")
        for each in results
    ]
    print(table(("model", "form", "MiB", "of torch"), rows, text_columns=2))
    if args.json:
        write_json(args.json, context, results)
    return 0


def in_process(form: str, name: str, threads: int, path: str) -> float:
    """Resident MiB of a new process that has run the form of the model."""
    code = f"from torch_blocked.bench import memory; memory.child{(form, name, threads, path)}"
    result = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    return json.loads(result.stdout)


def child(form: str, name: str, threads: int, path: str) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(INPUT_SEED)
    input = torch.randn(1, *MODELS[name].input_dims, generator=generator)
    with torch.no_grad():
        run = FORMS[form](name, input, path)
        for _ in range(2):
            run(input)
    gc.collect()
    print(resident_mib())


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("bench memory: expected VmRSS in /proc/self/status; run it on Linux")
