"""How much plans differ that were made alone and beside processes that compute.

    python benchmarks/plans.py mobilenet_v2 resnet18 unet --plans 20

Every plan is made in a process and with a tuning file of its own. Then those that differ are loaded
into one process and timed in interleaved rounds, with nothing else running."""

from __future__ import annotations

import collections
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness
import torch
from peers import busy

import torch_blocked
from torch_blocked import progress
from torch_blocked.bench import models
from torch_blocked.bench.arguments import positive
from torch_blocked.bench.measure import on_threads, time_interleaved


def case(name: str, threads: int, path: str) -> float:
    """Optimizes the model and writes it to `path`; the seconds that optimize takes."""
    model = models.load(name)
    input = model.random_input(1)
    with on_threads(threads):
        start = time.perf_counter()
        optimized = torch_blocked.optimize(model.module, input)
        seconds = time.perf_counter() - start
        optimized.save(path)
    return seconds


def made(name: str, threads: int, path: Path, cache: Path) -> float:
    """The same in a process that knows no times."""
    env = harness.on_cores(threads) | {"XDG_CACHE_HOME": str(cache)}
    return float(harness.in_process(__file__, name, threads, str(path), env=env))


Steps = tuple[tuple[str, ...], ...]


def steps_of(optimized: torch.nn.Module) -> Steps:
    """Op, output and implementation of each step."""
    rows = [line.split("  ") for line in optimized.plan().splitlines()[1:]]
    return tuple(tuple(cell.strip() for cell in row if cell.strip())[:3] for row in rows)


def differences(made: Sequence[Steps]) -> list[str]:
    """The steps that not all plans have, with the number of plans that have each."""
    count = collections.Counter(step for steps in made for step in dict.fromkeys(steps))
    return [f"{n} of {len(made)}: {', '.join(s)}" for s, n in count.items() if n < len(made)]


def compare(name: str, count: int, others: int, threads: int, rounds: int) -> list[list[str]]:
    """Rows of the table: plans made alone, and beside `others` processes. Plans of the same steps
    are timed once: what one of them takes, all of them do."""
    model = models.load(name)
    input = model.random_input(1)
    plans: dict[Steps, torch.nn.Module] = {}
    made_as: dict[str, list[Steps]] = {"alone": [], f"beside {others}": []}
    seconds: dict[str, list[float]] = {made_so: [] for made_so in made_as}
    with tempfile.TemporaryDirectory() as folder, on_threads(threads):
        path = Path(folder) / "plan.pt"
        ways = list(zip(made_as, (0, others), strict=True)) * count
        with progress.Bar(f"plans of {name}", len(ways)) as bar:
            for i, (made_so, processes) in enumerate(ways):
                with busy(processes):
                    seconds[made_so].append(made(name, threads, path, Path(folder) / f"cache{i}"))
                optimized = torch_blocked.load(path)
                steps = steps_of(optimized)
                made_as[made_so].append(steps)
                plans.setdefault(steps, optimized)
                bar.update()
        run = {str(i): lambda plan=plan: plan(input) for i, plan in enumerate(plans.values())}
        timings = time_interleaved(run, rounds, what=name)
    for line in differences([steps for made_so in made_as.values() for steps in made_so]):
        print(line)
    best_ms = {steps: timing.min_ms for steps, timing in zip(plans, timings.values(), strict=True)}
    return [
        [name, made_so, *cells_of(made_as[made_so], best_ms, seconds[made_so])]
        for made_so in made_as
    ]


def cells_of(
    made: Sequence[Steps], best_ms: Mapping[Steps, float], seconds: Sequence[float]
) -> list[str]:
    best = sorted(best_ms[steps] for steps in made)
    return [
        str(len(set(made))),
        f"{best[0]:.2f}",
        f"{statistics.median(best):.2f}",
        f"{best[-1]:.2f}",
        f"{100 * (best[-1] / best[0] - 1):.1f} %",
        f"{min(seconds):.2f} to {max(seconds):.2f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, rounds=7, models="as of bench models")
    parser.add_argument("--plans", type=positive, default=20, help="plans of each kind")
    parser.add_argument("--busy", type=positive, default=1, help="processes that compute meanwhile")
    args = parser.parse_args(argv)
    times = ["fastest ms", "median ms", "slowest ms", "spread", "optimize s"]
    rows = [
        line
        for name in args.models
        for line in compare(name, args.plans, args.busy, args.threads, args.rounds)
    ]
    table = harness.Table("", ["model", "made", "different", *times], rows, text_columns=2)
    harness.finish(args, [table], plans=args.plans, busy=args.busy, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main, case))
