"""What an op on a blocked tensor costs beyond its kernel.

    python benchmarks/dispatch.py [--rounds 25]

Each op runs on a tensor so small that computing takes next to nothing, and on its physical tensor,
which is ATen's own op; the difference is the dispatch. Ops run without gradients, with them
(forward only: the graph is built and dropped), and in inference mode.

Then what a convolution pays to know that its weights are still those it packed: nothing of note
while they have their memory to themselves. While another tensor shares it, behind which a NumPy
array may write, all weights are compared. Last, what a step of an optimized model costs."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked
from torch_blocked.bench.measure import on_threads, time_interleaved
from torch_blocked.bench.models import INPUT_SEED
from torch_blocked.bench.report import WrongResult
from torch_blocked.progress import each

DIMS = (1, 16, 4, 4)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "add": lambda x: x + x,
}
MODES = {"no grad": torch.no_grad, "grad": nullcontext, "inference": torch.inference_mode}
CALLS = 200  # in one sample
# A step of an optimized model costs what SHORT and LONG models of such layers differ by.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(DIMS[1]),
    "1x1 convolution": lambda: nn.Conv2d(DIMS[1], DIMS[1], 1),
}
SHORT, LONG = 20, 120
# Channels and pixels of 3x3 convolutions, whose weights are looked at.
WEIGHTS = ((64, 56), (128, 28), (256, 14), (512, 7))


@dataclass(frozen=True)
class WeightsResult:
    """One row: a convolution of `channels` on maps of `size`, in microseconds a call."""

    channels: int
    size: int
    own_us: float  # nothing else holds the weights
    shared_us: float  # another tensor does
    check_us: float  # the median over rounds of their difference


@dataclass(frozen=True)
class Result:
    """One row: one op in one mode, in microseconds a call."""

    op: str
    mode: str
    kernel_us: float
    blocked_us: float
    dispatch_us: float  # the median over rounds of their difference
    rounds_ms: tuple[float, ...]  # of the blocked calls

    def record(self) -> dict[str, Any]:
        """The row as a flat dict for JSON and CSV."""
        return {**vars(self), "rounds_ms": list(self.rounds_ms)}


def main(argv: Sequence[str] | None = None) -> int:
    """Raises WrongResult if an op's result is not its kernel's."""
    args = harness.parser(__doc__, rounds=25).parse_args(argv)
    with on_threads(args.threads):
        rows = [(op, mode) for op in OPS for mode in MODES]
        results = [bench_op(*row, args.rounds) for row in each("ops", rows)]
        weights = [bench_weights(*layer, args.rounds) for layer in each("weights", WEIGHTS)]
        steps = {name: step_us(name, args.rounds) for name in each("steps", list(LAYERS))}
    words = ", ".join(f"{us:.2f} us ({name})" for name, us in steps.items())
    harness.finish(
        args,
        [ops_table(results), weights_table(weights)],
        [*NOTES, f"a step of an optimized model, its kernel included: {words}"],
        [result.record() for result in results],
        dtype="float32",
        dims=DIMS,
        rounds=args.rounds,
        calls=CALLS,
        weights=[vars(result) for result in weights],
        optimized_step_us=steps,
    )
    return 0


def bench_op(op: str, mode: str, rounds: int) -> Result:
    """Verifies and times one op in one mode."""
    function = OPS[op]
    generator = torch.Generator().manual_seed(INPUT_SEED)
    blocked = torch_blocked.to_blocked(torch.randn(DIMS, generator=generator))
    if not torch.equal(function(blocked).to_dense(), function(blocked.to_dense())):
        raise WrongResult(f"{op} of a blocked tensor is not {op} of the dense one")
    physical = blocked._physical.clone()  # a tensor of its own, to have a graph of its own
    for input in (blocked, physical):
        input.requires_grad_(mode == "grad")
    with MODES[mode]():
        timings = time_interleaved(
            {"kernel": repeated(function, physical), "blocked": repeated(function, blocked)},
            rounds,
            what=f"{op}, {mode}",
        )
    kernel, ours = (timings[name].rounds_ms for name in ("kernel", "blocked"))
    differences = [b - a for a, b in zip(kernel, ours, strict=True)]
    return Result(
        op=op,
        mode=mode,
        kernel_us=per_call_us(statistics.median(kernel)),
        blocked_us=per_call_us(statistics.median(ours)),
        dispatch_us=per_call_us(statistics.median(differences)),
        rounds_ms=ours,
    )


def bench_weights(channels: int, size: int, rounds: int) -> WeightsResult:
    """Times a convolution whose weights are its own, and one whose weights are shared.

    Raises WrongResult if they do not agree."""
    generator = torch.Generator().manual_seed(INPUT_SEED)
    own, shared = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
    shared.load_state_dict(own.state_dict())
    other_tensor = shared.weight.data
    input = torch.randn(1, channels, size, size, generator=generator).to_blocked()
    calls = {"own": lambda: own(input), "shared": lambda: shared(input)}
    with torch.no_grad():
        if not torch.equal(own(input).to_dense(), shared(input).to_dense()):
            raise WrongResult("two convolutions of equal weights differ")
        timings = time_interleaved(calls, rounds, what="weights")
    del other_tensor
    times = [timings[name].rounds_ms for name in calls]
    differences = [b - a for a, b in zip(*times, strict=True)]
    medians = (statistics.median(values) * 1e3 for values in (*times, differences))
    return WeightsResult(channels, size, *medians)


def step_us(layer: str, rounds: int) -> float:
    """Microseconds of one step of an optimized model, on one pixel.

    Raises WrongResult if the model computes something else."""
    input = torch.randn(1, DIMS[1], 1, 1, generator=torch.Generator().manual_seed(INPUT_SEED))
    calls = {}
    for count in (SHORT, LONG):
        model = nn.Sequential(*(LAYERS[layer]() for _ in range(count))).eval()
        optimized = torch_blocked.optimize(model, input, tune=False)
        with torch.no_grad():
            if not torch.allclose(optimized(input), model(input), rtol=1e-3, atol=1e-5):
                raise WrongResult(f"{count} optimized layers of {layer} are not the model")
        calls[str(count)] = repeated(optimized, input)
    timings = time_interleaved(calls, rounds)
    short, long = (timings[name].rounds_ms for name in calls)
    differences = [b - a for a, b in zip(short, long, strict=True)]
    return per_call_us(statistics.median(differences)) / (LONG - SHORT)


def repeated(function: Callable[[Tensor], Tensor], input: Tensor) -> Callable[[], None]:
    def call() -> None:
        for _ in range(CALLS):
            function(input)

    return call


def per_call_us(sample_ms: float) -> float:
    return sample_ms * 1e3 / CALLS


def weights_table(results: list[WeightsResult]) -> harness.Table:
    columns = ("3x3 convolution", "weights MB", "own us", "shared us", "check us", "share")
    rows = [
        [
            f"{r.channels} of {r.size}x{r.size}",
            f"{r.channels**2 * 36 / 1e6:.2f}",
            f"{r.own_us:.0f}",
            f"{r.shared_us:.0f}",
            f"{r.check_us:.0f}",
            f"{r.check_us / r.own_us:.0%}",
        ]
        for r in results
    ]
    return harness.Table("Weights that are watched", columns, rows)


NOTES = (
    "kernel: ATen's op on the physical tensor, in the same mode. dispatch: what blocked adds, the",
    "median over rounds. grad: building the graph, without backward.",
)


def ops_table(results: list[Result]) -> harness.Table:
    columns = ("op", "mode", "kernel us", "blocked us", "dispatch us")
    rows = [
        [r.op, r.mode, f"{r.kernel_us:.1f}", f"{r.blocked_us:.1f}", f"{r.dispatch_us:.1f}"]
        for r in results
    ]
    return harness.Table("Ops", columns, rows, text_columns=2)


if __name__ == "__main__":
    sys.exit(harness.run(main))
