"""`python -m torch_blocked bench MODEL...`: whole models in NCHW, NHWC and each blocked format.

Models of volumes run in NCDHW and NDHWC, those of signals in NCW: torch has no 1-D channels_last.

The same weights, the same input and the same folding for every row; results are verified against
float64 before anything is timed."""

from __future__ import annotations

import argparse
import copy
import difflib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_blocked
from torch_blocked.tensor import format_name

from .fold import fold_batch_norms
from .measure import Timing, time_interleaved
from .models import MODELS, build_model
from .report import table, write_csv, write_json

# Largest |y - y64| / largest |y64| that a row may show before it is timed.
TOLERANCE = 1e-4
INPUT_SEED = 1
PROFILED_PASSES = 5
# By number of dims: tags of the contiguous and of torch's channels-last format.
CONTIGUOUS = {3: "ncw", 4: "nchw", 5: "ncdhw"}
CHANNELS_LAST = {4: ("nhwc", torch.channels_last), 5: ("ndhwc", torch.channels_last_3d)}


class WrongResult(RuntimeError):
    """A format gave a result that is not the model's."""


@dataclass(frozen=True)
class Profile:
    """What one pass of a blocked model does beside computing."""

    reorder_percent: float  # of a pass's time in reorders of activations, the median of several
    reorders: int
    packs: int
    fallbacks: int
    refs: int


@dataclass(frozen=True)
class Result:
    """One row: one model in one format. profile is None for dense formats: nothing is traced."""

    model: str
    weights: str
    input_dims: tuple[int, ...]
    folded_batch_norms: int
    format: str
    timing: Timing
    speed_to_nchw: float  # to the contiguous format
    relative_error: float
    profile: Profile | None

    def record(self) -> dict[str, Any]:
        """The row as a flat dict for JSON and CSV."""
        profile = asdict(self.profile) if self.profile else dict.fromkeys(PROFILE_FIELDS)
        return {
            "model": self.model,
            "weights": self.weights,
            "input_dims": list(self.input_dims),
            "folded_batch_norms": self.folded_batch_norms,
            "format": self.format,
            "median_ms": self.timing.median_ms,
            "iqr_ms": self.timing.iqr_ms,
            "min_ms": self.timing.min_ms,
            "speed_to_nchw": self.speed_to_nchw,
            "relative_error": self.relative_error,
            **profile,
            "rounds_ms": list(self.timing.rounds_ms),
        }


PROFILE_FIELDS = tuple(Profile.__dataclass_fields__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    known = "\n".join(f"  {name:<20}{spec.note}" for name, spec in MODELS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Times models in NCHW, NHWC and each blocked format the CPU runs well, after verifying\n"
        "every result against float64. The reorder into the blocked format is part of the time."
    )
    parser.epilog = (
        f"models:\n{known}\n\n"
        "To compare on a lesser instruction set, limit the dense rows too:\n"
        "  ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m torch_blocked bench ..."
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", type=model_name, help="see below")
    parser.add_argument("--threads", type=positive, help="default: torch.get_num_threads()")
    parser.add_argument("--batch", type=positive, default=1, help="images in a batch (default: 1)")
    parser.add_argument("--rounds", type=positive, default=15, help="timed rounds (default: 15)")
    parser.add_argument(
        "--size", type=positive, help="spatial extent of the inputs (default: the model's own)"
    )
    parser.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fold batch norms into convolutions, in every row or in none (default: fold)",
    )
    parser.add_argument(
        "--json", type=output_path, metavar="PATH", help="write the results as JSON"
    )
    parser.add_argument("--csv", type=output_path, metavar="PATH", help="write every round as CSV")
    parser.set_defaults(run=main)


def model_name(text: str) -> str:
    if text in MODELS:
        return text
    near = difflib.get_close_matches(text, MODELS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(MODELS)}"
    raise argparse.ArgumentTypeError(f"unknown model {text!r}; {hint}")


def positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text!r}")


def output_path(text: str) -> Path:
    path = Path(text)
    if path.parent.is_dir() and not path.is_dir():
        return path
    raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {text!r}")


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code: 0, or 1 if a format gave a wrong result."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(args.threads or threads_before)
    try:
        context = describe(args)
        results = []
        for name in dict.fromkeys(args.models):
            results += bench_model(name, args.batch, args.rounds, args.fold, args.size)
    except WrongResult as error:
        print(f"torch_blocked bench: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads_before)
    print(render(context, results))
    records = [result.record() for result in results]
    if args.json:
        write_json(args.json, context, records)
    if args.csv:
        write_csv(args.csv, context, records)
    return 0


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """What holds for every row."""
    folds = "folded in every row" if args.fold else "folded in no row"
    return {**environment_of(args), "batch_norm": folds}


def environment_of(args: argparse.Namespace) -> dict[str, Any]:
    """The circumstances of a run over models."""
    environment = torch_blocked.env()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": environment["cpu"],
        "isa": environment["isa"],
        "isa_limits": " ".join(f"{k}={v}" for k, v in environment["isa_limits"].items()),
        "threads": torch.get_num_threads(),
        "torch": environment["torch"],
        "onednn": environment["onednn"],
        "torch_blocked": environment["torch_blocked"],
        "dtype": "float32",
        "batch": args.batch,
        "rounds": args.rounds,
    }


@torch.no_grad()
def bench_model(
    name: str, batch: int = 1, rounds: int = 15, fold: bool = True, size: int | None = None
) -> list[Result]:
    """Verifies, profiles and times one model; one result for each format, NCHW first.

    Raises WrongResult before timing if a format's result is further than TOLERANCE from the float64
    result of the model as it was built (not folded)."""
    model, weights = build_model(name)
    input = random_input(name, batch, size)
    expected = copy.deepcopy(model).double()(input.double())
    folded = 0
    if fold:
        model, folded = fold_batch_norms(model)
    rivals = runners(model, input)
    errors = {tag: verify(name, tag, call(), expected) for tag, call in rivals.items()}
    profiles = {tag: profile_passes(rivals[tag]) for tag in blocked_tags(input.dim())}
    timings = time_interleaved(rivals, rounds)
    contiguous = timings[CONTIGUOUS[input.dim()]]
    return [
        Result(
            model=name,
            weights=weights,
            input_dims=tuple(input.shape),
            folded_batch_norms=folded,
            format=tag,
            timing=timing,
            speed_to_nchw=contiguous.median_ms / timing.median_ms,
            relative_error=errors[tag],
            profile=profiles.get(tag),
        )
        for tag, timing in timings.items()
    ]


def random_input(name: str, batch: int, size: int | None = None) -> Tensor:
    """`batch` seeded random inputs of a model; `size` takes the place of each spatial extent."""
    channels, *spatial = MODELS[name].input_dims
    dims = (batch, channels, *([size] * len(spatial) if size else spatial))
    return torch.randn(dims, generator=torch.Generator().manual_seed(INPUT_SEED))


def blocked_tags(ndim: int = 4) -> list[str]:
    """The blocked formats that this CPU has fast kernels for, best first."""
    return [format_name(ndim, block) for block in torch_blocked.native_blocks()]


def runners(model: nn.Module, input: Tensor) -> dict[str, Callable[[], Tensor]]:
    """One function for each format that gives the dense output.

    NHWC gets its weights and its input in channels_last before the clock starts. A blocked row
    starts from the NCHW input, so its time holds the reorders in and out."""

    def blocked(tag: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            output = model(torch_blocked.to_blocked(input, tag))
            return output.to_dense() if torch_blocked.is_blocked(output) else output

        return call

    calls = {CONTIGUOUS[input.dim()]: lambda: model(input)}
    if input.dim() in CHANNELS_LAST:
        tag, memory_format = CHANNELS_LAST[input.dim()]
        model_last = copy.deepcopy(model).to(memory_format=memory_format)
        input_last = input.contiguous(memory_format=memory_format)
        calls[tag] = lambda: model_last(input_last)
    return calls | {tag: blocked(tag) for tag in blocked_tags(input.dim())}


def verify(name: str, tag: str, output: Tensor, expected: Tensor) -> float:
    """The largest error relative to the largest expected value.

    Raises WrongResult if it is not below TOLERANCE."""
    if output.shape != expected.shape:
        raise WrongResult(
            f"{name} in {tag} gave dims {list(output.shape)}, expected {list(expected.shape)}; "
            "nothing was timed"
        )
    error = ((output - expected).abs().max() / expected.abs().max()).item()
    if not error < TOLERANCE:  # NaN, too
        raise WrongResult(
            f"{name} in {tag} is wrong by {error:.1e} of the largest float64 value, expected below "
            f"{TOLERANCE:.0e}; nothing was timed"
        )
    return error


def profile_passes(call: Callable[[], Any], passes: int = PROFILED_PASSES) -> Profile:
    """Counts what one call does beside computing; weights are packed before, if they are cached."""
    percents = []
    for _ in range(passes):
        with torch_blocked.profile() as profile:
            start = time.perf_counter()
            call()
            total_ms = (time.perf_counter() - start) * 1e3
        percents.append(100 * profile.reorder_ms / total_ms)
    return Profile(
        reorder_percent=statistics.median(percents),
        reorders=profile.reorders,
        packs=profile.packs,
        fallbacks=profile.fallbacks,
        refs=profile.refs,
    )


HEADER = (
    "model",
    "format",
    "median ms",
    "IQR ms",
    "min ms",
    "vs NCHW",
    "reorder time",
    "reorders",
    "packs",
    "fallbacks",
    "refs",
    "error",
)


def render(context: dict[str, Any], results: list[Result]) -> str:
    """The line that names the circumstances, the table, and what its columns mean."""
    c = context
    isa = f"{c['isa']} by {c['isa_limits']}" if c["isa_limits"] else c["isa"]
    plural = "" if c["threads"] == 1 else "s"
    header = (
        f"{c['cpu']} ({isa}), {c['threads']} thread{plural}, torch {c['torch']}, "
        f"oneDNN {c['onednn']}, torch_blocked {c['torch_blocked']}, {c['date']}; "
        f"{c['dtype']}, batch {c['batch']}, {c['rounds']} rounds, "
        f"batch norm {c['batch_norm']}"
    )
    weights = {result.model: f"{result.model} {result.weights}" for result in results}
    notes = [
        "vs NCHW: above 1 is faster. error: the largest, relative to the largest float64 value.",
        "Blocked rows include the reorder of the input; counts are of one pass.",
        f"Weights: {', '.join(weights.values())}.",
    ]
    return "\n".join([header, "", table(HEADER, [cells(r) for r in results], 2), "", *notes])


def cells(result: Result) -> list[str]:
    timing, profile = result.timing, result.profile
    counts = ["-"] * 5
    if profile:
        counts = [f"{profile.reorder_percent:.1f} %"]
        counts += [
            str(n) for n in (profile.reorders, profile.packs, profile.fallbacks, profile.refs)
        ]
    return [
        result.model,
        result.format,
        f"{timing.median_ms:.2f}",
        f"{timing.iqr_ms:.2f}",
        f"{timing.min_ms:.2f}",
        f"{result.speed_to_nchw:.2f}x",
        *counts,
        f"{result.relative_error:.0e}",
    ]
