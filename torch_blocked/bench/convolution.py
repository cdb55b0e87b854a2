"""`python -m torch_blocked bench conv`: single convolutions, ours against torch's and oneDNN's.

Each distinct layer of a model runs by the implementation that the library chooses, by oneDNN's
blocked kernel, by any other implementation asked for, and by torch in channels_last (1-D:
contiguous), interleaved; each is verified against float64 before anything is timed."""

from __future__ import annotations

import argparse
import difflib
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_blocked
from torch_blocked import _C
from torch_blocked.tensor import format_name
from torch_blocked.testing import forced

from .inference import WrongResult, output_path, positive
from .layers import LAYERS, Layer
from .measure import Timing, time_interleaved
from .report import table, write_csv, write_json

# Largest |y - y64| / largest |y64| that a result may show before it is timed.
TOLERANCE = 1e-5

OURS, TORCH, ONEDNN = "ours", "torch", "onednn_blocked"
FUNCTIONS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}
CHANNELS_LAST = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}


@dataclass(frozen=True)
class Result:
    """One layer at one batch and number of threads."""

    model: str
    layer: Layer
    batch: int
    threads: int
    chosen: str  # the implementation behind "ours"
    timings: dict[str, Timing]
    peak_gflops: float  # of all threads

    def gflops(self, name: str) -> float:
        return self.layer.flops(self.batch) / self.timings[name].median_ms / 1e6

    def speed_to(self, name: str) -> float | None:
        """How many times faster than `name`; the median over rounds, whose members ran in turn."""
        if name not in self.timings:
            return None
        pairs = zip(self.timings[name].rounds_ms, self.timings[OURS].rounds_ms, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def records(self) -> list[dict[str, Any]]:
        """A flat dict for each implementation, for JSON and CSV."""
        return [
            {
                "model": self.model,
                "layer": self.layer.id,
                "count": self.layer.count,
                "batch": self.batch,
                "threads": self.threads,
                "implementation": name,
                "chosen": self.chosen if name == OURS else name,
                "median_ms": timing.median_ms,
                "iqr_ms": timing.iqr_ms,
                "min_ms": timing.min_ms,
                "gflops": self.gflops(name),
                "of_peak": self.gflops(name) / self.peak_gflops,
                "rounds_ms": list(timing.rounds_ms),
            }
            for name, timing in self.timings.items()
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Times each distinct convolution of some models, after verifying every result against\n"
        "float64: as the library runs it, by oneDNN's blocked kernel, and by torch in\n"
        "channels_last (1-D: contiguous). Activations are in their format already."
    )
    parser.epilog = (
        f"shapes: {', '.join(LAYERS)}\n"
        f"implementations: {', '.join(_C.implementations()['convolution'])}\n\n"
        "To compare on a lesser instruction set, limit torch too:\n"
        "  ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m torch_blocked bench conv ..."
    )
    parser.add_argument("--shapes", type=names(LAYERS), required=True, help="models, a,b,c")
    parser.add_argument("--batch", type=numbers, default=[1], help="such as 1,8 (default: 1)")
    parser.add_argument(
        "--threads", type=numbers, help="such as 1,2 (default: torch.get_num_threads())"
    )
    parser.add_argument(
        "--implementations",
        type=names(_C.implementations()["convolution"]),
        default=[],
        help="others to time as well, where they can run the layer",
    )
    parser.add_argument(
        "--kernel", type=numbers, help="only layers with these kernels, such as 1 or 3,3"
    )
    parser.add_argument("--block", type=positive, help="channel block (default: the CPU's best)")
    parser.add_argument("--rounds", type=positive, default=9, help="timed rounds (default: 9)")
    parser.add_argument(
        "--json", type=output_path, metavar="PATH", help="write the results as JSON"
    )
    parser.add_argument("--csv", type=output_path, metavar="PATH", help="write every round as CSV")
    parser.set_defaults(run=main)


def numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def names(known) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; {hint}")
        return list(dict.fromkeys(text.split(",")))

    return parse


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code: 0, or 1 if an implementation gave a wrong result."""
    threads_before = torch.get_num_threads()
    block = args.block or torch_blocked.native_blocks()[0]
    results: list[Result] = []
    print(describe(context := context_of(args, block)), end="\n\n", flush=True)
    try:
        for threads in args.threads or [threads_before]:
            torch.set_num_threads(threads)
            for batch in args.batch:
                for model in args.shapes:
                    rows = [
                        bench_layer(model, layer, batch, block, args.implementations, args.rounds)
                        for layer in LAYERS[model]
                        if args.kernel is None or _is_kernel(layer, args.kernel)
                    ]
                    print(render(rows, args.implementations), end="\n\n", flush=True)
                    results += rows
    except WrongResult as error:
        print(f"torch_blocked bench conv: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads_before)
    print(NOTES)
    records = [record for result in results for record in result.records()]
    if args.json:
        write_json(args.json, context, records)
    if args.csv:
        write_csv(args.csv, context, records)
    return 0


def _is_kernel(layer: Layer, kernel: list[int]) -> bool:
    return layer.kernel == tuple(kernel * len(layer.kernel) if len(kernel) == 1 else kernel)


def context_of(args: argparse.Namespace, block: int) -> dict[str, Any]:
    """What holds for every row."""
    environment = torch_blocked.env()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": environment["cpu"],
        "isa": environment["isa"],
        "isa_limits": " ".join(f"{k}={v}" for k, v in environment["isa_limits"].items()),
        "torch": environment["torch"],
        "onednn": environment["onednn"],
        "torch_blocked": environment["torch_blocked"],
        "dtype": "float32",
        "block": block,
        "rounds": args.rounds,
        "core_peak_gflops": _C.fma_peak_gflops(),
    }


def describe(c: dict[str, Any]) -> str:
    isa = f"{c['isa']} by {c['isa_limits']}" if c["isa_limits"] else c["isa"]
    return (
        f"{c['cpu']} ({isa}, FMA peak {c['core_peak_gflops']:.0f} GF/s per core), "
        f"torch {c['torch']}, oneDNN {c['onednn']}, torch_blocked {c['torch_blocked']}, "
        f"{c['date']}; {c['dtype']}, block {c['block']}, {c['rounds']} rounds"
    )


@torch.no_grad()
def bench_layer(
    model: str, layer: Layer, batch: int, block: int, implementations: list[str], rounds: int
) -> Result:
    """Verifies and times one layer. Raises WrongResult before timing if a result is further than
    TOLERANCE from float64's."""
    generator = torch.Generator().manual_seed(1)
    input = torch.randn((batch, layer.in_channels, *layer.size), generator=generator).relu()
    weight = torch.randn(layer.weight_dims, generator=generator)
    weight *= (2 / prod(layer.weight_dims[1:])) ** 0.5
    bias = torch.randn(layer.out_channels, generator=generator)
    expected = convolve(layer, input.double(), weight.double(), bias.double())
    rivals = runners(layer, input, weight, bias, block, implementations)
    chosen = ""
    for name, call in rivals.items():
        verify(f"{model} {layer.id} by {name}", call(), expected)
        chosen = _C.last_implementation("convolution") if name == OURS else chosen
    del expected
    peak = _C.fma_peak_gflops()
    timings = time_interleaved(rivals, rounds)
    peak = max(peak, _C.fma_peak_gflops())
    threads = torch.get_num_threads()
    return Result(model, layer, batch, threads, chosen, timings, peak * threads)


def convolve(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return FUNCTIONS[len(layer.size), layer.transposed](
        input,
        weight,
        bias,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
    )


def runners(
    layer: Layer,
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    block: int,
    implementations: list[str],
) -> dict[str, Callable[[], Tensor]]:
    """One function for each implementation that can run the layer; ours and torch's always can."""
    ndim = len(layer.size)
    blocked = torch_blocked.to_blocked(input, format_name(ndim + 2, block))

    def by(implementation: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with forced(implementation):
                return convolve(layer, blocked, weight, bias)

        return call

    calls = {OURS: by("")}
    for name in dict.fromkeys([ONEDNN, *implementations]):
        if runs(by(name)):
            calls[name] = by(name)
    input_last = input.contiguous(memory_format=CHANNELS_LAST[ndim])
    weight_last = weight.contiguous(memory_format=CHANNELS_LAST[ndim])
    calls[TORCH] = lambda: convolve(layer, input_last, weight_last, bias)
    return calls


def runs(call: Callable[[], Tensor]) -> bool:
    """Whether the forced implementation takes the layer; it would fall back to dense unseen."""
    try:
        with torch_blocked.strict():
            call()
    except NotImplementedError:
        return False
    return True


def verify(what: str, output: Tensor, expected: Tensor) -> None:
    """Raises WrongResult if the output is not the expected one."""
    output = output.to_dense() if torch_blocked.is_blocked(output) else output
    error = ((output - expected).abs().max() / expected.abs().max()).item()
    if not error < TOLERANCE:  # NaN, too
        raise WrongResult(
            f"{what} is wrong by {error:.1e} of the largest float64 value, expected below "
            f"{TOLERANCE:.0e}; nothing was timed"
        )


NOTES = (
    "ours: the implementation chosen. vs: above 1, ours is faster; the median over rounds.\n"
    "GF/s: multiplications and additions of a direct convolution per second, of median times;\n"
    "of peak: of FMAs in registers on as many cores, measured around the layer. mean: geometric."
)


def render(results: list[Result], implementations: list[str]) -> str:
    """The table of one model at one batch and number of threads, with geometric means."""
    if not results:
        return "no such layers"
    first = results[0]
    plural = "" if first.threads == 1 else "s"
    title = f"{first.model}, batch {first.batch}, {first.threads} thread{plural}"
    others = [name for name in implementations if name != ONEDNN]
    header = (
        *("layer", "count", "ours", "ms", "GF/s", "of peak", "vs torch", "vs oneDNN blocked"),
        *(f"vs {name}" for name in others),
    )
    rivals = (TORCH, ONEDNN, *others)
    rows = [
        [
            result.layer.id,
            str(result.layer.count),
            result.chosen,
            f"{result.timings[OURS].median_ms:.3f}",
            f"{result.gflops(OURS):.0f}",
            f"{100 * result.gflops(OURS) / result.peak_gflops:.0f} %",
            *(ratio(result.speed_to(name)) for name in rivals),
        ]
        for result in results
    ]
    fast = [r for r in results if set(r.layer.kernel) == {3} and is_plain(r.layer)]
    for name, group in (("mean", results), ("mean of kernel 3, stride 1", fast)):
        if group:
            rows.append([name, *[""] * 5, *(ratio(mean_speed(group, rival)) for rival in rivals)])
    return title + "\n" + table(header, rows)


def is_plain(layer: Layer) -> bool:
    return layer.stride == layer.dilation == layer.groups == 1 and not layer.transposed


def mean_speed(results: list[Result], name: str) -> float | None:
    """Geometric mean over the layers that `name` can run."""
    speeds = [speed for result in results if (speed := result.speed_to(name)) is not None]
    return statistics.geometric_mean(speeds) if speeds else None


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
