"""The data of explain(): layers, runs of the model, and the roofs of the machine."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torch_blocked import _C
from torch_blocked.text_table import columns


@dataclass
class Alternative:
    """An implementation that could have run in place of a layer's. microseconds: measured alone on
    tensors of the layer's sizes; or, with whole=True, how much longer the whole model would take,
    by such times and by estimates of reorders; 0 if nothing was measured. refusal: why it cannot
    run, or empty."""

    implementation: str
    format: str
    microseconds: float = 0.0
    refusal: str = ""
    whole: bool = False


@dataclass
class Layer:
    """One op of a run. ms: milliseconds in one run. reads: the indices of the layers that made its
    inputs; -1 is an input of the model. flops: number of floating-point operations of its products.
    bytes: read and written, without weights."""

    module: str
    op: str
    kind: str  # "layer" or "reorder"
    dims_in: list[list[int]]
    dims_out: list[int]
    dtype: str
    format_in: str
    format_out: str
    implementation: str
    ms: float
    reads: list[int]
    line: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    blocked: bool = False  # whether it computes on blocked memory
    reason: str = ""  # why it is not blocked, or why a blocked layer has this implementation
    advice: str = ""  # what to do about the reason
    alternatives: list[Alternative] = field(default_factory=list)
    reorders: int = 0  # before and after it, from and into other formats
    reorder_ms: float = 0.0
    inner_reorders: int = 0  # of its operands, within its own time
    error: float | None = None  # as of compare(), if explain() was asked for errors
    added: float | None = None

    @property
    def next_best(self) -> str:
        """The fastest alternative in words, with its cost and how that was found."""
        own = (self.implementation, self.format_out)
        timed = [
            each
            for each in self.alternatives
            if each.microseconds
            and not each.whole
            and (each.implementation, each.format.rpartition(" ")[2]) != own
        ]
        if timed:
            best = min(timed, key=lambda each: each.microseconds)
            where = f" in {best.format}" if best.format else ""
            return f"{best.implementation}{where}: {best.microseconds / 1e3:.3f} ms alone"
        whole = [each for each in self.alternatives if each.whole and _costs(each)]
        if not whole:
            return ""
        best = min(whole, key=lambda each: each.microseconds)
        return f"{best.format}: {best.microseconds / 1e3:+.3f} ms in all, by estimates"

    @property
    def sentence(self) -> str:
        """Why it is not blocked, what it costs and what to do, as one line."""
        if self.blocked or self.kind == "reorder":
            return self.reason
        runs = [_where(self.format_out)]
        if count := self.reorders + self.inner_reorders:
            runs.append(f"{count} reorder{'s' * (count > 1)}")
        runs.append(f"{self.ms + self.reorder_ms:.3f} ms")
        return "; ".join(filter(None, (self.reason, ", ".join(runs), self.advice)))

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "next_best": self.next_best,
            "sentence": self.sentence,
        }
        return asdict(self) | derived


@dataclass
class Run:
    """The layers of a model, in order of execution. note: what runs, and why, if it is not one plan
    of the whole model."""

    layers: list[Layer]
    note: str = ""

    @property
    def reorders(self) -> list[Layer]:
        return [each for each in self.layers if each.kind == "reorder"]

    @property
    def ms(self) -> float:
        return sum(each.ms for each in self.layers)

    def table(self) -> str:
        errors = any(each.error is not None for each in self.layers)
        rows = [
            (
                each.module or "(model)",
                each.op,
                "x".join(map(str, each.dims_out)),
                _between(each.format_in, each.format_out),
                "-" if each.kind == "reorder" else "yes" if each.blocked else "no",
                each.implementation,
                f"{each.ms:.3f}",
                *([_error(each.error), _error(each.added)] if errors else []),
                each.next_best,
                each.sentence,
            )
            for each in self.layers
        ]
        more = ("error", "added") if errors else ()
        header = (
            "module",
            "op",
            "dims",
            "format",
            "blocked",
            "by",
            "ms",
            *more,
            "next best",
            "why",
        )
        table = columns(header, rows, "llllllr" + "r" * len(more) + "ll")
        blocked = sum(each.blocked for each in self.layers if each.kind == "layer")
        inner = sum(each.inner_reorders for each in self.layers)
        moved = sum(each.ms for each in self.reorders)
        title = (
            f"{blocked} of {len(self.layers) - len(self.reorders)} layers blocked, "
            f"reorders: {len(self.reorders)} of {moved:.3f} ms and {inner} inside of layers, "
            f"{self.ms:.3f} ms in all"
        )
        return "\n".join(filter(None, (self.note, title, table)))

    def count_reorders(self) -> None:
        """Sets each layer's number of reorders next to it, and their time."""
        for reorder in self.reorders:
            around = {at for at in reorder.reads if at >= 0}
            index = self.layers.index(reorder)
            around |= {i for i, each in enumerate(self.layers) if index in each.reads}
            for layer in (self.layers[i] for i in around):
                layer.reorders += 1
                layer.reorder_ms += reorder.ms


def is_blocked_tag(tag: str) -> bool:
    """Whether a tag such as "nChw16c" is a blocked one: no other has a number."""
    return bool(re.search(r"\d", tag))


def _where(format_out: str) -> str:
    """The memory on which a layer that is not blocked runs, in words."""
    if is_blocked_tag(format_out):
        return "runs on a dense copy"
    return f"runs in {format_out}" if format_out else "runs on plain memory"


def _costs(each: Alternative) -> bool:
    """Whether it would take longer, by a finite time: infinity means that no kernel does it."""
    return 0 < each.microseconds < float("inf")


def _error(number: float | None) -> str:
    return "-" if number is None else f"{number:.1e}"


def _between(before: str, after: str) -> str:
    return after or before or "-" if before in ("", after) else f"{before} -> {after or '-'}"


def split_reason(reason: str) -> tuple[str, str]:
    """The problem and the advice, which "; " separates in all messages of this package."""
    what, _, advice = reason.partition("; ")
    return what, advice


def roofs() -> dict[str, float]:
    """The most that the CPU can do with all its threads, measured now: float32 GFLOP/s, and GB/s of
    reads and writes of memory."""
    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return {
        "gflops": _C.fma_peak_gflops() * torch.get_num_threads(),
        "gbps": 2 * source.nbytes / min(seconds) / 1e9,
        "threads": torch.get_num_threads(),
    }
