"""ultralytics' YOLO networks, optimized, beside OpenVINO: error and time.

    python benchmarks/yolo.py [yolo11n yolov8n-seg ...] --sizes 640x640,480x640 --batch 1,3

Random weights, as predict() runs them: fused, without what it does to boxes. Engines have processes
of their own and take turns, as in peers.py; each result is compared with the network's in float64
first. `whole` is "no" where the network could not be captured as one graph. See README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

import peers
from engines import Job, add_cache_option
from exports import folder_of
from zoo.yolo import NETWORKS, SIZES

from torch_blocked.bench.arguments import names, numbers, output_path, positive
from torch_blocked.text_table import markdown

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
    return line + [f"{peer[k] / ours[k]:.2f}x" if both else "-" for k in ("min_ms", "median_ms")]


def report(rows: Sequence[Sequence[peers.Record]]) -> str:
    """The table, the geometric mean of the speeds, and what failed."""
    lines = [markdown(HEADER, [cells(row) for row in rows], text_columns=2)]
    ratios = [ratio for row in rows if (ratio := peers.ratio(row, "min_ms"))]
    if ratios:
        mean, least = statistics.geometric_mean(ratios), min(ratios)
        lines += ["", f"speed by least times: geometric mean {mean:.2f}x, least {least:.2f}x"]
    failed = [each for row in rows for each in row if each["failure"]]
    lines += [f"{each['model']}, {each['engine']}: {each['failure']}" for each in failed]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = ["x".join(map(str, size)) for size in SIZES]
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--sizes", type=names(sizes), default=sizes, help=", ".join(sizes))
    parser.add_argument("--batch", type=numbers, default=[1, 3], help="default: 1,3")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="of timing for a row")
    parser.add_argument("--json", type=output_path, help="write every measurement")
    add_cache_option(parser)
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in NETWORKS]
    if unknown:
        parser.error(f"unknown network {unknown[0]!r}; choose from {', '.join(NETWORKS)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if an engine failed or was wrong."""
    chosen = parse(arguments)
    rows = []
    for model in (f"{name}@{size}" for name in chosen.names or NETWORKS for size in chosen.sizes):
        for batch in chosen.batch:
            folder = folder_of(chosen.cache, model)
            failed = peers.export(model, batch, folder, [PEER, OURS])
            job = Job(model, batch, chosen.threads, str(folder))
            rows.append(peers.run_row(job, [PEER, OURS], failed, chosen.seconds))
            print(*cells(rows[-1]), file=sys.stderr, flush=True)
            if chosen.json:
                records = [record for row in rows for record in row]
                written = {"context": peers.context(0, "float32"), "results": records}
                chosen.json.write_text(json.dumps(written, indent=1) + "\n")
    print(report(rows))
    return 1 if any(each["failure"] for row in rows for each in row) else 0


if __name__ == "__main__":
    sys.exit(main())
