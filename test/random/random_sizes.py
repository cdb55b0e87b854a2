"""Small random models that ask for sizes, quantized, at other batches and image sizes.

    python test/random/random_sizes.py --models 300 --seed 1

At each size the quantized graph, called itself and optimized, is near the model, or raises the
ValueError that says which size it does not hold for. What a graph takes for a constant that was a
size is off by a third and more."""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import torch_blocked as tb  # noqa: E402

SIZES = ((1, 8, 8), (2, 8, 8), (3, 16, 8), (1, 12, 20), (4, 9, 11), (2, 7, 16))
NEAR = 0.2  # in the Euclidean norm
CHANNELS = 16


def windows(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    x = F.pad(x, (0, -w % 4, 0, -h % 4))
    parts = x.reshape(b, c, x.shape[2] // 4, 4, x.shape[3] // 4, 4).permute(0, 2, 4, 1, 3, 5)
    scaled = parts / (1 + parts.abs().amax((3, 4, 5), keepdim=True))
    return scaled.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)[..., :h, :w]


# What may stand between two layers; sizes stay or are asked for.
MIDDLES = {
    "by batch": lambda x: x * (2 + x.shape[0]) / 4,
    "by area": lambda x: x + x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3]),
    "tokens": lambda x: x.reshape(x.shape[0], CHANNELS, -1).relu().view(x.shape),
    "shuffle": lambda x: x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2),
    "halved": lambda x: F.interpolate(F.avg_pool2d(x, 2), size=x.shape[2:]),
    "doubled": lambda x: F.interpolate(x, size=(2 * x.size(2), 2 * x.size(3)), mode="bilinear"),
    "cropped": lambda x: x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2],
    "windows": windows,
    "position": lambda x: x + torch.linspace(-1, 1, x.shape[-1]),
    "if even": lambda x: x if x.shape[2] % 2 else 2 * x,
    "if one": lambda x: x if x.shape[0] > 1 else 2 * x,
    "copied if many": lambda x: x.contiguous() if x.shape[0] > 1 else x,
    "if large": lambda x: 2 * x if x.shape[2] * x.shape[3] > 100 else x,
    "of size": lambda x: x.reshape(x.shape[0], CHANNELS, 64)[..., None],
    "up and down": lambda x: x + F.interpolate(F.max_pool2d(x, 2), scale_factor=2),
}
ENDS = {
    "mean": lambda x: x.mean((2, 3)).view(x.size(0), -1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "sums": lambda x: x.sum((2, 3)) / x[0, 0].numel(),
    "columns": lambda x: x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]),
}


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.names = choose.sample(sorted(MIDDLES), choose.randint(1, 3))
        self.end = choose.choice(sorted(ENDS))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(3 if i == 0 else CHANNELS, CHANNELS, 3, padding=1)
            for i in range(1 + len(self.names))
        )
        self.last = nn.Linear(CHANNELS, 5)

    def forward(self, x: Tensor) -> Tensor:
        for name, convolution in zip(self.names, self.convolutions, strict=False):
            x = MIDDLES[name](F.relu(convolution(x)))
        return self.last(ENDS[self.end](F.relu(self.convolutions[-1](x))))


def outcome(run, x: Tensor):
    try:
        return run(x)
    except Exception as error:
        return error


def check(seed: int, counts: Counter) -> None:
    """Raises AssertionError for other values, and for an error that says nothing."""
    torch.manual_seed(seed)
    choose = random.Random(seed)
    model = Model(seed).eval()
    first = choose.choice(SIZES)
    example = torch.randn(first[0], 3, *first[1:])
    if isinstance(outcome(model, example), Exception):
        counts["no model"] += 1
        return
    quantized = tb.quantize(model, [torch.randn_like(example) for _ in range(3)])
    fast = tb.optimize(quantized, example, tune=False, verify=False)
    for batch, *size in SIZES:
        x = torch.randn(batch, 3, *size)
        expected = outcome(model, x)
        for run in (quantized, fast):
            result = outcome(run, x)
            if isinstance(expected, Exception):
                assert isinstance(result, Exception), f"{model.names}, {size}: {expected}"
                counts["refused by both"] += 1
            elif isinstance(result, Exception):
                told = isinstance(result, ValueError) and "torch_blocked::quantize" in str(result)
                assert told, f"{model.names}, {batch} {size}: {result!r}"
                assert (batch, *size) != first, "refuses the sizes of the calibration"
                counts["refused"] += 1
            else:
                assert result.shape == expected.shape, f"{model.names}, {batch} {size}"
                apart = ((result - expected).norm() / expected.norm()).item()
                assert apart < NEAR, f"{model.names}, {model.end}, {batch} {size}: off by {apart}"
                counts["near"] += 1


@torch.no_grad()
def run_seeds(seeds, say=print) -> tuple[Counter, list[int]]:
    counts: Counter = Counter()
    failed = []
    for seed in seeds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(seed, counts)
        except Exception as error:
            failed.append(seed)
            say(f"seed {seed}: {type(error).__name__}: {error}"[:600])
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.models)
    counts, failed = run_seeds(seeds, lambda text: print(text, flush=True))
    print(f"{options.models} models, {dict(counts)}; {len(failed)} fail")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
