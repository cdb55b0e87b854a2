"""See what costs time without computing: reorders, weight packs, dense fallbacks, refused refs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch_blocked import _C
from torch_blocked.text_table import columns

_local = threading.local()


class profile:
    """Records what happens inside a `with` block, in every thread.

    >>> with torch_blocked.profile() as p:
    ...     model(x.to_blocked())
    >>> p.reorders, p.fallbacks, p.packs, p.refs
    >>> print(p.table())

    reorders: activations copied from one format into another, `to_blocked` and `to_dense` included.
    packs: weights copied into a kernel's format; none once the cache has them.
    fallbacks: ops that ran on a dense copy, because no blocked kernel takes them.
    refs: `ref` kernels that oneDNN offered and that were refused; never run.
    `events` has each with its op, detail, bytes and time_ns."""

    def __init__(self) -> None:
        self.events: list[_C.Event] = []

    def __enter__(self) -> profile:
        self._position = _C.trace_start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.events = _C.trace_stop(self._position)

    def _of(self, kind: _C.Kind) -> list[_C.Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def reorders(self) -> int:
        return len(self._of(_C.Kind.reorder))

    @property
    def packs(self) -> int:
        return len(self._of(_C.Kind.pack))

    @property
    def fallbacks(self) -> int:
        return len(self._of(_C.Kind.fallback))

    @property
    def refs(self) -> int:
        return len(self._of(_C.Kind.ref))

    @property
    def reorder_ms(self) -> float:
        """Time spent in reorders of activations."""
        return sum(event.time_ns for event in self._of(_C.Kind.reorder)) / 1e6

    def table(self) -> str:
        """The events summed by kind, op and detail, as aligned text."""
        sums: dict[tuple[str, str, str], list[float]] = {}
        for event in self.events:
            row = sums.setdefault((event.kind.name, event.op, event.detail), [0, 0, 0])
            row[0] += 1
            row[1] += event.bytes / 1e6
            row[2] += event.time_ns / 1e6
        rows = [
            (kind, op, str(count), f"{megabytes:.2f}", f"{ms:.3f}", detail)
            for (kind, op, detail), (count, megabytes, ms) in sums.items()
        ]
        return columns(("kind", "op", "count", "MB", "ms", "detail"), rows, "llrrrl")


@contextmanager
def strict() -> Iterator[None]:
    """Inside it, an op without a blocked kernel raises NotImplementedError instead of running on a
    dense copy. The sentence names the op, the formats and the way out. Per thread."""
    before = is_strict()
    _local.strict = True
    try:
        yield
    finally:
        _local.strict = before


def is_strict() -> bool:
    return bool(getattr(_local, "strict", False))
