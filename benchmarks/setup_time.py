"""How long each engine takes from a model to its first result, and its process's memory then.

    python benchmarks/setup_time.py mobilenet_v2 resnet50 --threads 2

Packages are imported and the model's files read before the clock starts, where the engine lets them
be. `cold`: torch_blocked without a file of measured times, `warm`: with the one that cold has left.
Each figure is the median of processes of its own, which take turns. A virtual machine gives memory
that nobody uses back to its host and waits for it when it is wanted, which takes up to 2 ms a MiB:
before each process others have used as much, so that no engine waits."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import harness
import numpy
from engines import Job, add_cache_option, resident_mib, torch_input, torch_model
from peers import exported


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


def case(engine: str, fields: dict[str, Any]) -> list[float]:
    """The seconds to the first result, and the MiB that are resident then, while all that it takes
    to run again is kept, beyond those before."""
    run = {"openvino": openvino, "onnxruntime": onnxruntime}.get(engine, torch_blocked)(
        Job(**fields)
    )
    before, start = resident_mib(), time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    found = [seconds, resident_mib() - before]
    del result
    return found


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
            env = harness.on_cores(job.threads) | {"XDG_CACHE_HOME": cache}
            for name in ENGINES:
                touch_memory()
                results[name].append(harness.in_process(__file__, name, asdict(job), env=env))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, threads=2, rounds=3, models="as of peers.py")
    add_cache_option(parser)
    args = parser.parse_args(argv)
    rows = []
    for model in args.models:
        folder, _ = exported(model, 1, args.cache, ["onnxruntime"])
        results = measure(Job(model, 1, args.threads, str(folder)), args.rounds)
        medians = [
            [statistics.median(each[i] for each in results[name]) for name in ENGINES]
            for i in (0, 1)
        ]
        rows.append([model, *(f"{s:.2f}" for s in medians[0]), *(f"{m:.0f}" for m in medians[1])])
        harness.progress(*rows[-1])
    harness.finish(args, [harness.Table("", HEADER, rows)], rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main, case))
