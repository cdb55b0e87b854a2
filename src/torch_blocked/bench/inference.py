"""`python -m torch_blocked bench models MODEL...`: whole models in NCHW, in NHWC, in each blocked
format, and optimized.

Models of volumes run in NCDHW and NDHWC, those of signals in NCW: torch has no 1-D channels_last.

The same weights, the same input and the same folding for every row; results are verified against
float64 before anything is timed."""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_blocked
from torch_blocked import formats
from torch_blocked.formats import CONTIGUOUS
from torch_blocked.tensor import format_name
from torch_blocked.text_table import markdown

from . import arguments, models, time_bars
from .fold import Untraceable, fold_batch_norms
from .measure import Timing, on_threads, time_interleaved
from .report import WrongResult, circumstances, describe, progress, write

# Largest |y - y64| / largest |y64| that a row may show before it is timed, by dtype.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 1e-2}
PROFILED_PASSES = 5
# torch's channels-last formats by number of dims, and their tags.
CHANNELS_LAST = {
    4: (formats.CHANNELS_LAST[4], torch.channels_last),
    5: (formats.CHANNELS_LAST[5], torch.channels_last_3d),
}
OPTIMIZED = "optimize"


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
    """One row: one model in one format. profile is None where nothing is traced: dense formats, and
    optimized models, whose plan() tells more."""

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
            **self.timing.record(),
            "speed_to_nchw": self.speed_to_nchw,
            "relative_error": self.relative_error,
            **profile,
            "rounds_ms": list(self.timing.rounds_ms),
        }


PROFILE_FIELDS = tuple(Profile.__dataclass_fields__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    arguments.add_models(parser)
    parser.description = (
        "Times models in NCHW, NHWC and each blocked format the CPU runs well, and optimized,\n"
        "after verifying every result against float64. The reorder into the blocked format is\n"
        "part of the time, the preparation of an optimized model is not."
    )
    arguments.add_threads(parser)
    arguments.add_batch(parser, 1)
    arguments.add_rounds(parser, 15)
    arguments.add_size(parser)
    parser.add_argument(
        "--dtype", choices=list(TOLERANCES), default="float32", help="default: float32"
    )
    parser.add_argument(
        "--format",
        type=format_tags,
        metavar="TAGS",
        help=f"what to time beside the contiguous format, such as nhwc,nChw4c,{OPTIMIZED} "
        "(default: all that the CPU runs well)",
    )
    parser.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fold batch norms into convolutions, in every row or in none (default: fold)",
    )
    arguments.add_outputs(parser)
    parser.add_argument(
        "--plot", type=arguments.output_path, metavar="PATH", help="draw the times as SVG"
    )
    parser.set_defaults(run=main)


def format_tags(text: str) -> list[str]:
    known = [*CONTIGUOUS.values(), *(tag for tag, _ in CHANNELS_LAST.values()), OPTIMIZED]
    for tag in text.split(","):
        if tag not in known and not re.fullmatch(r"nC(w|hw|dhw)\d+c", tag):
            blocked = ", or a blocked one such as nChw16c"
            raise argparse.ArgumentTypeError(arguments.unknown("format", tag, known, blocked))
    return text.split(",")


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns 0. Raises WrongResult and NoModel, before anything is timed."""
    results: list[Result] = []
    with on_threads(args.threads):
        folds = "folded in every row" if args.fold else "folded in no row"
        context = circumstances(
            dtype=args.dtype, batch=args.batch, rounds=args.rounds, batch_norm=folds
        )
        for name in args.models:
            progress(f"{name}: is built")
            results += bench_model(
                *models.prepared(name, args.batch, args.size, args.input),
                args.rounds,
                args.fold,
                getattr(torch, args.dtype),
                args.format,
            )
    print(render(context, results))
    write(args, context, [result.record() for result in results])
    if args.plot:
        args.plot.write_text(time_bars.draw(result.record() for result in results))
    return 0


@torch.no_grad()
def bench_model(
    model: models.Model,
    images: tuple[Tensor, ...],
    rounds: int,
    fold: bool = True,
    dtype: torch.dtype = torch.float32,
    formats: Sequence[str] | None = None,
) -> list[Result]:
    """Verifies, profiles and times one model; one result for each format, the contiguous one first.

    Raises WrongResult before timing if a format's result is further than its tolerance from the
    float64 result of the model as it was built (not folded), or from its own if it mixes dtypes."""
    name = model.name
    progress(f"{name}: float64")
    inputs = tuple(each.to(dtype) for each in images)
    module, folded = model.converted(dtype), 0
    if models.is_mixed(module):
        expected = flat_dense(module(*inputs))
    else:
        expected = flat_dense(copy.deepcopy(module).double()(*(each.double() for each in inputs)))
    if fold:
        module, folded = folded_module(name, module)
    rivals = runners(name, module, inputs, formats)
    errors = {}
    for tag, call in rivals.items():
        progress(f"{name}: {tag} is verified")
        errors[tag] = verify(name, tag, call(), expected, dtype)
    progress(f"{name}: is profiled")
    profiles = {tag: profile_passes(call) for tag, call in rivals.items() if is_blocked_tag(tag)}
    progress()
    timings = time_interleaved(rivals, rounds, what=name)
    contiguous = timings[CONTIGUOUS[inputs[0].dim()]]
    return [
        Result(
            model=name,
            weights=model.weights,
            input_dims=tuple(inputs[0].shape),
            folded_batch_norms=folded,
            format=tag,
            timing=timing,
            speed_to_nchw=contiguous.median_ms / timing.median_ms,
            relative_error=errors[tag],
            profile=profiles.get(tag),
        )
        for tag, timing in timings.items()
    ]


def folded_module(name: str, module: nn.Module) -> tuple[nn.Module, int]:
    try:
        return fold_batch_norms(module)
    except Untraceable as error:
        raise models.NoModel(f"{error} in {name}; --no-fold times it as it is") from None


def is_blocked_tag(tag: str) -> bool:
    return "C" in tag


def dims_of_tag(tag: str) -> int:
    """4 of nChw16c: a letter for each dim, before the block."""
    return len(tag.rstrip("0123456789c"))


def blocked_tags(ndim: int = 4) -> list[str]:
    """The blocked formats that this CPU has fast kernels for, best first."""
    return [format_name(ndim, block) for block in torch_blocked.native_blocks()]


def flat_dense(output: Any) -> list[Tensor]:
    """The tensors of a result, dense, in order."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return [each.to_dense() if torch_blocked.is_blocked(each) else each for each in tensors]


def in_format(inputs: tuple[Tensor, ...], move: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """`move` of those that have as many dims as the first; the others as they are."""
    return tuple(move(each) if each.dim() == inputs[0].dim() else each for each in inputs)


def runners(
    name: str,
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    formats: Sequence[str] | None = None,
) -> dict[str, Callable[[], list[Tensor]]]:
    """One function for each format that gives the dense outputs; the contiguous one first.

    NHWC gets its weights and its input in channels_last before the clock starts. A blocked row
    starts from the NCHW input, so its time holds the reorders in and out."""
    ndim = inputs[0].dim()
    if ndim not in CONTIGUOUS:
        raise models.NoModel(f"{name}: expected an input of 3 to 5 dims, got {ndim}")
    last, memory_format = CHANNELS_LAST.get(ndim, (None, None))
    takes = [tag for tag in (last, *blocked_tags(ndim), OPTIMIZED) if tag]
    rivals = {CONTIGUOUS[ndim]: lambda: flat_dense(model(*inputs))}

    def blocked(tag: str) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            return flat_dense(model(*in_format(inputs, lambda x: torch_blocked.to_blocked(x, tag))))

        return call

    for tag in takes if formats is None else formats:
        if tag == OPTIMIZED:
            progress(f"{name}: is optimized")
            optimized = torch_blocked.optimize(model, inputs)
            rivals[tag] = lambda call=optimized: flat_dense(call(*inputs))
        elif tag == last:
            model_last = copy.deepcopy(model).to(memory_format=memory_format)
            inputs_last = in_format(inputs, lambda x: x.contiguous(memory_format=memory_format))
            rivals[tag] = lambda call=model_last, each=inputs_last: flat_dense(call(*each))
        elif is_blocked_tag(tag) and dims_of_tag(tag) == ndim:
            rivals[tag] = blocked(tag)
        elif tag not in rivals:
            raise models.NoModel(f"{name}: expected formats of {ndim} dims, got {tag}")
    return rivals


def verify(
    name: str, tag: str, output: list[Tensor], expected: list[Tensor], dtype: torch.dtype
) -> float:
    """The largest error of a tensor of the result relative to its largest expected value.

    Raises WrongResult if it is not below the tolerance of the dtype."""
    shapes, wanted = ([list(each.shape) for each in tensors] for tensors in (output, expected))
    if shapes != wanted:
        raise WrongResult(
            f"{name} in {tag} gave dims {words(shapes)}, expected {words(wanted)}; "
            "nothing was timed"
        )
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    errors = [relative_error(*pair) for pair in zip(output, expected, strict=True)]
    wrong = [error for error in errors if not error < tolerance]  # NaN, too
    if wrong:
        raise WrongResult(
            f"{name} in {tag} is wrong by {wrong[0]:.1e} of the largest float64 value, expected "
            f"below {tolerance:.0e}; nothing was timed"
        )
    return max(errors, default=0.0)


def words(shapes: list[list[int]]) -> str:
    return " and ".join(map(str, shapes)) or "of nothing"


def relative_error(output: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    exact = expected.double()
    difference = (output.double() - exact).abs().max().item()
    return difference / max(exact.abs().max().item(), torch.finfo(torch.float32).tiny)


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
    *("model", "format", "median ms", "IQR ms", "vs NCHW"),
    *("reorders", "reorder time", "fallbacks", "error"),
)


def render(context: dict[str, Any], results: list[Result]) -> str:
    """The line that names the circumstances, the table, and what its columns mean."""
    c = context
    header = describe(
        c,
        c["dtype"],
        f"batch {c['batch']}",
        f"{c['rounds']} rounds",
        f"batch norm {c['batch_norm']}",
    )
    weights = {result.model: f"{result.model} {result.weights}" for result in results}
    notes = [
        "vs NCHW: above 1 is faster. error: the largest, relative to the largest float64 value.",
        "Blocked rows include the reorder of the input; counts are of one pass.",
        f"Weights: {', '.join(weights.values())}.",
    ]
    return "\n".join([header, "", markdown(HEADER, [cells(r) for r in results], 2), "", *notes])


def cells(result: Result) -> list[str]:
    timing, profile = result.timing, result.profile
    counts = ["-"] * 3
    if profile:
        reorder_time = f"{profile.reorder_percent:.1f} %"
        counts = [str(profile.reorders), reorder_time, str(profile.fallbacks)]
    return [
        result.model,
        result.format,
        f"{timing.median_ms:.2f}",
        f"{timing.iqr_ms:.2f}",
        f"{result.speed_to_nchw:.2f}x",
        *counts,
        f"{result.relative_error:.0e}",
    ]
