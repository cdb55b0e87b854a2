"""What each memory format costs on the way through the same layers, with what it reorders.

    python benchmarks/paths.py [--threads 1] [--batch 1] [--rounds 15]

Dense NCHW goes in and comes out in each row, so a conversion at either end is part of it. torch's
own reorders are those that oneDNN names in its verbose lines, the others are timed or traced."""

from __future__ import annotations

import copy
import ctypes
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import harness
import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.utils import mkldnn as mkldnn_utils

import torch_blocked as tb
from torch_blocked.bench.arguments import positive
from torch_blocked.bench.measure import on_threads, sample_ms, time_interleaved

# Channels in and out, map and kernel; those of one layer are the example of "Channels Last".
LAYERS = {
    "one 1x1, 10-20@32": ((10, 20), 32, 1),
    "two 3x3, 64@56": ((64, 64, 64), 56, 3),
    "two 3x3, 512@7": ((512, 512, 512), 7, 3),
}
TRACED = 15  # calls whose reorders are looked at, of which the median counts
HEADER = ("layers", "path", "ms", "of it activations", "weights", "vs nchw")


@dataclass(frozen=True)
class Path:
    """A call from dense NCHW to dense NCHW, and what part of its time it spends in reorders."""

    call: Callable[[], Tensor]
    reorders: Callable[[], tuple[float, float]]  # shares of it: of activations, of weights


def layers(channels: tuple[int, ...], kernel: int) -> nn.Module:
    made: list[nn.Module] = []
    for wide, next_wide in zip(channels, channels[1:], strict=False):
        made += [nn.Conv2d(wide, next_wide, kernel, padding=kernel // 2), nn.ReLU()]
    return nn.Sequential(*made[:-1]).eval()


def paths(model: nn.Module, x: Tensor) -> dict[str, Path]:
    """The three of "Channels Last", and blocked tensors."""
    opaque = mkldnn_utils.to_mkldnn(copy.deepcopy(model))  # it changes a Sequential in place
    in_nhwc = copy.deepcopy(model).to(memory_format=torch.channels_last)
    weights = [tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Conv2d)]

    def nchw() -> Tensor:
        return model(x)

    def nhwc() -> Tensor:
        return in_nhwc(x.to(memory_format=torch.channels_last)).contiguous()

    def mkldnn_tensors() -> Tensor:
        return opaque(x.to_mkldnn()).to_dense()

    def blocked() -> Tensor:
        return model(x.to_blocked()).to_dense()

    y = model(x).to(memory_format=torch.channels_last)

    def conversions_ms() -> float:
        return milliseconds(lambda: x.to(memory_format=torch.channels_last)) + milliseconds(
            y.contiguous
        )

    return {
        "nchw": Path(nchw, lambda: shares(lambda: by_onednn(nchw, weights))),
        "nhwc": Path(nhwc, lambda: shares(lambda: by_onednn(nhwc, weights, conversions_ms))),
        "to_mkldnn": Path(
            mkldnn_tensors, lambda: shares(lambda: by_onednn(mkldnn_tensors, weights))
        ),
        "to_blocked": Path(blocked, lambda: shares(lambda: traced(blocked))),
    }


def milliseconds(call: Callable[[], object]) -> float:
    return sample_ms(call, 1)


def shares(traced_call: Callable[[], tuple[float, float, float]]) -> tuple[float, float]:
    """The median shares of activations and weights in the time of calls that are looked at."""
    each = [traced_call() for _ in range(TRACED)]
    return (
        statistics.median(activations / total for total, activations, _ in each),
        statistics.median(weights / total for total, _, weights in each),
    )


def by_onednn(
    call: Callable[[], object],
    weights: list[tuple[int, ...]],
    beside: Callable[[], float] = lambda: 0.0,
) -> tuple[float, float, float]:
    """Milliseconds of a call, of its reorders of activations and of weights, by torch's oneDNN.
    beside: of the conversions that are not oneDNN's."""
    dims_of_weights = {"x".join(map(str, dims)) for dims in weights}
    with verbose_lines() as lines:
        total = milliseconds(call)
    spent = [beside(), 0.0]
    for line in lines:
        fields = line.split(",")
        if "exec" in fields and "reorder" in fields:
            spent[fields[-2] in dims_of_weights] += float(fields[-1])
    return total, *spent


@contextmanager
def verbose_lines() -> Iterator[list[str]]:
    """What torch's oneDNN prints in the block, there after it; printed from C, past sys.stdout."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        terminal = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with mkldnn.verbose(mkldnn.VERBOSE_ON):
                yield lines
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(terminal, 1)
            os.close(terminal)
        file.seek(0)
        lines += file.read().splitlines()


def traced(call: Callable[[], object]) -> tuple[float, float, float]:
    """The same of our own, as `profile` counts them."""
    with tb.profile() as profile:
        total = milliseconds(call)
    packs = [event.time_ns for event in profile.events if event.kind.name == "pack"]
    return total, profile.reorder_ms, sum(packs) / 1e6


def rows(name: str, batch: int, rounds: int) -> list[tuple[str, ...]]:
    channels, size, kernel = LAYERS[name]
    torch.manual_seed(0)
    model, x = layers(channels, kernel), torch.randn(batch, channels[0], size, size)
    with torch.no_grad():
        all_paths = paths(model, x)
        for path in all_paths.values():
            torch.testing.assert_close(path.call(), model(x), rtol=1e-3, atol=1e-4)
        calls = {word: path.call for word, path in all_paths.items()}
        times = time_interleaved(calls, rounds, what=name)
        parts = {word: path.reorders() for word, path in all_paths.items()}
    medians = {word: times[word].median_ms for word in all_paths}
    return [
        (
            name,
            word,
            *(f"{ms * part:.3f}" for part in (1.0, *parts[word])),
            f"{medians['nchw'] / ms:.2f}x",
        )
        for word, ms in medians.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, threads=1, rounds=15)
    parser.add_argument("--batch", type=positive, default=1, help="default: 1")
    args = parser.parse_args(argv)
    with on_threads(args.threads):
        table = [row for name in LAYERS for row in rows(name, args.batch, args.rounds)]
    tables = [harness.Table("", HEADER, table, text_columns=2)]
    harness.finish(args, tables, batch=args.batch, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
