"""Whole models in every engine side by side: the same weights, the same input, results verified.

    python benchmarks/peers.py resnet18 mobilenet_v2 --json peers.json --svg peers.svg

Each engine has a process of its own; samples are taken in interleaved rounds. --load takes the
results of earlier runs into the tables, so that runs of several days merge."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chart
import harness
from engines import ENGINES, TOLERANCES, Job, add_cache_option, arguments, version
from exports import folder_of
from zoo.timed import TIMED

from torch_blocked.bench.arguments import output_path, positive
from torch_blocked.bench.measure import Timing
from torch_blocked.bench.networks import MODELS
from torch_blocked.bench.report import circumstances, describe
from torch_blocked.text_table import markdown

ROOT = Path(__file__).parent
OURS = "torch_blocked"
# One sample is as many calls as fit into this time, at most MAX_CALLS; a row has at least
# MIN_ROUNDS samples of each engine.
SAMPLE_MS, MAX_CALLS = 30.0, 20
MIN_ROUNDS, MAX_ROUNDS = 3, 40
REST_S = 1.0  # at most, before a sample
SETUP_S = 240  # an engine that takes longer to load has failed
Record = dict[str, Any]


class Dead(RuntimeError):
    """An engine's process ended, or said that it failed."""


@dataclass
class Worker:
    """The process of one engine, and the samples it gave."""

    engine: str
    job: Job
    process: subprocess.Popen[str]
    log: Any
    facts: dict[str, Any] = field(default_factory=dict)
    calls: int = 1
    rounds_ms: list[float] = field(default_factory=list)
    best_ms: float = math.inf
    failure: str = ""

    def answer(self) -> Any:
        """The next line of the process. Raises Dead."""
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.log.seek(0)
            last = (self.log.read().strip().splitlines() or [""])[-1]
            raise Dead(f"its process ended with {code}: {last[:120]}".rstrip(": "))
        answer = json.loads(line)
        if "failed" in answer:
            raise Dead(answer["failed"])
        return answer

    def sample(self) -> None:
        """One round of this engine. Raises Dead."""
        print(self.calls, file=self.process.stdin, flush=True)
        times = self.answer()
        self.rounds_ms.append(statistics.median(times))
        self.best_ms = min(self.best_ms, *times)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def start(engine: str, job: Job) -> Worker:
    """The process of an engine, loading."""
    log = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(
        arguments(engine, job),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | harness.on_cores(job.threads),
    )
    return Worker(engine, job, process, log)


def pin(worker: Worker) -> None:
    """Onto the cores that every engine with so many threads runs on, so that what disturbs one of
    them disturbs all: on a shared host a core may be 1.5 times as slow as another for minutes."""
    cores = sorted(os.sched_getaffinity(0))[: worker.job.threads]
    with suppress(FileNotFoundError):  # the process has ended, as its next answer will tell
        for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # or this thread of it
                os.sched_setaffinity(int(task.name), cores)


def is_running(worker: Worker) -> bool:
    """Whether a thread of its process computes, or spins."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
            # pid (name) state ..., where the name may have any characters
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def rest(workers: Sequence[Worker]) -> None:
    """Until no engine has a running thread. Those that wait for a next call may spin, as ONNX
    Runtime's do for 60 ms, and the engine that comes after had one core of two for its sample."""
    end = time.monotonic() + REST_S
    while any(map(is_running, workers)) and time.monotonic() < end:
        time.sleep(0.002)


def load(workers: Sequence[Worker]) -> None:
    """Waits until each has loaded or failed."""
    for worker in workers:
        try:
            worker.facts = worker.answer()
            pin(worker)
        except Dead as error:
            worker.failure = str(error)


def measure(workers: Sequence[Worker], seconds: float) -> None:
    """Interleaved rounds, each started by another engine, for about that long."""
    for worker in workers:
        rest(workers)
        try:
            worker.sample()
        except Dead as error:
            worker.failure = str(error)
        else:
            worker.calls = max(1, min(MAX_CALLS, int(SAMPLE_MS / worker.rounds_ms.pop())))
    end = time.monotonic() + seconds
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.monotonic() > end:
            break
        alive = [worker for worker in workers if not worker.failure]
        shift = turn % max(1, len(alive))
        for worker in alive[shift:] + alive[:shift]:
            rest(alive)
            try:
                worker.sample()
            except Dead as error:
                worker.failure = str(error)


@contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen]]:
    """So many other processes compute meanwhile, and take their share of the cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield others
    finally:
        for other in others:
            other.kill()
            other.wait()


def run_row(
    job: Job, engines: Sequence[str], failed: dict[str, str], seconds: float, others: int = 0
) -> list:
    """One model at one batch and number of threads: a record for each engine.

    failed: why a format could not be exported. An engine that tunes itself by measuring is loaded
    after the others, alone. others: processes that compute while it is measured."""
    workers: list[Worker] = []
    try:
        for tunes in (False, True):
            wave = [
                start(name, job)
                for name in engines
                if ENGINES[name].tunes == tunes and ENGINES[name].needs not in failed
            ]
            workers += wave
            load(wave)
        with busy(others):
            measure([worker for worker in workers if not worker.failure], seconds)
    finally:
        for worker in workers:
            worker.close()
    by_engine = {worker.engine: worker for worker in workers}
    return [record(job, name, by_engine.get(name), failed) for name in engines]


def record(job: Job, engine: str, worker: Worker | None, failed: dict[str, str]) -> Record:
    """A flat object for JSON; its median_ms is None and `failure` says why if it has no result."""
    failure = worker.failure if worker else failed[ENGINES[engine].needs]
    row = {
        "model": job.model,
        "batch": job.batch,
        "threads": job.threads,
        "engine": engine,
        "version": version(ENGINES[engine].package),
        "failure": failure,
        "median_ms": None,
    }
    if failure:
        return row
    timing = Timing(tuple(worker.rounds_ms))
    return row | {
        **timing.record(),
        "min_ms": worker.best_ms,
        "rounds_ms": worker.rounds_ms,
        **worker.facts,
    }


def export(model: str, batch: int, folder: Path, engines: Sequence[str]) -> dict[str, str]:
    """Makes what the engines read, in a process of its own; why a format could not be made."""
    formats = sorted({ENGINES[name].needs for name in engines} - {None})
    command = [sys.executable, ROOT / "exports.py", model, str(batch), folder, *formats]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"peers: {model} could not be prepared:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def exported(
    model: str, batch: int, cache: Path, engines: Sequence[str]
) -> tuple[Path, dict[str, str]]:
    """The folder of what the engines read, made if it is not there, and what could not be made."""
    folder = folder_of(cache, model)
    return folder, export(model, batch, folder, engines)


def rows_of(records: Sequence[Record]) -> Iterator[tuple[tuple[int, int], list[list[Record]]]]:
    """((batch, threads), the records of each model), in the order they come."""
    groups: dict[tuple[int, int], dict[str, list[Record]]] = {}
    for r in records:
        models = groups.setdefault((r["batch"], r["threads"]), {})
        models.setdefault(r["model"], []).append(r)
    for key, models in groups.items():
        yield key, list(models.values())


def times_of(row: Sequence[Record], statistic: str) -> dict[str, float]:
    """Milliseconds of each engine that has a result."""
    return {r["engine"]: r[statistic] for r in row if r["median_ms"] is not None}


def ratio(row: Sequence[Record], statistic: str, peers: str = "") -> float | None:
    """How many times faster than the best peer ours is; None without one of them.

    peers: the beginning of the names of those that count."""
    times = times_of(row, statistic)
    others = [ms for name, ms in times.items() if not ENGINES[name].ours and name.startswith(peers)]
    mine = [ms for name, ms in times.items() if name.startswith(OURS)]
    return min(others) / min(mine) if others and mine else None


def tables(records: Sequence[Record], statistic: str) -> list[harness.Table]:
    """One for each batch and number of threads."""
    made = []
    for (batch, threads), rows in rows_of(records):
        used = [name for name in ENGINES if any(name in times_of(r, statistic) for r in rows)]
        lines = [cells(row, used, statistic) for row in rows]
        if len(rows) > 1:
            means = [geometric_mean(rows, statistic, peers) for peers in ("", "torch")]
            lines.append(["geometric mean", *[""] * len(used), *means])
        title = f"Batch {batch}, {threads} thread{'s' * (threads > 1)}, {statistic} in ms"
        header = ["model", *used, "vs best peer", "vs best torch"]
        made.append(harness.Table(title, header, lines))
    return made


def failures(records: Sequence[Record]) -> list[str]:
    return [f"{r['model']}, {r['engine']}: {r['failure']}" for r in records if r["failure"]]


def render(records: Sequence[Record], statistic: str) -> str:
    """The tables, in which the fastest of a row is bold, and why engines failed."""
    parts = []
    for table in tables(records, statistic):
        parts += [table.title, "", markdown(table.columns, table.rows), ""]
    return "\n".join([*parts, *failures(records), ""])


def geometric_mean(rows: Sequence[Sequence[Record]], statistic: str, peers: str) -> str:
    ratios = [value for row in rows if (value := ratio(row, statistic, peers))]
    return f"{statistics.geometric_mean(ratios):.2f}x" if ratios else "-"


def cells(row: Sequence[Record], engines: Sequence[str], statistic: str) -> list[str]:
    times = times_of(row, statistic)
    best = min(times.values(), default=None)
    texts = [row[0]["model"]]
    for name in engines:
        text = f"{times[name]:.2f}" if name in times else "-"
        texts.append(f"**{text}**" if times.get(name) == best else text)
    for peers in ("", "torch"):
        value = ratio(row, statistic, peers)
        texts.append(f"{value:.2f}x" if value else "-")
    return texts


def context(args: argparse.Namespace) -> dict[str, Any]:
    versions = {each.package: version(each.package) for each in ENGINES.values()}
    installed = [f"{name} {each}" for name, each in versions.items() if each[0].isdecimal()]
    others = {"threads": args.threads, "dtype": args.precision, "busy": args.busy}
    return circumstances(**others, versions=", ".join(installed))


def merged(paths: Sequence[Path], records: Sequence[Record]) -> list[Record]:
    """The records of files and of this run; the later takes the place of the same measurement."""
    by_key = {}
    loaded = [r for path in paths for r in json.loads(path.read_text())["results"]]
    for r in [*loaded, *records]:
        by_key[r["model"], r["batch"], r["threads"], r["engine"]] = r
    return list(by_key.values())


def write(args: argparse.Namespace, records: Sequence[Record]) -> None:
    if args.json:
        made = tables(records, args.statistic)
        harness.write(args.json, args.title, context(args), made, failures(records), records)
    if args.svg:
        title = "Speed by model, batch and threads, best peer = 1 (to the right is faster)"
        args.svg.write_text(chart.draw(title, rows_to_draw(records, args.statistic)))


def rows_to_draw(records: Sequence[Record], statistic: str) -> dict[str, dict[str, float]]:
    """For the chart: milliseconds by row and engine."""
    return {
        f"{row[0]['model']}, {batch}, {threads}T": times_of(row, statistic)
        for (batch, threads), rows in rows_of(records)
        for row in rows
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__, threads=[1, 2], seconds=15.0)
    known = [*MODELS, *TIMED]
    option = parser.add_argument
    option("models", nargs="*", metavar="MODEL", help=f"{', '.join(known)}, or module:factory")
    option("--batch", type=harness.numbers, default=[1], help="default: 1")
    option(
        "--precision",
        choices=TOLERANCES,
        default="float32",
        help="compare the engines that compute in it",
    )
    option("--engines", type=harness.names(ENGINES), help="a,b,c instead of all of these")
    option("--skip", type=harness.names(ENGINES), default=[], help="engines to leave out")
    option("--busy", type=positive, default=0, metavar="N", help="processes that compute meanwhile")
    option("--statistic", choices=("median_ms", "min_ms"), default="median_ms")
    option("--svg", type=output_path, help="write a chart")
    option("--load", type=Path, nargs="+", default=[], help="JSON files to include")
    add_cache_option(parser)
    args = parser.parse_args(argv)
    unknown = [name for name in args.models if name not in known and ":" not in name]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; choose from {', '.join(known)}")
    if not args.models and not args.load:
        args.models = list(MODELS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    compared = [name for name, each in ENGINES.items() if each.precision == args.precision]
    engines = [name for name in args.engines or compared if name not in args.skip]
    records: list[Record] = []
    words = {key: each for key, each in context(args).items() if key not in ("threads", "versions")}
    print(describe(words, args.precision), end="\n\n", flush=True)
    for model in args.models:
        for batch in args.batch:
            folder, failed = exported(model, batch, args.cache, engines)
            for threads in args.threads:
                job = Job(model, batch, threads, str(folder))
                rows = run_row(job, engines, failed, args.seconds, args.busy)
                records += rows
                print(render(rows, args.statistic), flush=True)
                write(args, merged(args.load, records))
    records = merged(args.load, records)
    write(args, records)
    if len(args.models) != 1 or args.load:
        print(render(records, args.statistic))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
