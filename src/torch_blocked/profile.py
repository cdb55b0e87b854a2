"""Where a model's time goes: ops, reorders, weight packs, dense fallbacks, and Python between them,
each by the module that caused it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

import torch

from torch_blocked import _C, forks, module_paths, profile_page, profile_report
from torch_blocked.profile_rows import Recorded, Row, Span
from torch_blocked.text_table import written

_verbose_lock = forks.lock()
_verbose_users = 0


class profile:
    """Records what happens inside a `with` block, in every thread: eager ops, blocked or dense, the
    steps of optimized models, and backward.

    >>> with torch_blocked.profile() as p:
    ...     model(x.to_blocked())
    >>> p.reorders, p.fallbacks, p.packs, p.refs
    >>> print(p.table())

    torch_reorders: whether to record the reorders of torch's own oneDNN inside dense convolutions
        too. oneDNN reports them on C's standard output only, which is delayed and filtered
        meanwhile.

    reorders: copies of activations from one format into another by this package, `to_blocked` and
        `to_dense` included.
    torch_reorders: reorders by torch's oneDNN inside dense convolutions, of weights too. `reorders`
        does not count them, `summary()` gives both.
    packs: copies of weights into a kernel's format; none once the cache has them.
    fallbacks: ops that ran on a dense copy, because no blocked kernel takes them.
    refs: `ref` kernels that oneDNN offered and that were refused; they never run.
    `events` has each of these except torch's, with op, detail, module, bytes and time_ns. `rows`
    has everything that took time. For the thread of the block the rows sum to `wall_ms`."""

    def __init__(self, *, torch_reorders: bool = True) -> None:
        self._recorded = Recorded()
        self._catches = torch_reorders and not _prints_itself()
        self._stack = ExitStack()

    def __enter__(self) -> profile:
        self._stack.enter_context(module_paths.known())
        _C.start_observing(self._catches)  # measures its own cost first, which is not recorded
        self._position = _C.trace_start()
        if self._catches:
            _set_verbose(1)
        self._begin = time.perf_counter_ns()
        return self

    def __exit__(self, *_exception: object) -> None:
        end = time.perf_counter_ns()
        if self._catches:
            _set_verbose(-1)
        _C.stop_observing(self._catches)
        recorded = _C.trace_stop(self._position)
        self._stack.close()
        self._recorded = Recorded(
            recorded, Span(self._begin, end, _C.trace_thread()), self._catches
        )

    @property
    def events(self) -> list[_C.Event]:
        return self._recorded.events

    @property
    def rows(self) -> list[Row]:
        return self._recorded.rows

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
    def torch_reorders(self) -> int:
        return self._recorded.torch_reorders

    @property
    def reorder_ms(self) -> float:
        """Milliseconds in reorders of activations."""
        return sum(event.time_ns for event in self._of(_C.Kind.reorder)) / 1e6

    @property
    def wall_ms(self) -> float:
        """Milliseconds of the whole block."""
        return self._recorded.wall_ms

    @property
    def recording_ms(self) -> float:
        """The part of `wall_ms` that the profile itself took, as far as it can time that."""
        return sum(row.ms for row in self.rows if row.kind == "recording")

    def summary(self) -> str:
        """The counts in one line: reorders, reorders of torch's oneDNN, packs, fallbacks."""
        return profile_report.summary(self._recorded)

    def table(self) -> str:
        """Everything that took time, as aligned text: a row for each module, op, dims, formats and
        implementation, in the order in which they first ran; then the summary and the fallbacks."""
        return profile_report.table(self._recorded)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Rows, fallbacks and roofs as JSON text, also written to a file if a path is given."""
        return written(profile_report.json_text(self._recorded), path)

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Each call in the Trace Event format, for Perfetto and chrome://tracing. Also written to a
        file if a path is given."""
        return written(profile_report.chrome_trace(self._recorded), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs no other file and no network, also written to a file if a path is
        given."""
        return written(profile_page.page(self._recorded), path)


def _prints_itself() -> bool:
    """Whether the user asked for oneDNN's lines. Then the profile must not take them."""
    return any(
        os.environ.get(name, "0") not in ("", "0", "none")
        for name in ("ONEDNN_VERBOSE", "DNNL_VERBOSE")
    )


def _set_verbose(change: int) -> None:
    """Switches the verbose mode of torch's oneDNN on while any profile needs it."""
    global _verbose_users
    verbose: Any = torch._C._verbose
    with _verbose_lock:
        _verbose_users += change
        verbose.mkldnn_set_verbose(int(_verbose_users > 0))
