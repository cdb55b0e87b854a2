"""How much plans differ that were made alone and beside processes that compute.

    python benchmarks/plans.py mobilenet_v2 resnet18 unet --plans 20

Every plan is made in a process and with a tuning file of its own. Then all of them are loaded into
one process and timed in interleaved rounds, with nothing else running. See README.md."""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from peers import busy

import torch_blocked
from torch_blocked.bench import models
from torch_blocked.bench.arguments import positive
from torch_blocked.bench.measure import Timing, on_threads, time_interleaved
from torch_blocked.text_table import markdown


def make_plan(name: str, threads: int, path: Path) -> None:
    """Optimizes the model, writes it to `path` and prints how long optimize took."""
    model = models.load(name)
    input = model.random_input(1)
    with on_threads(threads):
        start = time.perf_counter()
        optimized = torch_blocked.optimize(model.module, input)
        print(time.perf_counter() - start)
        optimized.save(path)


def made(name: str, threads: int, path: Path, cache: Path) -> float:
    """Seconds that optimize takes in a process that knows no times; the plan is in `path`."""
    done = subprocess.run(
        [sys.executable, __file__, name, "--threads", str(threads), "--make", path],
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def choices(optimized: torch.nn.Module) -> list[tuple[str, str, str]]:
    """Op, output and implementation of each step."""
    rows = [line.split("  ") for line in optimized.plan().splitlines()[1:]]
    return [tuple(cell.strip() for cell in row if cell.strip())[:3] for row in rows]


def differences(plans: Sequence[torch.nn.Module]) -> list[str]:
    """The steps that not all plans have, with the number of plans that have each."""
    count = collections.Counter(step for plan in plans for step in dict.fromkeys(choices(plan)))
    return [f"{n} of {len(plans)}: {', '.join(s)}" for s, n in count.items() if n < len(plans)]


def compare(name: str, count: int, others: int, threads: int, rounds: int) -> list[list[str]]:
    """Rows of the table: plans made alone, and beside `others` processes."""
    model = models.load(name)
    input = model.random_input(1)
    plans: dict[str, torch.nn.Module] = {}
    seconds: dict[str, list[float]] = {"alone": [], f"beside {others}": []}
    with tempfile.TemporaryDirectory() as folder, on_threads(threads):
        for i in range(count):
            for made_so, processes in zip(seconds, (0, others), strict=True):
                path = Path(folder) / f"{made_so}{i}.pt"
                with busy(processes):
                    cache = Path(folder) / f"cache{made_so}{i}"
                    seconds[made_so].append(made(name, threads, path, cache))
                plans[f"{made_so} {i}"] = torch_blocked.load(path)
        run = {key: lambda plan=plan: plan(input) for key, plan in plans.items()}
        timings = time_interleaved(run, rounds, what=name)
    for line in differences(list(plans.values())):
        print(line)
    return [
        row(name, made_so, seconds[made_so], [timings[f"{made_so} {i}"] for i in range(count)])
        for made_so in seconds
    ]


def row(name: str, made_so: str, seconds: Sequence[float], timings: Sequence[Timing]) -> list[str]:
    best = sorted(timing.min_ms for timing in timings)
    return [
        name,
        made_so,
        f"{best[0]:.2f}",
        f"{statistics.median(best):.2f}",
        f"{best[-1]:.2f}",
        f"{100 * (best[-1] / best[0] - 1):.1f} %",
        f"{min(seconds):.2f} to {max(seconds):.2f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as of bench models")
    parser.add_argument("--plans", type=positive, default=20, help="plans of each kind")
    parser.add_argument("--busy", type=positive, default=1, help="processes that compute meanwhile")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=7, help="of timing all plans")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_plan(args.models[0], args.threads, args.make)
        return 0
    header = ["model", "made", "fastest ms", "median ms", "slowest ms", "spread", "optimize s"]
    rows = [
        line
        for name in args.models
        for line in compare(name, args.plans, args.busy, args.threads, args.rounds)
    ]
    print(markdown(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
