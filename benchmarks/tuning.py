"""Plans of what estimates leave open beside plans of all that could run.

    python benchmarks/tuning.py resnet50 mobilenet_v2 --threads 2

Each model is optimized with tune=True and with tune="full", without a file of measured times, in a
process of its own; then both run in turn. `full / open` is the time of the full plan over that of
the other, best times: below 1, something that was not timed would have been faster. See
README.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
from engines import Job, add_cache_option, torch_input, torch_model
from exports import folder_of
from peers import export

import torch_blocked
from torch_blocked.bench.arguments import positive
from torch_blocked.bench.measure import time_interleaved
from torch_blocked.text_table import markdown

HEADER = ("model", "open, ms", "full, ms", "full / open", "optimize open, s", "full, s")


def measure(job: Job, rounds: int) -> list[list[float]]:
    """Best milliseconds and the seconds of optimize, with tune=True and with tune="full"."""
    model, input = torch_model(job), torch_input(job)
    torch_blocked.optimize(model, input, tune=False)(input)  # what only a first call takes
    plans, seconds = {}, []
    for tune in (True, "full"):
        start = time.perf_counter()
        plans[str(tune)] = partial(torch_blocked.optimize(model, input, tune=tune), input)
        seconds.append(time.perf_counter() - start)
    times = time_interleaved(plans, rounds)
    return [[times[name].min_ms for name in plans], seconds]


def main() -> int:
    if sys.argv[1:2] == ["--once"]:
        print(json.dumps(measure(Job(**json.loads(sys.argv[2])), int(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as of peers.py")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=50)
    add_cache_option(parser)
    args = parser.parse_args()
    rows, ratios = [], []
    for model in args.models:
        folder = folder_of(args.cache, model)
        export(model, 1, folder, ["onnxruntime"])
        job = {"model": model, "batch": 1, "threads": args.threads, "folder": str(folder)}
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, __file__, "--once", json.dumps(job), str(args.rounds)],
                env=os.environ | {"OMP_NUM_THREADS": str(args.threads), "XDG_CACHE_HOME": cache},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        (usual, full), seconds = json.loads(done.stdout.splitlines()[-1])
        ratios.append(full / usual)
        times = (f"{usual:.2f}", f"{full:.2f}", f"{ratios[-1]:.3f}")
        rows.append([model, *times, *(f"{each:.2f}" for each in seconds)])
        print(*rows[-1], file=sys.stderr, flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(markdown(HEADER, [*rows, ["geometric mean", "", "", f"{mean:.3f}", "", ""]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
