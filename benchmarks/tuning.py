"""Plans of what estimates leave open beside plans of all that could run.

    python benchmarks/tuning.py resnet50 mobilenet_v2 --threads 2

Each model is optimized with tune=True and with tune="full", without a file of measured times, in a
process of its own; then both run in turn. `full / open` is the time of the full plan over that of
the other, best times: below 1, something that was not timed would have been faster."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import harness
from engines import Job, add_cache_option, torch_input, torch_model
from peers import exported

import torch_blocked
from torch_blocked.bench.measure import time_interleaved

HEADER = ("model", "open, ms", "full, ms", "full / open", "optimize open, s", "full, s")


def case(fields: dict[str, Any], rounds: int) -> list[list[float]]:
    """Best milliseconds and the seconds of optimize, with tune=True and with tune="full"."""
    job = Job(**fields)
    model, input = torch_model(job), torch_input(job)
    torch_blocked.optimize(model, input, tune=False)(input)  # what only a first call takes
    plans, seconds = {}, []
    for tune in (True, "full"):
        start = time.perf_counter()
        plans[str(tune)] = partial(torch_blocked.optimize(model, input, tune=tune), input)
        seconds.append(time.perf_counter() - start)
    times = time_interleaved(plans, rounds)
    return [[times[name].min_ms for name in plans], seconds]


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, rounds=50, models="as of peers.py")
    add_cache_option(parser)
    args = parser.parse_args(argv)
    rows, ratios = [], []
    for model in args.models:
        job = Job(model, 1, args.threads, str(exported(model, 1, args.cache, ["onnxruntime"])[0]))
        with tempfile.TemporaryDirectory() as cache:
            env = harness.on_cores(args.threads) | {"XDG_CACHE_HOME": cache}
            (usual, full), seconds = harness.in_process(__file__, asdict(job), args.rounds, env=env)
        ratios.append(full / usual)
        times = (f"{usual:.2f}", f"{full:.2f}", f"{ratios[-1]:.3f}")
        rows.append([model, *times, *(f"{each:.2f}" for each in seconds)])
        harness.progress(*rows[-1])
    mean = f"{statistics.geometric_mean(ratios):.3f}"
    table = harness.Table("", HEADER, [*rows, ["geometric mean", "", "", mean, "", ""]])
    harness.finish(args, [table], rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main, case))
