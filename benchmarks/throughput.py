"""Images a second from several callers at once, in every engine that takes more than one.

    python benchmarks/throughput.py resnet50 mobilenet_v2 --callers 1,2,4 --threads 1,2

Callers are threads of one process that share one loaded model; each has `threads` threads to
compute with. Each engine has a process of its own, and they take turns."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import harness
import numpy
from engines import Job, add_cache_option, load_blocked, load_torch, torch_input
from peers import Dead, Worker, exported

# What makes the function that one caller calls for an image; each caller calls it for its own.
Caller = Callable[[], Callable[[], object]]


def openvino(job: Job, callers: int) -> Caller:
    """As many streams as callers, or, where `callers` is 0, what its throughput hint chooses."""
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    if callers:
        settings |= {"NUM_STREAMS": callers, "INFERENCE_NUM_THREADS": callers * job.threads}
    else:
        settings |= {"PERFORMANCE_HINT": "THROUGHPUT"}
    compiled = openvino.Core().compile_model(job.files / "model.onnx", "CPU", settings)
    input = openvino.Tensor(numpy.load(job.files / "input.npy"))

    def caller() -> Callable[[], object]:
        request = compiled.create_infer_request()
        request.set_input_tensor(input)
        return request.infer

    caller.count = callers or compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
    return caller


def onnxruntime(job: Job, callers: int) -> Caller:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    session = onnxruntime.InferenceSession(
        job.files / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    feed = {session.get_inputs()[0].name: numpy.load(job.files / "input.npy")}
    return lambda: lambda: session.run(None, feed)


def torch_channels_last(job: Job, callers: int) -> Caller:
    run = load_torch(folded=True, channels_last=torch_input(job).dim() > 3)(job)
    return lambda: run


def torch_blocked(job: Job, callers: int) -> Caller:
    run = load_blocked(job)
    return lambda: run


ENGINES: dict[str, Callable[[Job, int], Caller]] = {
    "torch-cl-fold": torch_channels_last,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "torch_blocked": torch_blocked,
}


def images_per_second(caller: Caller, callers: int, seconds: float) -> float:
    """Of all callers together, each calling for `seconds`, once all are there."""
    calls = [caller() for _ in range(callers)]
    rates = [0.0] * callers
    meeting = threading.Barrier(callers)

    def run(i: int) -> None:
        calls[i]()
        meeting.wait()
        start, count = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            calls[i]()
            count += 1
        rates[i] = count / (time.perf_counter() - start)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def serve(engine: str, callers: int, job: Job) -> None:
    """Writes a line when the model is loaded, then images a second for each line, of seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    caller = ENGINES[engine](job, callers)
    caller()()
    count = callers or caller.count
    print(json.dumps({"callers": count}), file=answers)
    for line in sys.stdin:
        rate = images_per_second(caller, count, float(line))
        print(json.dumps({"rate": rate}), file=answers)


def measure(job: Job, callers: int, engines: Sequence[str], seconds: float) -> dict[str, float]:
    """The median of interleaved rounds of each engine."""
    workers = {}
    for name in engines:
        command = [sys.executable, __file__, "--serve", name, str(callers), json.dumps(asdict(job))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | harness.on_cores(job.threads),
        )
        workers[name] = Worker(name, job, process, open(os.devnull))
        workers[name].facts = workers[name].answer()  # one after the other: ours measures
    rates: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for _ in range(5):
            for name, worker in workers.items():
                print(seconds, file=worker.process.stdin, flush=True)
                rates[name].append(worker.answer()["rate"])
    finally:
        for worker in workers.values():
            worker.close()
    return {name: statistics.median(values) for name, values in rates.items()}


def rows_of(model: str, folder: Path, args: argparse.Namespace) -> list[list[str]]:
    rows = []
    for threads in args.threads:
        for callers in args.callers:
            rates = measure(
                Job(model, 1, threads, str(folder)), callers, list(ENGINES), args.seconds
            )
            best = max(rate for name, rate in rates.items() if name != "torch_blocked")
            rows.append(
                [
                    f"{model}, {callers} x {threads}T",
                    *(f"{rate:.1f}" for rate in rates.values()),
                    f"{rates['torch_blocked'] / best:.2f}x",
                ]
            )
    hint = measure(Job(model, 1, 1, str(folder)), 0, ["openvino"], args.seconds)
    rows.append(
        [f"{model}, throughput hint", "", "", f"{hint['openvino']:.1f}", "", ""],
    )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    if sys.argv[1:2] == ["--serve"]:
        engine, callers, job = sys.argv[2:]
        serve(engine, int(callers), Job(**json.loads(job)))
        return 0
    parser = harness.parser(__doc__, threads=[1, 2], seconds=1.0, models="as of peers.py")
    parser.add_argument("--callers", type=harness.numbers, default=[1, 2, 4])
    add_cache_option(parser)
    args = parser.parse_args(argv)
    rows = []
    for model in args.models:
        rows += rows_of(model, exported(model, 1, args.cache, ["onnxruntime"])[0], args)
    header = ["images a second", *ENGINES, "vs best peer"]
    harness.finish(args, [harness.Table("", header, rows)], seconds=args.seconds)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(harness.run(main))
    except Dead as error:
        sys.exit(f"throughput: {error}")
