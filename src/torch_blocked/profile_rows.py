"""From the events of a profile to rows that sum to its time.

Each event lies in the event that was open when it happened: an op in its module, a reorder in its
op. A row has the time of its events without the events in them, so the rows of a thread sum to its
time. The time of a module without its ops is Python and dispatch. The profile's own work is a row
too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch_blocked import _C

# The name of a row for time that no op accounts for.
BETWEEN = "(Python, dispatch)"
OUTSIDE = "(outside of modules)"
RECORDING = "(the profile itself)"

_COUNTED = (_C.Kind.reorder, _C.Kind.pack, _C.Kind.fallback, _C.Kind.ref)
_TIMED = (_C.Kind.reorder, _C.Kind.pack, _C.Kind.module, _C.Kind.operator, _C.Kind.onednn)
_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "s8": 1, "u8": 1, "f64": 8}
# "src:f32::blocked:abcd::f0", as "src_f32::blocked:abcd:f0" before oneDNN 3.4.
_SIDE = re.compile(r"(src|dst)[:_](\w+):\w*:\w*:(\w*)")


@dataclass
class Row:
    """The properties that calls share, and sums over these calls. kind: "op", "reorder",
    "torch reorder", "pack", "between" or "recording"."""

    kind: str
    module: str
    op: str
    src: str = ""
    dst: str = ""
    implementation: str = ""
    line: str = ""
    in_thread: bool = True  # in the thread of the block
    calls: int = 0
    ms: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    first_ns: int = field(default=0, compare=False)

    @property
    def gflops(self) -> float:
        """GFLOP/s."""
        return self.flops / self.ms / 1e6 if self.ms else 0.0

    @property
    def gbs(self) -> float:
        """GB/s read and written, weights included."""
        return self.bytes / self.ms / 1e6 if self.ms else 0.0


@dataclass(frozen=True)
class Span:
    """The time of a `with` block: its beginning and end on the steady clock, and its thread."""

    begin_ns: int = 0
    end_ns: int = 0
    thread: int = 0


@dataclass(frozen=True)
class Recorded:
    """The events that a profile has recorded."""

    all: list[_C.Event] = field(default_factory=list)
    span: Span = Span()
    catches: bool = True  # whether reorders of torch's oneDNN are recorded too

    @property
    def events(self) -> list[_C.Event]:
        """The events of the kinds that are always counted."""
        return self._once("events", lambda: [e for e in self.all if e.kind in _COUNTED])

    @property
    def rows(self) -> list[Row]:
        return self._once("rows", self._rows_of_span)

    def _rows_of_span(self) -> list[Row]:
        return rows_of(self.all, self.span) if self.span != Span() else []

    def _once(self, name: str, make: Callable[[], list[Any]]) -> list[Any]:
        """The first result of make(). functools.cached_property has one lock for all objects, and a
        fork may leave that held."""
        made: dict[str, list[Any]] = self.__dict__.setdefault("_made", {})
        if name not in made:
            made[name] = make()
        return made[name]

    @property
    def torch_reorders(self) -> int:
        return sum(row.calls for row in self.rows if row.kind == "torch reorder")

    @property
    def wall_ms(self) -> float:
        return (self.span.end_ns - self.span.begin_ns) / 1e6


@dataclass
class TorchReorder:
    """A reorder as torch's oneDNN printed it."""

    src: str
    dst: str
    dims: str
    bytes: int
    ms: float


def torch_reorder(line: str) -> TorchReorder | None:
    """The reorder that a line of oneDNN's verbose mode reports; None for other lines."""
    fields = line.split(",")
    if "exec" not in fields or "reorder" not in fields:
        return None
    sides = {each[0]: each for each in _SIDE.findall(line)}
    if sides.keys() != {"src", "dst"}:
        return None
    dims, ms = fields[-2], float(fields[-1])
    elements = 1
    for size in dims.split("x"):
        elements *= int(size)
    moved = elements * sum(_BYTES.get(sides[each][1], 4) for each in ("src", "dst"))
    return TorchReorder(sides["src"][2], sides["dst"][2], dims, moved, ms)


def rows_of(events: Iterable[_C.Event], span: Span) -> list[Row]:
    """Everything that took time, in the order in which it first ran."""
    timed = [each for each in events if each.kind in _TIMED]
    own = _own_times(timed)
    rows: dict[tuple[object, ...], Row] = {}
    top = recording = 0.0
    ids = {each.id for each in timed}
    for event in timed:
        in_thread = event.thread == span.thread
        if in_thread and event.parent not in ids and event.kind != _C.Kind.onednn:
            top += event.time_ns / 1e6
        recording += in_thread * event.recording_ns / 1e6
        found = _row(event)
        if found is None:
            continue
        found.in_thread = in_thread
        key = (found.kind, found.module, found.op, found.src, found.dst, found.implementation)
        row = rows.setdefault((*key, found.line, in_thread), found)
        row.calls += 1
        row.ms += own[event.id]
        row.flops += event.flops
        row.bytes += found.bytes if row is not found else 0
        row.first_ns = min(row.first_ns, event.start_ns)
    wall = (span.end_ns - span.begin_ns) / 1e6
    result = sorted(rows.values(), key=lambda row: row.first_ns)
    result.append(Row("between", OUTSIDE, BETWEEN, calls=1, ms=wall - top))
    result.append(Row("recording", OUTSIDE, RECORDING, calls=len(timed), ms=recording))
    return result


def _own_times(events: list[_C.Event]) -> dict[int, float]:
    """Milliseconds of each event, without the events inside it and the recording of these."""
    own = {}
    for event in events:
        reorder = torch_reorder(event.detail) if event.kind == _C.Kind.onednn else None
        own[event.id] = reorder.ms if reorder else event.time_ns / 1e6
    total = dict(own)
    for event in events:
        if event.parent in own:
            own[event.parent] -= total[event.id]
        own[event.id] -= event.recording_ns / 1e6
    return own


def module_of(event: _C.Event) -> str:
    """The path of the module that caused the event; "backward of PATH" for its gradient."""
    return f"backward of {event.module or 'the model'}" if event.is_backward else event.module


# The step of a plan around a reorder, which has a row of its own.
_REORDER_STEP = "reorder"


def _row(event: _C.Event) -> Row | None:
    module = module_of(event)
    if event.kind == _C.Kind.module or event.op == _REORDER_STEP:
        return Row("between", module, BETWEEN, first_ns=event.start_ns)
    if event.kind == _C.Kind.onednn:
        reorder = torch_reorder(event.detail)
        if reorder is None:
            return None
        row = Row("torch reorder", module, f"reorder in {event.op}", first_ns=event.start_ns)
        row.src, row.dst = f"{reorder.src} [{reorder.dims.replace('x', ', ')}]", reorder.dst
        row.implementation, row.bytes = "torch's oneDNN", reorder.bytes
        return row
    if event.kind == _C.Kind.operator:
        row = Row("op", module, event.op, event.src, event.dst, event.implementation, event.line)
    elif event.kind == _C.Kind.reorder:
        row = Row("reorder", module, f"reorder by {event.op}")
        row.src, _, row.dst = event.detail.partition(" -> ")
        row.implementation = event.implementation
    else:
        row = Row("pack", module, f"pack weights of {event.op}", src=event.detail)
    row.first_ns, row.bytes = event.start_ns, float(event.bytes)
    return row
