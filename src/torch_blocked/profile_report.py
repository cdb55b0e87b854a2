"""A profile as a table for a terminal, as JSON, and as a trace for Perfetto."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from torch_blocked import _C
from torch_blocked.profile_rows import Recorded, Row, module_of
from torch_blocked.text_table import columns


@dataclass(frozen=True)
class Roofs:
    """The most that this machine can do."""

    gflops: float  # float32 FMAs of as many cores as torch has threads
    gbs: float  # read and written by copies beyond the caches


@cache
def _roofs(threads: int) -> Roofs:
    return Roofs(_C.fma_peak_gflops() * threads, _C.memory_bandwidth_gbs())


def roofs() -> Roofs:
    """The roofs, measured when first asked for, which takes some tenths of a second."""
    return _roofs(torch.get_num_threads())


def of_roof(row: Row) -> str:
    """The share of the roof that limits a row: "83 % FMA". Caches are faster than memory, so a
    share of the bandwidth may be above 100 %."""
    if not row.ms or not row.bytes:
        return ""
    compute, memory = row.gflops / roofs().gflops, row.gbs / roofs().gbs
    share, name = max((compute, "FMA"), (memory, "GB/s"))
    return f"{100 * share:.0f} % {name}"


HEADER = ("module", "op", "in", "out", "implementation", "calls", "ms", "GF/s", "GB/s", "roof", "%")


def cells(row: Row, wall_ms: float) -> tuple[str, ...]:
    """A row as text, by HEADER."""
    return (
        row.module,
        row.op if row.in_thread else f"{row.op} (another thread)",
        row.src,
        row.dst,
        row.implementation,
        str(row.calls),
        f"{row.ms:.3f}",
        f"{row.gflops:.1f}" if row.flops else "",
        f"{row.gbs:.1f}" if row.bytes else "",
        of_roof(row),
        f"{100 * row.ms / wall_ms:.1f}" if wall_ms else "",
    )


def way_out(event: _C.Event) -> str:
    """What to do about a fallback or a refused kernel."""
    if event.kind == _C.Kind.ref:
        return "nothing, if another kernel ran; else x.to_blocked(), whose block has most kernels"
    return f"x.to_dense() before {event.op} and .to_blocked() after it, or leave that part dense"


def _from_here(line: str) -> str:
    """A line of code with its file, relative to the current folder if it lies below that."""
    return line.removeprefix(os.path.join(os.getcwd(), ""))


FALLBACK_HEADER = ("fallback", "module", "line", "why", "way out", "calls")


def fallbacks(profile: Recorded) -> list[tuple[str, ...]]:
    """By FALLBACK_HEADER: ops that ran on dense copies, and `ref` kernels that were refused."""
    found = [
        (each.op, module_of(each), _from_here(each.line), each.detail, way_out(each))
        for each in profile.events
        if each.kind in (_C.Kind.fallback, _C.Kind.ref)
    ]
    return [(*each, str(found.count(each))) for each in dict.fromkeys(found)]


def summary(profile: Recorded) -> str:
    """The counts, with torch's reorders beside ours."""

    def counted(kind: _C.Kind, word: str) -> str:
        number = sum(each.kind == kind for each in profile.events)
        return f"{number} {word}{'' if number == 1 else 's'}"

    inside = f"{profile.torch_reorders} of torch's oneDNN inside of dense convolutions"
    if not profile.catches:
        inside = "those of torch's oneDNN not recorded"
    reorders = f"{counted(_C.Kind.reorder, 'reorder')} by torch_blocked, {inside}"
    packs = counted(_C.Kind.pack, "weight pack")
    return f"{reorders}; {packs}, {counted(_C.Kind.fallback, 'fallback')}"


def table(profile: Recorded) -> str:
    rows = [cells(row, profile.wall_ms) for row in profile.rows]
    parts = [columns(HEADER, rows, "lllllrrrrrr")]
    total = sum(row.ms for row in profile.rows if row.in_thread)
    parts.append(f"{total:.3f} ms in rows, {profile.wall_ms:.3f} ms by the clock")
    parts.append(summary(profile))
    if found := fallbacks(profile):
        parts.append(columns(FALLBACK_HEADER, found, "lllllr"))
    return "\n\n".join(parts)


def json_text(profile: Recorded) -> str:
    rows = []
    for row in profile.rows:
        each = asdict(row)
        del each["first_ns"]
        each |= {"gflops": row.gflops, "gbs": row.gbs, "of_roof": of_roof(row)}
        rows.append(each)
    content = {
        "wall_ms": profile.wall_ms,
        "reorders": sum(each.kind == _C.Kind.reorder for each in profile.events),
        "torch_reorders": profile.torch_reorders if profile.catches else None,
        "threads": torch.get_num_threads(),
        "roofs": asdict(roofs()),
        "rows": rows,
        "fallbacks": [dict(zip(FALLBACK_HEADER, each, strict=True)) for each in fallbacks(profile)],
    }
    return json.dumps(content, indent=1)


def chrome_trace(profile: Recorded) -> str:
    begin = profile.span.begin_ns
    events: list[dict[str, Any]] = []
    for each in profile.all:
        if each.kind == _C.Kind.onednn:
            continue  # it has a duration, but no start
        name = f"{each.module} {each.op}".strip()
        if each.is_backward:
            name = f"backward of {name}"
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": each.kind.name,
                "pid": os.getpid(),
                "tid": each.thread,
                "ts": (each.start_ns - begin) / 1e3,
                "dur": each.time_ns / 1e3,
                "args": {
                    "module": each.module,
                    "in": each.src,
                    "out": each.dst,
                    "implementation": each.implementation,
                    "detail": each.detail,
                    "bytes": each.bytes,
                    "flops": each.flops,
                },
            }
        )
    events.sort(key=lambda event: event["ts"])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
