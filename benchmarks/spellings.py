"""The same network written in many ways: how much the speed depends on the spelling.

    python benchmarks/spellings.py --networks 5 --spellings 20

A network is drawn: blocks, widths, odd sizes, activations, norms before or after convolutions. Each
of its spellings computes the same with other words: activations and gates by module, function or
formula, norms as modules or written out, padding apart, sums in place, and so on. All spellings are
optimized, compared with each other and timed in interleaved rounds."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked
from torch_blocked.bench.arguments import positive
from torch_blocked.bench.measure import on_threads, time_interleaved

TOLERANCE = 1e-4  # between two spellings, relative to the largest value


class _InPlaceSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(torch.sigmoid(x))


class _HardSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3.0) / 6.0


def _in_place_sum(x: Tensor, y: Tensor) -> Tensor:
    y += x
    return y


def _mish(x: Tensor) -> Tensor:
    return x * torch.log1p(x.exp()).tanh()


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "relu": (
        F.relu,
        nn.ReLU(),
        lambda x: x.clamp(min=0),
        lambda x: torch.maximum(x, x.new_zeros(())),
    ),
    "relu6": (
        F.relu6,
        nn.ReLU6(),
        lambda x: x.clamp(0, 6),
        lambda x: torch.clamp(F.relu(x), max=6),
    ),
    "hardswish": (
        F.hardswish,
        nn.Hardswish(),
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x * (F.relu6(x + 3.0) * (1 / 6)),
        lambda x: x * _HardSigmoid()(x),
        lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1),
    ),
    "silu": (
        F.silu,
        nn.SiLU(),
        lambda x: x * x.sigmoid(),
        lambda x: x / (1 + torch.exp(-x)),
        _InPlaceSwish(),
    ),
    "mish": (F.mish, nn.Mish(), lambda x: x * torch.tanh(F.softplus(x)), _mish),
    "gelu": (F.gelu, nn.GELU(), _gelu, lambda x: x * 0.5 * torch.erfc(-x * 0.5**0.5)),
    "leaky": (
        lambda x: F.leaky_relu(x, 0.1),
        nn.LeakyReLU(0.1),
        lambda x: torch.max(x, 0.1 * x),
        lambda x: torch.where(x > 0, x, 0.1 * x),
    ),
}
GATES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "sigmoid": (torch.sigmoid, nn.Sigmoid(), lambda x: 1 / (1 + torch.exp(-x))),
    "hardsigmoid": (F.hardsigmoid, _HardSigmoid(), lambda x: (x + 3).clamp(0, 6) / 6),
}
MEANS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: F.adaptive_avg_pool2d(x, 1),
    nn.AdaptiveAvgPool2d(1),
    lambda x: x.mean((2, 3), keepdim=True),
    lambda x: F.avg_pool2d(x, (x.shape[2], x.shape[3])),
    lambda x: x.flatten(2).mean(-1)[:, :, None, None],
)
SUMS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + y,
    torch.add,
    _in_place_sum,
    lambda x, y: y.add(x),
)
FLATTENS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.flatten(1),
    lambda x: x.view(x.size(0), -1),
    lambda x: x.squeeze(-1).squeeze(-1),
    lambda x: x.reshape(x.shape[0], x.shape[1]),
)
PADDINGS = ("argument", "F.pad", "nn.ZeroPad2d")
CONVOLUTIONS = ("module", "function")
NORMS = ("module", "function", "formula")


@dataclass(frozen=True)
class Block:
    """1x1, depthwise, gate, 1x1; or kernel x kernel; with a sum around it where dims allow."""

    kind: str  # "inverted" or "plain"
    inputs: int
    outputs: int
    stride: int
    kernel: int
    gate: bool


@dataclass(frozen=True)
class Network:
    """What is computed, whatever the words."""

    seed: int
    size: int
    activation: str
    gate: str
    norm_first: bool
    bias: bool
    blocks: tuple[Block, ...]


def draw_network(seed: int) -> Network:
    rng = random.Random(seed)
    width, blocks = rng.choice((16, 20, 24, 33)), []
    for stage in range(4):
        outputs = rng.choice((24, 32, 40, 48, 52)) * (stage + 1)
        kind, kernel = rng.choice(("inverted", "inverted", "plain")), rng.choice((3, 3, 5))
        for i in range(rng.choice((2, 3))):
            blocks.append(
                Block(
                    kind,
                    width,
                    outputs,
                    2 - (i > 0),
                    kernel,
                    kind == "inverted" and rng.random() < 0.6,
                )
            )
            width = outputs
    return Network(
        seed,
        rng.choice((160, 193, 224)),
        rng.choice(tuple(ACTIVATIONS)),
        rng.choice(tuple(GATES)),
        rng.random() < 0.3,
        rng.random() < 0.3,
        tuple(blocks),
    )


class Spelling(nn.Module):
    """`network` in the words of a seed. Parameters are the same for all seeds."""

    def __init__(self, network: Network, seed: int) -> None:
        super().__init__()
        self.network = network
        rng = random.Random(seed)
        self.words: dict[str, Any] = {
            "activation": rng.choice(ACTIVATIONS[network.activation]),
            "gate": rng.choice(GATES[network.gate]),
            "mean": rng.choice(MEANS),
            "sum": rng.choice(SUMS),
            "flatten": rng.choice(FLATTENS),
            "padding": rng.choice(PADDINGS),
            "convolution": rng.choice(CONVOLUTIONS),
            "norm": rng.choice(NORMS),
        }
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        torch.manual_seed(network.seed)
        self._declare()
        self.classifier = nn.Linear(network.blocks[-1].outputs, 100)

    def _declare(self) -> None:
        """The layers in the order in which forward() takes them."""
        self._add(3, self.network.blocks[0].inputs, 3, 2)
        for b in self.network.blocks:
            if b.kind == "plain":
                self._add(b.inputs, b.outputs, b.kernel, b.stride)
                continue
            wide = 4 * b.inputs
            self._add(b.inputs, wide, 1, 1)
            self._add(wide, wide, b.kernel, b.stride, groups=wide)
            if b.gate:
                self._add(wide, b.inputs, 1, 1, norm=False)
                self._add(b.inputs, wide, 1, 1, norm=False)
            self._add(wide, b.outputs, 1, 1)

    def _add(self, inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1, norm=True):
        bias = self.network.bias or not norm
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)
        nn.init.kaiming_normal_(layer.weight)
        self.convolutions.append(layer)
        bn = nn.BatchNorm2d(inputs if self._norm_first(inputs, groups) else outputs)
        nn.init.uniform_(bn.weight, 0.5, 1.5)
        nn.init.normal_(bn.bias, std=0.1)
        bn.running_mean.normal_(std=0.1)
        bn.running_var.uniform_(0.5, 1.5)
        self.norms.append(bn if norm else nn.Identity())

    def _norm_first(self, inputs: int, groups: int) -> bool:
        return self.network.norm_first and groups == 1 and inputs > 3

    def _convolved(self, i: int, x: Tensor) -> Tensor:
        layer = self.convolutions[i]
        padding, padding_words = layer.padding[0], self.words["padding"]
        if padding and padding_words != "argument":
            sides = (padding,) * 4
            x = F.pad(x, sides) if padding_words == "F.pad" else nn.ZeroPad2d(padding)(x)
            padding = 0
        elif self.words["convolution"] == "module":
            return layer(x)
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, padding, 1, layer.groups)

    def _normed(self, i: int, x: Tensor) -> Tensor:
        norm, words = self.norms[i], self.words["norm"]
        if words == "module" or isinstance(norm, nn.Identity):
            return norm(x)
        if words == "function":
            return F.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps
            )
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        shift = norm.bias - norm.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)

    def _activated(self, x: Tensor) -> Tensor:
        return self.words["activation"](x)

    def _layer(self, i: int, x: Tensor, activate: bool = True) -> Tensor:
        layer = self.convolutions[i]
        if self._norm_first(layer.in_channels, layer.groups):
            return self._convolved(i, self._activated(self._normed(i, x)))
        x = self._normed(i, self._convolved(i, x))
        return self._activated(x) if activate else x

    def _gated(self, i: int, x: Tensor) -> Tensor:
        y = self.words["mean"](x)
        y = self._convolved(i + 1, F.relu(self._convolved(i, y)))
        return x * self.words["gate"](y)

    def forward(self, x: Tensor) -> Tensor:
        layers = itertools.count()
        x = self._layer(next(layers), x)
        for b in self.network.blocks:
            y = x
            if b.kind == "inverted":
                y = self._layer(next(layers), y)
                y = self._layer(next(layers), y)
                if b.gate:
                    i = next(layers)
                    next(layers)
                    y = self._gated(i, y)
            y = self._layer(next(layers), y, activate=b.kind == "plain")
            x = self.words["sum"](x, y) if b.stride == 1 and b.inputs == b.outputs else y
        x = self.words["flatten"](self.words["mean"](x))
        return self.classifier(x)


def described(network: Network) -> str:
    norms = "before" if network.norm_first else "after"
    kinds = {block.kind for block in network.blocks}
    return (
        f"{' and '.join(sorted(kinds))}, {network.activation}, {network.gate}, norms {norms}, "
        f"{'' if network.bias else 'no '}bias, {network.size}x{network.size}"
    )


def time_spellings(network: Network, count: int, rounds: int) -> list[str]:
    """A row of the table. Raises ValueError if two spellings differ in their results."""
    generator = torch.Generator().manual_seed(network.seed)
    input = torch.randn(1, 3, network.size, network.size, generator=generator)
    rivals: dict[str, Callable[[], Tensor]] = {}
    expected: Tensor | None = None
    with torch.no_grad():
        for seed in range(count):
            model = Spelling(network, seed).eval()
            result = model(input)
            expected = result if expected is None else expected
            optimized = torch_blocked.optimize(model, input)
            for each in (result, optimized(input)):
                error = ((each - expected).abs().max() / expected.abs().max()).item()
                if not error < TOLERANCE:
                    raise ValueError(f"network {network.seed}, spelling {seed}: off by {error:.1e}")
            rivals[f"{seed}"] = lambda optimized=optimized: optimized(input)
            rivals[f"torch {seed}"] = lambda model=model: model(input)
        timings = time_interleaved(rivals, rounds, what=f"network {network.seed}")
    ours = sorted((timings[f"{seed}"].min_ms, seed) for seed in range(count))
    torchs = sorted(timings[f"torch {seed}"].min_ms for seed in range(count))
    return [
        f"{network.seed}: {described(network)}",
        f"{ours[0][0]:.2f}",
        f"{statistics.median(ms for ms, _ in ours):.2f}",
        f"{ours[-1][0]:.2f} (spelling {ours[-1][1]})",
        f"{100 * (ours[-1][0] / ours[0][0] - 1):.0f} %",
        f"{torchs[0]:.2f} to {torchs[-1]:.2f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, rounds=9)
    parser.add_argument("--networks", type=positive, default=5)
    parser.add_argument("--first", type=int, default=0, help="seed of the first network")
    parser.add_argument("--spellings", type=positive, default=20, help="of each network")
    args = parser.parse_args(argv)
    header = ["network", "fastest ms", "median", "slowest", "spread", "torch, ms"]
    rows = []
    with on_threads(args.threads):
        for seed in range(args.first, args.first + args.networks):
            rows.append(time_spellings(draw_network(seed), args.spellings, args.rounds))
            harness.progress(*rows[-1])
    tables = [harness.Table("", header, rows)]
    harness.finish(args, tables, spellings=args.spellings, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
