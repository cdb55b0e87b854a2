"""How long each engine takes from a model to its first result, and its process's memory then.

    python benchmarks/setup_time.py mobilenet_v2 resnet50 --threads 2

Packages are imported and the model's files read before the clock starts, where the engine lets them
be. `cold`: torch_blocked without a file of measured times, `warm`: with the one that cold has left.
Each figure is the median of processes of its own, which take turns. A virtual machine gives memory
that nobody uses back to its host and waits for it when it is wanted, which takes up to 2 ms a MiB:
before each process others have used as much, so that no engine waits. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy
from engines import Job, add_cache_option, resident_mib, torch_input, torch_model
from exports import folder_of
from peers import export

from torch_blocked.bench.arguments import positive
from torch_blocked.text_table import markdown


def torch_blocked(job: Job) -> Callable[[], Any]:
    import torch_blocked

    model, input = torch_model(job), torch_input(job)

    def run() -> Any:
        optimized = torch_blocked.optimize(model, input)
        return optimized, optimized(input)

    return run


def openvino(job: Job) -> Callable[[], Any]:
    import openvino

    core = openvino.Core()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": job.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = core.read_model(job.files / "model.onnx")
    input = numpy.load(job.files / "input.npy")

    def run() -> Any:
        request = core.compile_model(model, "CPU", settings).create_infer_request()
        return request, request.infer([input])

    return run


def onnxruntime(job: Job) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    input = numpy.load(job.files / "input.npy")

    def run() -> Any:
        session = onnxruntime.InferenceSession(
            job.files / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        return session, session.run(None, {session.get_inputs()[0].name: input})

    return run


def once(engine: str, job: Job) -> None:
    """Prints the seconds to the first result, and the MiB that are resident then, while all that it
    takes to run again is kept, beyond those before."""
    run = {"openvino": openvino, "onnxruntime": onnxruntime}.get(engine, torch_blocked)(job)
    before, start = resident_mib(), time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, resident_mib() - before]))
    del result


TOUCHED_BYTES = 1 << 30


def touch_memory() -> None:
    """Uses memory and gives it back to the system, which has it ready then."""
    touch = f"import numpy; numpy.ones({TOUCHED_BYTES}, numpy.uint8)"
    subprocess.run([sys.executable, "-c", touch], check=True)


ENGINES = ("onnxruntime", "openvino", "torch_blocked cold", "torch_blocked warm")

HEADER = ["model", *(f"{name}, s" for name in ENGINES), *(f"{name}, MiB" for name in ENGINES)]


def measure(job: Job, rounds: int) -> dict[str, list[list[float]]]:
    results: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name in ENGINES:
                touch_memory()
                command = [sys.executable, __file__, "--once", name, json.dumps(asdict(job))]
                done = subprocess.run(
                    command,
                    env=os.environ | {"OMP_NUM_THREADS": str(job.threads), "XDG_CACHE_HOME": cache},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    check=True,
                )
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
    return results


def main() -> int:
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], Job(**json.loads(sys.argv[3])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as of peers.py")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=3)
    add_cache_option(parser)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        folder = folder_of(args.cache, model)
        export(model, 1, folder, ["onnxruntime"])
        results = measure(Job(model, 1, args.threads, str(folder)), args.rounds)
        medians = [
            [statistics.median(each[i] for each in results[name]) for name in ENGINES]
            for i in (0, 1)
        ]
        rows.append([model, *(f"{s:.2f}" for s in medians[0]), *(f"{m:.0f}" for m in medians[1])])
        print(*rows[-1], file=sys.stderr, flush=True)
    print(markdown(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
