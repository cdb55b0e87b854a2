"""Whether the rows of a profile sum to what a model takes, with and without being watched.

    python benchmarks/profile_sums.py resnet50 --threads 2

clock: the profiled run by the clock, and the sum of all rows; rows: those of the model, without
what the profile itself took; alone: a run that nobody watches; ops: the share of the rows that are
ops, reorders and packs, the rest being Python and dispatch. Runs with and without a profile
alternate. Times are medians, quotients those of the medians. Exits with 1 if the rows do not sum to
the clock, or rows and alone differ by more than 5 %."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import harness
import torch
from torch import Tensor, nn

import torch_blocked
from torch_blocked.bench import models

ROUNDS = 9
ALLOWED = 0.05


def cases(name: str) -> dict[str, Callable[[], object]]:
    model = models.load(name)
    x = model.random_input(1)
    blocked = x.to_blocked()
    optimized = torch_blocked.optimize(models.load(name).module, x)
    trained = models.load(name).module.train()
    batch = model.random_input(4).to_blocked()

    def inference(net: nn.Module, input: Tensor) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return net(input)

        return call

    def step() -> None:
        trained.zero_grad()
        trained(batch).square().mean().backward()

    return {
        "dense": inference(model.module, x),
        "eager, blocked": inference(model.module, blocked),
        "optimized": inference(optimized, x),
        "a training step": step,
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def row(name: str, call: Callable[[], object]) -> tuple[list[str], bool]:
    for _ in range(2):
        call()
    profiles, alone = [], list[float]()
    for _ in range(ROUNDS):
        alone.append(1e3 * seconds(call))
        with torch_blocked.profile(torch_reorders=name == "dense") as p:
            call()
        profiles.append(p)
    clock = [p.wall_ms for p in profiles]
    rows = [p.wall_ms - p.recording_ms for p in profiles]
    ops = [of(p, "op", "reorder", "torch reorder", "pack") for p in profiles]
    sums = [of(p, "between", "recording") + each for p, each in zip(profiles, ops, strict=True)]
    usual, own = statistics.median(alone), statistics.median(rows)
    texts = [name, *(f"{each:.2f}" for each in (statistics.median(clock), own, usual))]
    texts += [f"{100 * (own / usual - 1):+.1f} %"]
    texts += [f"{100 * statistics.median(ops) / own:.1f} %"]
    sums_to_clock = all(abs(a / b - 1) < 1e-6 for a, b in zip(sums, clock, strict=True))
    return texts, sums_to_clock and abs(own / usual - 1) <= ALLOWED


def of(p: torch_blocked.profile, *kinds: str) -> float:
    """Milliseconds of rows of these kinds in the thread of the block."""
    return sum(row.ms for row in p.rows if row.in_thread and row.kind in kinds)


def main(argv: Sequence[str] | None = None) -> int:
    args = harness.parser(__doc__, models="as of bench models").parse_args(argv)
    torch.set_num_threads(args.threads)
    tables, fine = [], True
    for name in args.models:
        results = [row(*each) for each in cases(name).items()]
        header = (name, "clock ms", "rows ms", "alone ms", "rows / alone", "ops")
        tables.append(harness.Table("", header, [texts for texts, _ in results]))
        fine &= all(good for _, good in results)
    harness.finish(args, tables, rounds=ROUNDS)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(harness.run(main))
