"""`python -m torch_blocked bench layers MODEL`: where a model's time goes, layer by layer, in each
format: what its kernels take, and what goes into reorders on their way.

Eager rows are the model's modules that have no others in them, timed by hooks; what runs between
them (sums, concats, views) is one row. Rows of the optimized model are the steps of its plan, of
which some are reorders. Reorders that torch's oneDNN does inside of dense convolutions are told
apart by further runs, with its verbose mode on; weights are among what it reorders."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.formats import CONTIGUOUS
from torch_blocked.optimized_module import OptimizedModule
from torch_blocked.progress import Bar
from torch_blocked.text_table import markdown

from . import arguments, models, plot
from .inference import CHANNELS_LAST, OPTIMIZED, blocked_tags, folded_module, in_format
from .measure import on_threads
from .report import circumstances, describe, progress, write_json

BETWEEN = "between modules"
KERNELS, REORDERS = "kernels", "reorders"
COLOURS = {KERNELS: plot.COLOURS[3], REORDERS: plot.OURS_COLOURS[0]}
LEAST_SHARE = 0.01  # of the whole: what takes less shares a row
REORDER_RUNS = 3  # with torch's oneDNN telling of its reorders
REORDER_STEPS = ("reorder", "contiguous")  # of a plan


@dataclass(frozen=True)
class Row:
    """A layer in one format; medians of milliseconds per run."""

    model: str
    format: str
    layer: str
    kernel_ms: float
    reorder_ms: float

    @property
    def total_ms(self) -> float:
        return self.kernel_ms + self.reorder_ms


def are_rows(records: list[dict[str, Any]]) -> bool:
    """Whether a JSON file's results are those of this benchmark."""
    names = {each.name for each in fields(Row)}
    return bool(records) and all(each.keys() == names for each in records)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    arguments.add_models(parser)
    parser.description = (
        "Times the layers of a model in NCHW, NHWC and the CPU's best blocked format, and the\n"
        "steps of the optimized model, with what reorders take of each."
    )
    arguments.add_threads(parser)
    arguments.add_batch(parser, 1)
    arguments.add_rounds(parser, 9)
    arguments.add_size(parser)
    parser.add_argument(
        "--json", type=arguments.output_path, metavar="PATH", help="write every layer as JSON"
    )
    parser.add_argument(
        "--plot", type=arguments.output_path, metavar="PATH", help="draw the layers as SVG"
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns 0. Raises NoModel for what cannot be timed."""
    with on_threads(args.threads):
        context = circumstances(dtype="float32", batch=args.batch, rounds=args.rounds)
        rows = [
            row
            for name in args.models
            for row in bench_model(
                *models.prepared(name, args.batch, args.size, args.input), args.rounds
            )
        ]
    print(describe(context, "float32", f"batch {args.batch}", f"{args.rounds} rounds"))
    print("\n" + markdown(("model", "format", "ms", "in reorders", "layers"), totals(rows), 2))
    if args.json:
        write_json(args.json, context, [asdict(row) for row in rows])
    if args.plot:
        args.plot.write_text(draw(rows))
    return 0


@torch.no_grad()
def bench_model(model: models.Model, inputs: tuple[Tensor, ...], rounds: int) -> list[Row]:
    """The layers of a model in each format, batch norms folded in all of them. Raises NoModel."""
    name = model.name
    module, _ = folded_module(name, model.module)
    ndim = inputs[0].dim()
    if ndim not in CONTIGUOUS:
        raise models.NoModel(f"{name}: expected an input of 3 to 5 dims, got {ndim}")
    rows = eager_rows(name, CONTIGUOUS[ndim], module, lambda: inputs, rounds)
    if ndim in CHANNELS_LAST:
        tag, memory_format = CHANNELS_LAST[ndim]
        last = copy.deepcopy(module).to(memory_format=memory_format)
        inputs_last = in_format(inputs, lambda x: x.contiguous(memory_format=memory_format))
        rows += eager_rows(name, tag, last, lambda: inputs_last, rounds)
    tag = blocked_tags(ndim)[0]

    def blocked() -> tuple[Tensor, ...]:
        return in_format(inputs, lambda x: torch_blocked.to_blocked(x, tag))

    rows += eager_rows(name, tag, module, blocked, rounds)
    return rows + optimized_rows(name, module, inputs)


class Clock:
    """Milliseconds of each leaf module in one run, all in all and in reorders."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.reorders: dict[str, float] = {}

    @contextmanager
    def measuring(self, layer: str) -> Iterator[None]:
        position, start = _C.trace_start(), time.perf_counter()
        try:
            yield
        finally:
            ms = (time.perf_counter() - start) * 1e3
            events = [e for e in _C.trace_stop(position) if e.kind == _C.Kind.reorder]
            self.total[layer] = self.total.get(layer, 0) + ms
            spent = sum(event.time_ns for event in events) / 1e6
            self.reorders[layer] = self.reorders.get(layer, 0) + spent


def eager_rows(
    model: str,
    tag: str,
    module: nn.Module,
    inputs: Callable[[], tuple[Tensor, ...]],
    rounds: int,
) -> list[Row]:
    """inputs: makes them in the format; what that takes counts as between the modules."""
    leaves = {
        name: each
        for name, each in module.named_modules()
        if not any(each.children()) and not isinstance(each, nn.Identity)  # a folded batch norm
    }
    clocks: list[Clock] = []
    bar = Bar(f"{model}: {tag}", rounds)
    with hooked(leaves, clocks):
        for turn in range(rounds + 2):  # the first two pack weights and fill caches
            clocks.append(Clock())
            with clocks[-1].measuring(""):
                module(*inputs())
            bar.update(turn > 1)
    bar.close()
    layers = dict.fromkeys(name for clock in clocks for name in clock.total if name)
    inside = torch_reorders(module, inputs)

    def median(times: Callable[[Clock], dict[str, float]], layer: str) -> float:
        return statistics.median(times(clock).get(layer, 0) for clock in clocks[2:])

    rows = []
    for layer in (*layers, ""):
        total, reorders = (median(t, layer) for t in (lambda c: c.total, lambda c: c.reorders))
        reorders = min(total, reorders + inside.get(layer, 0))
        rows.append(Row(model, tag, layer or BETWEEN, max(total - reorders, 0), reorders))
    *inner, whole = rows
    between = Row(
        model,
        tag,
        BETWEEN,
        max(whole.kernel_ms - sum(row.kernel_ms for row in inner), 0),
        max(whole.reorder_ms - sum(row.reorder_ms for row in inner), 0),
    )
    return [*inner, between]


def torch_reorders(module: nn.Module, inputs: Callable[[], tuple[Tensor, ...]]) -> dict[str, float]:
    """Milliseconds of reorders of torch's oneDNN in each module and, under "", in all: as it prints
    them, the least of some runs."""
    runs: list[dict[str, float]] = []
    for _ in range(REORDER_RUNS):
        with torch_blocked.profile() as profiled:
            module(*inputs())
        found: dict[str, float] = {}
        for row in profiled.rows:
            if row.kind == "torch reorder":
                path = row.module.partition("@")[0]  # of a module's second call, too
                found[path] = found.get(path, 0) + row.ms
        runs.append(found)
    best = min(runs, key=lambda run: sum(run.values()))
    return {"": sum(best.values())} | {name: ms for name, ms in best.items() if name}


@contextmanager
def hooked(leaves: dict[str, nn.Module], clocks: list[Clock]) -> Iterator[None]:
    """Has the last clock measure each module."""
    running: list[Any] = []

    def before(name: str) -> Callable[..., None]:
        def begin(*_: object) -> None:
            running.append(clocks[-1].measuring(name))
            running[-1].__enter__()

        return begin

    def after(*_: object) -> None:
        running.pop().__exit__(None, None, None)

    hooks = []
    for name, leaf in leaves.items():
        hooks.append(leaf.register_forward_pre_hook(before(name)))
        hooks.append(leaf.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def optimized_rows(model: str, module: nn.Module, inputs: Any) -> list[Row]:
    """The steps of the plan, in their order; none where another than the plan runs."""
    progress(f"{model}: is optimized")
    optimized = torch_blocked.optimize(module, inputs)
    progress()
    if not isinstance(optimized, OptimizedModule) or optimized.choice != "blocked":
        return []
    rows = []
    for index, step in enumerate(optimized.steps()):
        ms = step.microseconds / 1e3
        moves = step.op in REORDER_STEPS
        name = f"{index} {step.op.replace('aten::', '')} {step.output}"
        rows.append(Row(model, OPTIMIZED, name, 0 if moves else ms, ms if moves else 0))
    return rows


def sections_of(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.model, row.format), []).append(row)
    return found


def share(rows: list[Row]) -> float:
    """Percent of the time in reorders."""
    return 100 * sum(row.reorder_ms for row in rows) / (sum(row.total_ms for row in rows) or 1)


def totals(rows: list[Row]) -> list[list[str]]:
    return [
        [*key, f"{sum(row.total_ms for row in each):.2f}", f"{share(each):.1f} %", str(len(each))]
        for key, each in sections_of(rows).items()
    ]


def draw(rows: list[Row]) -> str:
    """The chart that --plot writes: bars of kernels and reorders, one scale for each model."""
    longest: dict[str, float] = {}
    for row in rows:
        longest[row.model] = max(longest.get(row.model, 0), row.total_ms)
    sections = []
    for (model, tag), each in sections_of(rows).items():
        whole = sum(row.total_ms for row in each)
        shown = [row for row in each if row.total_ms >= LEAST_SHARE * whole]
        bars = [_bar(row.layer, [row]) for row in shown]
        if others := [row for row in each if row not in shown]:
            bars.append(_bar(f"{len(others)} other{'s' * (len(others) > 1)}", others))
        heading = f"{model}, {tag}: {whole:.2f} ms, {share(each):.1f} % in reorders"
        full = max(longest[model], *(bar.length for bar in bars))
        sections.append(plot.Section(heading, bars, full))
    return plot.bars("Time by layer, and what reorders take of it", sections, COLOURS)


def _bar(name: str, rows: list[Row]) -> plot.Bar:
    parts = {
        KERNELS: sum(row.kernel_ms for row in rows),
        REORDERS: sum(row.reorder_ms for row in rows),
    }
    moved = f", {share(rows):.0f} % in reorders" if parts[REORDERS] else ""
    return plot.Bar(name, parts, None, f"{sum(parts.values()):.3f} ms{moved}")
