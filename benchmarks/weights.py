"""What a reorder of weights costs beside the convolution that wants it, at batch 1 and at batch N.

    python benchmarks/weights.py [--threads 1] [--batches 1,16] [--rounds 15]

A call on blocked tensors packs its weights if they are new; later calls find them packed, and
`torch_blocked.prepack` does it ahead. Here each pack is provoked, and timed apart from the
convolution."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import harness
import torch
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked import _C
from torch_blocked.bench.measure import on_threads, time_interleaved

# Channels in and out, map and kernel.
LAYERS = {
    "1x1, 10-20@32": (10, 20, 32, 1),
    "3x3, 64-64@56": (64, 64, 56, 3),
    "3x3, 512-512@7": (512, 512, 7, 3),
}
HEADER = ("layer", "by", "batch", "ms", "pack ms", "pack / ms")


def pack_ms(conv: nn.Module, x: Tensor, rounds: int) -> float:
    """The median of what packing takes in a call that finds nothing packed."""
    times = []
    for _ in range(rounds):
        tb.clear_packed_weights()
        with tb.profile() as profile:
            conv(x)
        times.append(sum(e.time_ns for e in profile.events if e.kind.name == "pack") / 1e6)
    return statistics.median(times)


def row(name: str, batch: int, rounds: int) -> tuple[str, ...]:
    inputs, outputs, size, kernel = LAYERS[name]
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2).eval()
    x = torch.randn(batch, inputs, size, size).to_blocked()
    with torch.no_grad():
        packing = pack_ms(conv, x, rounds)
        tb.prepack(conv, x)
        ms = time_interleaved({name: lambda: conv(x)}, rounds, what=name)[name].median_ms
    by = _C.last_implementation("convolution")
    return name, by, str(batch), f"{ms:.3f}", f"{packing:.3f}", f"{packing / ms:.0%}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, threads=1, rounds=15)
    parser.add_argument("--batches", type=harness.numbers, default=[1, 16], help="default: 1,16")
    args = parser.parse_args(argv)
    with on_threads(args.threads):
        rows = [row(name, batch, args.rounds) for name in LAYERS for batch in args.batches]
    table = harness.Table("", HEADER, rows, text_columns=2)
    harness.finish(args, [table], dtype="float32", rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
