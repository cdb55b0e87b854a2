"""How an optimized model should scale to machines with more cores, from what is measured here.

    python benchmarks/scaling.py resnet50 mobilenet_v2 --bandwidth 300

Every step is measured on one thread. On p cores it takes

    max(time / min(p, pieces), bytes / bandwidth) + activations / (p * others) + waiting

pieces: into how many its largest loop is cut for p threads; bytes: of its weights, and of its
activations where they come from memory (above --cache MiB); others: what a core reads of what
another has written, as it must where the next step is cut in another way; waiting: SYNC_US log2(p)
where threads go on to the next step together, MEET_US log2(p) where all of them meet before and
after, as in oneDNN's and ATen's. The prediction for the threads of this machine stands beside its
measurement. Assumed: cores of this kind and clock, one NUMA node, bandwidth that all cores share,
and that each activation is read by one core, not by several."""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import harness
import torch

import torch_blocked
from torch_blocked._C import StepReport
from torch_blocked.bench import models
from torch_blocked.bench.arguments import positive
from torch_blocked.bench.measure import on_threads, time_interleaved

# Of 16 threads of a Xeon: 2 us from loop to loop, 4 us to start threads and to wait for them.
SYNC_US, MEET_US = 0.5, 2.0


@dataclass(frozen=True)
class Machine:
    bandwidth: float  # bytes in a microsecond: of all cores from memory
    others: float  # of a core, of what another has written
    cache: float  # bytes


@dataclass(frozen=True)
class Step:
    microseconds: float  # on one thread
    activations: float  # bytes
    weights: float  # bytes
    pieces: dict[int, int]  # for so many cores; 0: as many as there are threads
    meets: bool

    def on(self, cores: int, machine: Machine) -> float:
        shared = min(cores, self.pieces[cores] or cores)
        from_memory = self.activations if self.activations > machine.cache else 0.0
        moved = (self.weights + from_memory) / machine.bandwidth
        from_others = self.activations / (cores * machine.others) if cores > 1 else 0.0
        waiting = (MEET_US if self.meets else SYNC_US) * math.log2(cores)
        return max(self.microseconds / shared, moved) + from_others + waiting


def weight_bytes(report: StepReport) -> float:
    """By its products, of which each weight makes one for each pixel, or row, of the output."""
    *_, described = report.output.rpartition("[")
    dims = [int(each) for each in described.rstrip("]").split(", ")]
    pixels = math.prod(dims) / dims[1 if len(dims) > 2 else -1]
    return 4 * report.flops / (2 * pixels)


def reports_of(
    optimized: torch.nn.Module, input: torch.Tensor, runs: int
) -> list[list[StepReport]]:
    call = optimized._call((input,), {})
    compiled = optimized._find(call).compiled
    return [compiled.report(call.inputs) for _ in range(runs)]


def pieces_on(cores: int, model: models.Model, reports: Sequence[StepReport]) -> list[int]:
    """Of these steps, from a plan for so many threads, which need not all have a core here. A step
    that it has in another form counts as cut into as many pieces as there are threads."""
    input = model.random_input(1)
    with on_threads(cores), torch.no_grad():
        optimized = torch_blocked.optimize(model.module, input, tune=False)
        (there,) = reports_of(optimized, input, 1)
    pieces = defaultdict(deque)
    for each in there:
        pieces[each.op, each.flops].append(each.pieces)
    queues = [pieces[each.op, each.flops] for each in reports]
    return [queue.popleft() if queue else 0 for queue in queues]


def steps_of(
    model: models.Model, optimized: torch.nn.Module, cores: Sequence[int], runs: int = 15
) -> list[Step]:
    """Of a plan for one thread, each with its best time of several runs on one."""
    with on_threads(1), torch.no_grad():
        runs_of_steps = list(zip(*reports_of(optimized, model.random_input(1), runs), strict=True))
    pieces = {count: pieces_on(count, model, [row[0] for row in runs_of_steps]) for count in cores}
    return [
        Step(
            microseconds=min(each.microseconds for each in row),
            activations=row[0].bytes,
            weights=weight_bytes(row[0]),
            pieces={count: of_steps[i] for count, of_steps in pieces.items()},
            meets=row[0].meets,
        )
        for i, row in enumerate(runs_of_steps)
    ]


def measured(model: models.Model, threads: int) -> tuple[float, torch.nn.Module]:
    """Milliseconds of a call on so many threads, and what was called."""
    input = model.random_input(1)
    with on_threads(threads), torch.no_grad():
        optimized = torch_blocked.optimize(model.module, input)
        timing = time_interleaved({"": lambda: optimized(input)}, rounds=9)[""]
    return timing.min_ms, optimized


def row_of(name: str, here: int, cores: Sequence[int], machine: Machine) -> list[str]:
    model = models.load(name)
    alone, optimized = measured(model, 1)
    together, _ = measured(model, here)
    steps = steps_of(model, optimized, [here, *cores])

    def predicted(count: int) -> float:
        return sum(each.on(count, machine) for each in steps) / 1e3

    cells = [f"{ms:.2f}" for ms in (alone, together, predicted(here))]
    return [name, *cells, *(f"{predicted(p):.2f} ({alone / predicted(p):.1f}x)" for p in cores)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, models="as of bench models")
    parser.add_argument("--cores", type=harness.numbers, default=[16, 32, 96])
    parser.add_argument("--bandwidth", type=float, default=300.0, help="of the machine, GB/s")
    parser.add_argument("--others", type=float, default=8.0, help="of a core, GB/s")
    parser.add_argument("--cache", type=positive, default=32, help="MiB that L3 holds of a step")
    args = parser.parse_args(argv)
    machine = Machine(args.bandwidth * 1e3, args.others * 1e3, args.cache * 2**20)
    rows = [row_of(name, args.threads, args.cores, machine) for name in args.models]
    header = [
        "model, ms",
        "1 thread",
        f"{args.threads} threads",
        "predicted",
        *map(str, args.cores),
    ]
    harness.finish(args, [harness.Table("", header, rows)], bandwidth=args.bandwidth)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
