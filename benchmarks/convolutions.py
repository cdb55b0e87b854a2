"""Single convolutions: ours against torch's and oneDNN's.

    python benchmarks/convolutions.py resnet50 mobilenet_v2 --batch 1,8 --threads 1,2

Each distinct layer of a model runs by the implementation that the library chooses, by oneDNN's
blocked kernel, by any other implementation asked for, and by torch in channels_last (1-D:
contiguous), interleaved. Each result is verified against float64 before anything is timed.
Activations are in their format already."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.bench import arguments, models
from torch_blocked.bench.measure import Timing, on_threads, time_interleaved
from torch_blocked.bench.report import WrongResult, progress
from torch_blocked.progress import each
from torch_blocked.tensor import format_name

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
Dims = tuple[int, ...]
Convolution = nn.modules.conv._ConvNd


@dataclass(frozen=True)
class Layer:
    """A convolution without bias sizes and batch; `count` of them in the model."""

    count: int
    in_channels: int
    out_channels: int
    size: Dims
    kernel: Dims
    stride: Dims
    padding: Dims
    dilation: Dims
    groups: int
    transposed: bool

    @property
    def id(self) -> str:
        """`IC-OC@SIZE kK [sS] [pP] [dD] [gG] [t]`, as `64-64@56 k3`: stride S where it is not 1,
        padding P where it is not that which keeps the size at stride 1, dilation D, G groups, t:
        transposed. One number stands for all dims."""
        ones = (1,) * len(self.size)
        words = [f"{self.in_channels}-{self.out_channels}@{_short(self.size)}"]
        words.append(f"k{_short(self.kernel)}")
        words += [f"s{_short(self.stride)}"] * (self.stride != ones)
        words += [f"p{_short(self.padding)}"] * (self.padding != _same(self.kernel, self.dilation))
        words += [f"d{_short(self.dilation)}"] * (self.dilation != ones)
        words += [f"g{self.groups}"] * (self.groups > 1)
        words += ["t"] * self.transposed
        return " ".join(words)

    @property
    def weight_dims(self) -> Dims:
        """As ATen has them."""
        if self.transposed:
            return (self.in_channels, self.out_channels // self.groups, *self.kernel)
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    def flops(self, output: Dims) -> int:
        """Multiplications and additions of a direct convolution with an output of such dims.

        Each input pixel of a transposed convolution meets each weight once, as does each output
        pixel of another."""
        pixels = output[0]
        for extent in self.size if self.transposed else output[2:]:
            pixels *= extent
        weights = self.in_channels * self.out_channels // self.groups
        for kernel in self.kernel:
            weights *= kernel
        return 2 * pixels * weights


def _short(dims: Dims) -> str:
    return "x".join(map(str, dims[:1] if len(set(dims)) == 1 else dims))


def _same(kernel: Dims, dilation: Dims) -> Dims:
    return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))


def layer_of(module: Convolution, input: Tensor) -> Layer:
    padding = module.padding
    if isinstance(padding, str):
        zeros = (0,) * len(module.kernel_size)
        padding = zeros if padding == "valid" else _same(module.kernel_size, module.dilation)
    return Layer(
        1,
        module.in_channels,
        module.out_channels,
        tuple(input.shape[2:]),
        module.kernel_size,
        module.stride,
        padding,
        module.dilation,
        module.groups,
        module.transposed,
    )


def layers_of(model: nn.Module, input: Tensor) -> list[Layer]:
    """The distinct convolution modules that a run of the model goes through, in the order of their
    first call."""
    found: Counter[Layer] = Counter()
    hooks = [
        module.register_forward_hook(lambda m, args, _: found.update([layer_of(m, args[0])]))
        for module in model.modules()
        if isinstance(module, Convolution)
    ]
    try:
        with torch.no_grad():
            model(input)
    finally:
        for hook in hooks:
            hook.remove()
    return [replace(layer, count=count) for layer, count in found.items()]


@dataclass(frozen=True)
class Result:
    """One layer at one batch and number of threads."""

    model: str
    layer: Layer
    batch: int
    threads: int
    chosen: str  # the implementation behind "ours"
    timings: dict[str, Timing]
    flops: int
    peak_gflops: float  # of all threads

    def gflops(self, name: str) -> float:
        return self.flops / self.timings[name].median_ms / 1e6

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
                **timing.record(),
                "gflops": self.gflops(name),
                "of_peak": self.gflops(name) / self.peak_gflops,
                "rounds_ms": list(timing.rounds_ms),
            }
            for name, timing in self.timings.items()
        ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__, threads=[torch.get_num_threads()], rounds=9)
    arguments.add_models(parser)
    known = _C.implementations()["convolution"]
    option = parser.add_argument
    option("--batch", type=harness.numbers, default=[1], help="such as 1,8 (default: 1)")
    option(
        "--implementations",
        type=harness.names(known),
        default=[],
        help=f"others to time as well, where they can run the layer: {', '.join(known)}",
    )
    option("--kernel", type=harness.numbers, help="only these kernels, such as 1 or 3,3")
    option("--block", type=arguments.positive, help="channel block (default: the CPU's best)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises WrongResult and NoModel, before anything is timed."""
    args = parse(argv)
    block = args.block or torch_blocked.native_blocks()[0]
    results: list[Result] = []
    tables: list[harness.Table] = []
    layers = {name: layers_to_time(name, args.input, args.kernel) for name in args.models}
    for threads in args.threads:
        with on_threads(threads):
            for batch in args.batch:
                for model in args.models:
                    rows = [
                        bench_layer(model, layer, batch, block, args.implementations, args.rounds)
                        for layer in each(f"{model}, batch {batch}", layers[model])
                    ]
                    results += rows
                    tables += [table(rows, args.implementations)] if rows else []
    harness.finish(
        args,
        tables,
        NOTES,
        [record for result in results for record in result.records()],
        dtype="float32",
        block=block,
        rounds=args.rounds,
        core_peak_gflops=round(_C.fma_peak_gflops(), 1),
    )
    return 0


def layers_to_time(name: str, input_dims: Any, kernel: list[int] | None) -> list[Layer]:
    """The distinct convolutions of a model, of that kernel if one is given."""
    progress(f"{name}: its convolutions")
    model = models.load(name, input_dims)
    model.random_input(1)  # refuses several
    layers = layers_of(model.module, model.checked_inputs(1)[0])
    progress()
    return [layer for layer in layers if kernel is None or _is_kernel(layer, kernel)]


def _is_kernel(layer: Layer, kernel: list[int]) -> bool:
    return layer.kernel == tuple(kernel * len(layer.kernel) if len(kernel) == 1 else kernel)


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
    flops = layer.flops(tuple(expected.shape))
    del expected
    peak = _C.fma_peak_gflops()
    timings = time_interleaved(rivals, rounds, what=f"{model} {layer.id}")
    peak = max(peak, _C.fma_peak_gflops())
    threads = torch.get_num_threads()
    return Result(model, layer, batch, threads, chosen, timings, flops, peak * threads)


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


@contextmanager
def forced(implementation: str, family: str = "convolution") -> Iterator[None]:
    """A family's problems run by this implementation; "" for the one the library chooses."""
    _C.force_implementation(family, implementation)
    try:
        yield
    finally:
        _C.force_implementation(family, "")


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
    "ours: the implementation chosen. vs: above 1, ours is faster; the median over rounds.",
    "GF/s: multiplications and additions of a direct convolution per second, of median times.",
    "of peak: of FMAs in registers on as many cores, measured around the layer. mean: geometric.",
)


def table(results: list[Result], implementations: list[str]) -> harness.Table:
    """Of one model at one batch and number of threads, with geometric means."""
    first = results[0]
    plural = "" if first.threads == 1 else "s"
    title = f"{first.model}, batch {first.batch}, {first.threads} thread{plural}"
    others = [name for name in implementations if name != ONEDNN]
    columns = (
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
    return harness.Table(title, columns, rows)


def is_plain(layer: Layer) -> bool:
    steps = {*layer.stride, *layer.dilation, layer.groups}
    return steps == {1} and not layer.transposed


def mean_speed(results: list[Result], name: str) -> float | None:
    """Geometric mean over the layers that `name` can run."""
    speeds = [speed for result in results if (speed := result.speed_to(name)) is not None]
    return statistics.geometric_mean(speeds) if speeds else None


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


if __name__ == "__main__":
    sys.exit(harness.run(main))
