"""ultralytics' YOLO networks, optimized, beside OpenVINO: error and time.

    python benchmarks/yolo.py [yolo11n yolov8n-seg ...] --sizes 640x640,480x640 --batch 1,3

Random weights, as predict() runs them: fused, without what it does to boxes. Engines have processes
of their own and take turns, as in peers.py; each result is compared with the network's in float64
first. `whole` is "no" where the network could not be captured as one graph."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import harness
import peers
from engines import Job, add_cache_option
from zoo.yolo import NETWORKS, SIZES

PEER, OURS = "openvino", "torch_blocked"
HEADER = [
    *("network", "size", "batch", "whole", "error", "openvino, min ms", "median"),
    *("ours, min ms", "median", "speed by min", "by median"),
]


def cells(row: Sequence[peers.Record]) -> list[str]:
    """A line of the table, of the records of one network, size and batch."""
    by_engine = {record["engine"]: record for record in row}
    peer, ours = by_engine[PEER], by_engine[OURS]
    name, _, size = ours["model"].partition("@")
    whole = {True: "yes", False: "no", None: "-"}[ours.get("whole")]
    error = "-" if ours["failure"] else f"{ours['relative_error']:.1e}"
    line = [name, size, str(ours["batch"]), whole, error]
    for record in (peer, ours):
        failed = bool(record["failure"])
        line += ["-" if failed else f"{record[key]:.2f}" for key in ("min_ms", "median_ms")]
    both = not (peer["failure"] or ours["failure"])
    ratios = [(peer[k], ours[k]) if both else (None, None) for k in ("min_ms", "median_ms")]
    return line + [harness.speed(*pair) for pair in ratios]


def notes(rows: Sequence[Sequence[peers.Record]]) -> list[str]:
    """The geometric mean of the speeds, and what failed."""
    ratios = [ratio for row in rows if (ratio := peers.ratio(row, "min_ms"))]
    mean = harness.mean_speed("speed by least times", ratios)
    return mean + peers.failures([record for row in rows for record in row])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__, threads=2, seconds=10.0)
    sizes = ["x".join(map(str, size)) for size in SIZES]
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--sizes", type=harness.names(sizes), default=sizes, help=", ".join(sizes))
    parser.add_argument("--batch", type=harness.numbers, default=[1, 3], help="default: 1,3")
    add_cache_option(parser)
    chosen = parser.parse_args(argv)
    unknown = [name for name in chosen.names if name not in NETWORKS]
    if unknown:
        parser.error(f"unknown network {unknown[0]!r}; choose from {', '.join(NETWORKS)}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if an engine failed or was wrong."""
    args = parse(argv)
    rows: list[list[peers.Record]] = []
    for model in (f"{name}@{size}" for name in args.names or NETWORKS for size in args.sizes):
        for batch in args.batch:
            folder, failed = peers.exported(model, batch, args.cache, [PEER, OURS])
            job = Job(model, batch, args.threads, str(folder))
            rows.append(peers.run_row(job, [PEER, OURS], failed, args.seconds))
            harness.progress(*cells(rows[-1]))
    records = [record for row in rows for record in row]
    table = harness.Table("", HEADER, [cells(row) for row in rows], text_columns=2)
    harness.finish(args, [table], notes(rows), records, seconds=args.seconds)
    return 1 if any(record["failure"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
