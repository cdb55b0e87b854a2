"""Interleaved timing: the rivals take turns, so that a disturbance of the machine hits them all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torch_blocked.progress import Bar

# One sample of a rival is the mean of as many calls as fit into this time, at most MAX_CALLS.
SAMPLE_MS = 20.0
MAX_CALLS = 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, one for each round."""

    rounds_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.rounds_ms)

    @property
    def iqr_ms(self) -> float:
        """Third less first quartile; 0 where there is only one round."""
        first, _, third = quartiles(self.rounds_ms)
        return third - first

    @property
    def min_ms(self) -> float:
        return min(self.rounds_ms)

    def record(self) -> dict[str, float]:
        """The statistics as a row of JSON or CSV has them."""
        return {"median_ms": self.median_ms, "iqr_ms": self.iqr_ms, "min_ms": self.min_ms}


def quartiles(rounds_ms: Sequence[float]) -> list[float]:
    """First, median and third; of one round, that round."""
    if len(rounds_ms) < 2:
        return list(rounds_ms) * 3
    return statistics.quantiles(rounds_ms, n=4, method="inclusive")


def time_interleaved(
    rivals: Mapping[str, Callable[[], object]], rounds: int, warmups: int = 2, what: str = ""
) -> dict[str, Timing]:
    """Times each rival once a round.

    The order is rotated by one each round, so that each rival is first in turn. A sample starts
    with one call that is not timed: it brings the caches back to what the rival left in them.
    what: a word on the rivals, for the progress.
    """
    names = list(rivals)
    samples: dict[str, list[float]] = {name: [] for name in names}
    collects = gc.isenabled()
    with Bar(what, len(names) * (1 + rounds)) as shown:
        for call in rivals.values():
            for _ in range(warmups):
                call()
            shown.update()
        fastest_ms = min(sample_ms(call, 1) for call in rivals.values())
        calls = max(1, min(MAX_CALLS, int(SAMPLE_MS / fastest_ms)))
        gc.collect()
        gc.disable()
        try:
            for turn in range(rounds):
                shift = turn % len(names)
                for name in names[shift:] + names[:shift]:
                    rivals[name]()
                    samples[name].append(sample_ms(rivals[name], calls))
                    shown.update()
        finally:
            if collects:
                gc.enable()
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def sample_ms(call: Callable[[], object], calls: int) -> float:
    """Mean milliseconds of `calls` calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e3 / calls


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """torch.set_num_threads(count), and back; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
