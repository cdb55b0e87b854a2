"""What the soak counts, how it measures memory, and what it takes for a failure."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from soak_models import SOURCES, Wrong

from torch_blocked import _C
from torch_blocked.optimized_module import OptimizedModule

MEBIBYTE = 2**20


class Counts:
    """What callers and children did. Any thread may note something."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # the first traceback of each kind
        self.children: dict[str, Counter[int]] = {}
        self.signals: Counter[str] = Counter()

    def called(self, activity: str) -> None:
        with self._lock:
            self.calls[activity] += 1

    def was_refused(self, activity: str) -> None:
        with self._lock:
            self.refused[activity] += 1

    def failed(self, activity: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{activity}: {type(error).__name__} at {os.path.basename(place.filename)}"
        with self._lock:
            (self.wrong if isinstance(error, Wrong) else self.errors)[activity] += 1
            self.first.setdefault(f"{kind}:{place.lineno}", text)

    def ended(self, child: str, code: int, said: str) -> None:
        """A child's exit code; a signal that ended it is a negative one."""
        with self._lock:
            self.calls[child] += 1
            self.children.setdefault(child, Counter())[code] += 1
            if code:
                self.first.setdefault(f"{child}: exit code {code}", said)


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    ]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo

_M_ARENA_MAX = -8  # of <malloc.h>


def bound_arenas() -> None:
    """Call it before there are threads. glibc gives threads up to 8 arenas a core, and each keeps
    pages between what is in use: they grew for 30 minutes while nothing was lost."""
    _libc.mallopt(_M_ARENA_MAX, 2)


@dataclass(frozen=True)
class Sample:
    """The process at a quiet point. Memory in bytes."""

    seconds: float
    resident: int
    allocated: int  # what malloc() has given and not got back
    packed: int
    idle: int
    objects: int  # that Python's collector of garbage knows
    modules: int  # optimized ones that are alive
    descriptors: int
    threads: int


def sample(seconds: float) -> Sample:
    """Call it at a quiet point, where nothing runs: samples can only be compared so.

    glibc keeps what was freed between what is in use, more or less of it by chance. So the free
    pages go back to the system first: return_idle_memory() empties the pool and calls malloc_trim.
    """
    gc.collect()
    _C.return_idle_memory()
    objects = gc.get_objects()
    modules = sum(type(each) is OptimizedModule for each in objects)
    heap = _libc.mallinfo2()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Sample(
        seconds,
        pages * resource.getpagesize(),
        heap.uordblks + heap.hblkhd,
        _C.packed_weight_bytes(),
        _C.idle_pool_bytes(),
        len(objects),
        modules,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def growth(samples: Sequence[Sample], of: str) -> float:
    """The change of a figure from the first of these samples to the last, along the line of the
    least squares, in percent of its mean."""
    if len(samples) < 2:
        return 0.0
    times, values = [each.seconds for each in samples], [getattr(each, of) for each in samples]
    mean_time, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_time) ** 2 for t in times)
    slope = sum((t - mean_time) * (v - mean) for t, v in zip(times, values, strict=True)) / spread
    return 100 * slope * (times[-1] - times[0]) / mean if mean else 0.0


@dataclass
class Figures:
    """The counts and samples of a run of this many seconds."""

    seconds: float
    within: float  # percent that resident memory may grow by
    counts: Counts = field(default_factory=Counts)
    samples: list[Sample] = field(default_factory=list)

    def settled(self) -> list[Sample]:
        """The samples after the first tenth of the time."""
        return [each for each in self.samples if each.seconds >= self.seconds / 10]

    def failures(self) -> list[str]:
        """A sentence for each thing that is wrong at the end."""
        counts, settled = self.counts, self.settled()
        found = [f"{n} wrong results of {name}" for name, n in sorted(counts.wrong.items())]
        found += [f"{n} errors of {name}" for name, n in sorted(counts.errors.items())]
        found += [
            f"{n} children of {name} ended with {'signal' if code < 0 else 'exit code'} {abs(code)}"
            for name, codes in sorted(counts.children.items())
            for code, n in sorted(codes.items())
            if code
        ]
        if counts.signals["handled"] == 0 < counts.signals["sent"]:
            found.append(f"no handler ran for {counts.signals['sent']} signals")
        if len(settled) < 2:
            return [*found, f"only {len(settled)} samples after the first tenth of the time"]
        first, last = settled[0].descriptors, settled[-1].descriptors
        if last > first:
            found.append(f"descriptors: {first} after the first tenth of the time, {last} at last")
        # One stands for each model; what was replaced is gone, whatever was running it.
        if (alive := settled[-1].modules) > len(SOURCES):
            found.append(f"{alive} optimized modules are alive at last, {len(SOURCES)} in use")
        grown = growth(settled, "resident")
        if grown > self.within:
            found.append(f"resident memory grew by {grown:.1f} %, allowed: {self.within:g} %")
        return found

    def table(self) -> str:
        """All figures so far."""
        counts = self.counts
        lines = [f"{'activity':22}{'calls':>9}{'refused':>9}{'wrong':>7}{'errors':>8}"]
        tallies = counts.calls, counts.refused, counts.wrong, counts.errors
        for name in sorted(set().union(*tallies) - set(counts.children)):
            calls, refused, wrong, errors = (tally[name] for tally in tallies)
            lines.append(f"{name:22}{calls:9}{refused:9}{wrong:7}{errors:8}")
        lines.append("\nchildren              exit codes")
        for name, codes in sorted(counts.children.items()):
            text = ", ".join(f"{code}: {n}" for code, n in sorted(codes.items()))
            lines.append(f"{name:22}{text}")
        sent, handled = counts.signals["sent"], counts.signals["handled"]
        lines += [f"\nSIGUSR1: {sent} sent, {handled} handled (some may come as one)", ""]
        return "\n".join([*lines, *self._memory()])

    def _memory(self) -> list[str]:
        """The samples: the first one, the first after a tenth of the time, and the last."""
        if not self.samples:
            return []
        settled = self.settled() or self.samples[-1:]
        chosen = [self.samples[0], settled[0], self.samples[-1]]
        rows = {
            "at second": [f"{each.seconds:.0f}" for each in chosen],
            "resident, MiB": [f"{each.resident / MEBIBYTE:.1f}" for each in chosen],
            "allocated, MiB": [f"{each.allocated / MEBIBYTE:.1f}" for each in chosen],
            "packed weights, MiB": [f"{each.packed / MEBIBYTE:.2f}" for each in chosen],
            "idle pool, MiB": [f"{each.idle / MEBIBYTE:.2f}" for each in chosen],
            "Python's objects": [str(each.objects) for each in chosen],
            "optimized modules": [str(each.modules) for each in chosen],
            "descriptors": [str(each.descriptors) for each in chosen],
            "threads": [str(each.threads) for each in chosen],
        }
        lines = [f"{'memory':22}{'begin':>9}{'a tenth':>9}{'now':>9}"]
        lines += [f"{name:22}" + "".join(f"{x:>9}" for x in row) for name, row in rows.items()]
        return [
            *lines,
            f"resident memory since the first tenth: {growth(settled, 'resident'):+.2f} % "
            f"(allowed: {self.within:g} %), allocated: {growth(settled, 'allocated'):+.2f} %, "
            f"{len(settled)} samples",
        ]
