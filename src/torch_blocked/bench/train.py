"""`python -m torch_blocked bench train MODEL...`: training steps, blocked against torch's own
modes.

A step is forward, loss, backward and SGD. Every mode starts from the same weights, input and
target. Before anything is timed, the first loss and gradients of each mode are compared with those
in float64 on some of the images and with NCHW's on all, and its losses of --steps steps with
NCHW's."""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked
from torch_blocked.formats import CONTIGUOUS
from torch_blocked.text_table import markdown

from . import arguments, models
from .inference import CHANNELS_LAST, Profile, blocked_tags, profile_passes
from .measure import Timing, on_threads, time_interleaved
from .models import INPUT_SEED
from .report import WrongResult, circumstances, describe, progress, write

LEARNING_RATE, MOMENTUM = 1e-4, 0.9
# Largest |loss - loss64| / loss64 of a mode's first step, and largest |g - g64| / |g64| of all its
# gradients g. ReLUs and small batches amplify rounding: torch's own float32 shows up to 0.07, where
# one wrong layer shows 0.7.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-3, 0.2
# Images compared with float64, in which torch has no fast convolutions: all 8 of unet's would take
# a minute. The step that is timed is compared with NCHW's.
EXACT_IMAGES = 2
# Under autocast, rounding alone moves the gradients of a deep network by all of their size. There
# the blocked mode may be so many times as far from the reference as torch's modes are.
ROUNDING_FACTOR = 2
# Step by step that grows: within 20 steps at LEARNING_RATE, the losses of torch's own channels_last
# drift 0.001 to 0.2 away from NCHW's, by chance. Blocked may drift so many times as far as torch's
# modes, and always so far.
DRIFT_FACTOR, DRIFT_TOLERANCE = 10, 1e-2


@dataclass(frozen=True)
class Training:
    """A model and what runs one step of it and returns the loss."""

    model: nn.Module
    step: Callable[[], float]


@dataclass(frozen=True)
class Result:
    """One row: one model in one mode. profile is None for torch's modes: nothing is traced."""

    model: str
    input_dims: tuple[int, ...]
    mode: str
    timing: Timing
    speed_to: dict[str, float]  # how many times faster than each of torch's modes
    loss: float  # of the first step
    loss_error: float
    gradient_error: float
    steps: int  # compared with NCHW's
    loss_drift: float  # the largest relative difference of their losses
    profile: Profile | None

    def record(self) -> dict[str, Any]:
        """The row as a flat dict for JSON and CSV."""
        return {
            "model": self.model,
            "input_dims": list(self.input_dims),
            "mode": self.mode,
            **self.timing.record(),
            "speed_to_best_torch": min(self.speed_to.values()),
            "loss": self.loss,
            "loss_error": self.loss_error,
            "gradient_error": self.gradient_error,
            "steps": self.steps,
            "loss_drift": self.loss_drift,
            "reorders": self.profile.reorders if self.profile else None,
            "packs": self.profile.packs if self.profile else None,
            "fallbacks": self.profile.fallbacks if self.profile else None,
            "rounds_ms": list(self.timing.rounds_ms),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and `main` as what runs it."""
    arguments.add_models(parser)
    parser.description = (
        "Times a training step (forward, loss, backward, SGD) of some models in torch's NCHW,\n"
        "channels_last and compiled channels_last and in the blocked format, interleaved, after\n"
        "comparing the first loss and gradients of every mode with float64 and NCHW. The reorder\n"
        "into the blocked format is part of the time."
    )
    arguments.add_threads(parser)
    arguments.add_batch(parser, 8)
    arguments.add_rounds(parser, 7)
    arguments.add_size(parser)
    parser.add_argument(
        "--steps",
        type=arguments.positive,
        default=1,
        help="steps whose losses are compared with NCHW's before timing (default: 1)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=LEARNING_RATE,
        help=f"of SGD; a large one turns rounding into other losses (default: {LEARNING_RATE})",
    )
    parser.add_argument(
        "--autocast",
        action="store_true",
        help="every mode runs under torch.autocast, in bfloat16",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time torch.compile too; compiling takes minutes (default: compile)",
    )
    arguments.add_outputs(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns 0. Raises WrongResult and NoModel, before anything is timed."""
    results: list[Result] = []
    with on_threads(args.threads):
        dtype = "bfloat16 by autocast" if args.autocast else "float32"
        context = circumstances(dtype=dtype, batch=args.batch, rounds=args.rounds)
        words = (dtype, f"batch {args.batch}", f"{args.rounds} rounds", "SGD with momentum")
        print(describe(context, *words), end="\n\n", flush=True)
        for name in args.models:
            loaded = models.load(name, args.input)
            loaded.random_input(1)  # refuses several
            rows = bench_model(
                loaded,
                loaded.checked_inputs(args.batch, args.size),
                args.rounds,
                args.compile,
                args.steps,
                args.learning_rate,
                args.autocast,
            )
            print(render(rows), end="\n\n", flush=True)
            results += rows
    print(NOTES)
    write(args, context, [result.record() for result in results])
    return 0


def bench_model(
    loaded: models.Model,
    inputs: tuple[Tensor, ...],
    rounds: int,
    compiles: bool = True,
    steps: int = 1,
    learning_rate: float = LEARNING_RATE,
    autocast: bool = False,
) -> list[Result]:
    """Verifies and times one model; one result for each mode, NCHW first.

    Raises WrongResult before timing if a first loss or gradients are not those in float64 or
    NCHW's, which is in float32, or the losses of the first `steps` steps leave NCHW's."""
    name, model, (input,) = loaded.name, loaded.module, inputs
    without_dropout(model.train())
    progress(f"{name}: float64")
    exact = exact_errors(name, model, input[:EXACT_IMAGES], autocast)
    modes = trainings(model, input, compiles, learning_rate, autocast)
    reference = None
    if autocast:
        (nchw, training), *_ = trainings(model, input, compiles=False).items()
        reference = first_step(f"{nchw} in float32", training)
    losses, errors = first_losses(name, modes, exact, reference)
    progress(f"{name}: more steps, profiled")
    histories = {
        mode: [losses[mode], *(training.step() for _ in range(steps - 1))]
        for mode, training in modes.items()
    }
    drifts = loss_drifts(name, histories, blocked=list(modes)[-1])
    calls = {mode: training.step for mode, training in modes.items()}
    profiles = {tag: profile_passes(calls[tag], passes=1) for tag in blocked_tags(input.dim())[:1]}
    progress()
    timings = time_interleaved(calls, rounds, warmups=1, what=name)
    rivals = [mode for mode in modes if mode not in profiles]
    return [
        Result(
            model=name,
            input_dims=tuple(input.shape),
            mode=mode,
            timing=timing,
            speed_to={rival: speed(timings[rival], timing) for rival in rivals},
            loss=losses[mode],
            loss_error=errors[mode][0],
            gradient_error=errors[mode][1],
            steps=steps,
            loss_drift=drifts[mode],
            profile=profiles.get(mode),
        )
        for mode, timing in timings.items()
    ]


Errors = dict[str, tuple[float, float]]  # of loss and gradients, by mode


def first_losses(
    name: str, modes: dict[str, Training], exact: Errors, float32: FirstStep | None = None
) -> tuple[dict[str, float], Errors]:
    """The loss of each mode's first step, and its errors, relative to float64 or to NCHW, the first
    mode: the larger. float32: NCHW's step if the modes run under autocast. Raises WrongResult."""
    firsts = {}
    for mode, training in modes.items():
        progress(f"{name}: {mode}, first step")
        firsts[mode] = first_step(mode, training)
    steps = list(firsts.values())
    errors = verify(name, steps, float32 or steps[0], autocast=float32 is not None)
    larger = {mode: tuple(map(max, exact.get(mode, each), each)) for mode, each in errors.items()}
    return {mode: first.loss for mode, first in firsts.items()}, larger


def without_dropout(model: nn.Module) -> None:
    """Random masks would make the losses of no two modes comparable."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def trainings(
    model: nn.Module,
    input: Tensor,
    compiles: bool,
    learning_rate: float = LEARNING_RATE,
    autocast: bool = False,
) -> dict[str, Training]:
    """One for each mode, on its own copy of the model: contiguous, channels-last where torch has
    it, the latter compiled, and blocked.

    channels_last gets its weights and its input so before the clock starts; the blocked mode starts
    from the contiguous input and the model as it is."""
    ndim = input.dim()
    tag = blocked_tags(ndim)[0]
    target = target_of(model, input)
    contiguous = (CONTIGUOUS[ndim], torch.contiguous_format)
    last, memory_format = CHANNELS_LAST.get(ndim, contiguous)
    input_last = input.contiguous(memory_format=memory_format)

    def model_last() -> nn.Module:
        copied = copy.deepcopy(model)
        return copied.to(memory_format=memory_format) if ndim in CHANNELS_LAST else copied

    def training(model: nn.Module, input: Callable[[], Tensor]) -> Training:
        return training_of(model, input, target, learning_rate, autocast)

    modes = {CONTIGUOUS[ndim]: training(copy.deepcopy(model), lambda: input)}
    if ndim in CHANNELS_LAST:
        modes[last] = training(model_last(), lambda: input_last)
    if compiles:
        modes[f"{last} compiled"] = training(torch.compile(model_last()), lambda: input_last)
    modes[tag] = training(copy.deepcopy(model), lambda: torch_blocked.to_blocked(input, tag))
    return modes


def exact_training(model: nn.Module, input: Tensor) -> Training:
    """The same in float64."""
    target = target_of(model, input)
    target = target.double() if target.is_floating_point() else target
    return training_of(copy.deepcopy(model).double(), input.double, target)


def target_of(model: nn.Module, input: Tensor) -> Tensor:
    """Random classes for a classifier's logits, random masks for probabilities per pixel, random
    numbers for anything else."""
    generator = torch.Generator().manual_seed(INPUT_SEED)
    with torch.no_grad(), warnings.catch_warnings():
        output = copy.deepcopy(model).eval()(input)
    if output.dim() == 2:
        return torch.randint(output.shape[1], output.shape[:1], generator=generator)
    if 0 <= output.min() and output.max() <= 1:
        return torch.randint(2, output.shape, generator=generator).float()
    return torch.randn(output.shape, generator=generator)


def loss_for(target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy for classes and masks, mean squared error for numbers."""
    if not target.is_floating_point():
        return F.cross_entropy
    return F.mse_loss if target.min() < 0 else F.binary_cross_entropy


def training_of(
    model: nn.Module,
    input: Callable[[], Tensor],
    target: Tensor,
    learning_rate: float = LEARNING_RATE,
    autocast: bool = False,
) -> Training:
    loss_of = loss_for(target)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, MOMENTUM, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(input())
            output = output.to_dense() if torch_blocked.is_blocked(output) else output
            loss = loss_of(output.float() if autocast else output, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training(model, step)


@dataclass(frozen=True)
class FirstStep:
    """What a mode's first step leaves: its loss, and the gradients of the model's parameters."""

    mode: str
    loss: float
    gradients: list[Tensor]


def first_step(mode: str, training: Training) -> FirstStep:
    loss = training.step()
    return FirstStep(mode, loss, [parameter.grad for parameter in training.model.parameters()])


def exact_errors(name: str, model: nn.Module, input: Tensor, autocast: bool = False) -> Errors:
    """`verify` of every mode but the compiled one, which would be compiled once more for these
    dims, against float64."""
    exact = first_step("float64", exact_training(model, input))
    modes = trainings(model, input, compiles=False, autocast=autocast)
    steps = [first_step(mode, training) for mode, training in modes.items()]
    return verify(name, steps, exact, autocast)


def verify(
    name: str, steps: list[FirstStep], expected: FirstStep, autocast: bool = False
) -> Errors:
    """The relative errors of the loss and of all gradients together, by mode.

    Raises WrongResult if one is not below its tolerance; under autocast, if the blocked mode's, the
    last, is not and is ROUNDING_FACTOR times as large as those of torch's modes."""
    errors = {step.mode: relative_errors(step, expected) for step in steps}
    limits = [LOSS_TOLERANCE, GRADIENT_TOLERANCE]
    judged = list(errors)
    if autocast:
        *torchs, blocked = judged
        judged = [blocked]
        for i, limit in enumerate(limits):
            limits[i] = max(limit, *(ROUNDING_FACTOR * errors[mode][i] for mode in torchs))
    for mode in judged:
        loss_error, gradient_error = errors[mode]
        if not (loss_error < limits[0] and gradient_error < limits[1]):  # NaN, too
            raise WrongResult(
                f"{name} in {mode} has a loss wrong by {loss_error:.1e} and gradients wrong by "
                f"{gradient_error:.1e} of those in {expected.mode}, expected below "
                f"{limits[0]:.0e} and {limits[1]:.0e}; nothing was timed"
            )
    return errors


def relative_errors(step: FirstStep, expected: FirstStep) -> tuple[float, float]:
    """Of the loss, and of all gradients together."""
    difference = total = 0.0
    for ours, theirs in zip(step.gradients, expected.gradients, strict=True):
        difference += (ours - theirs).square().sum().item()
        total += theirs.square().sum().item()
    return abs(step.loss - expected.loss) / abs(expected.loss), (difference / total) ** 0.5


def loss_drifts(name: str, histories: dict[str, list[float]], blocked: str) -> dict[str, float]:
    """By mode, the largest relative difference of its losses to NCHW's, the first mode's, at the
    same step.

    Raises WrongResult if the blocked mode's is above DRIFT_TOLERANCE and far above torch's."""
    expected = torch.tensor(next(iter(histories.values())))
    drifts = {
        mode: ((torch.tensor(losses) - expected) / expected).abs().max().item()
        for mode, losses in histories.items()
    }
    torchs = max(drift for mode, drift in drifts.items() if mode != blocked)
    allowed = max(DRIFT_TOLERANCE, DRIFT_FACTOR * torchs)
    if not drifts[blocked] < allowed:  # NaN, too
        raise WrongResult(
            f"{name} in {blocked} has losses wrong by {drifts[blocked]:.1e} of NCHW's within "
            f"{len(expected)} steps, expected below {allowed:.0e}; nothing was timed"
        )
    return drifts


def speed(theirs: Timing, ours: Timing) -> float:
    """How many times faster ours is; the median over rounds, whose members ran in turn."""
    pairs = zip(theirs.rounds_ms, ours.rounds_ms, strict=True)
    return statistics.median(a / b for a, b in pairs)


HEADER = ("model", "mode", "median ms", "IQR ms", "min ms", "vs best torch", "loss",
          "loss error", "gradient error", "loss drift",
          "reorders", "packs", "fallbacks")  # fmt: skip
NOTES = (
    "vs best torch: above 1 is faster than each of torch's modes; the median over rounds.\n"
    f"loss: of the first step; errors: relative to float64's on {EXACT_IMAGES} images or NCHW's on "
    "all, the larger,\nof all gradients together; compiled is compared with NCHW only.\n"
    "loss drift: the largest relative difference to NCHW's loss at any of the --steps steps.\n"
    "Blocked rows include the reorder of the input; counts are of one step."
)


def render(results: list[Result]) -> str:
    return markdown(HEADER, [cells(result) for result in results], 2)


def cells(result: Result) -> list[str]:
    timing, profile = result.timing, result.profile
    counts = [profile.reorders, profile.packs, profile.fallbacks] if profile else ["-"] * 3
    return [
        result.model,
        result.mode,
        f"{timing.median_ms:.1f}",
        f"{timing.iqr_ms:.1f}",
        f"{timing.min_ms:.1f}",
        f"{min(result.speed_to.values()):.2f}x",
        f"{result.loss:.5f}",
        f"{result.loss_error:.0e}",
        f"{result.gradient_error:.0e}",
        f"{result.loss_drift:.0e}",
        *map(str, counts),
    ]
