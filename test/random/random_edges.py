"""Models of few ops at the edges of dims: no elements, no dims, one element, and operands of
another rank than what they meet.

    python test/random/random_edges.py --models 2000 --seed 1

A pass that looks for a pattern meets tensors of every rank and size in its place. Each model is a
convolution, a cut, two ops, and an op of two operands; eager on a blocked input and optimized, it
must give what the dense model gives."""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

for _library in ("OMP", "MKL"):  # a team of threads made before a fork would be waited for after it
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from helpers import isolated  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import torch_blocked as tb  # noqa: E402

CHANNELS = 8
CUTS = {
    "all": lambda x: x,
    "no images": lambda x: x[:0],
    "no channels": lambda x: x[:, :0],
    "no rows": lambda x: x[:, :, :0],
    "no columns": lambda x: x[..., :0],
}


def pixels(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.dim()))


def of_rank(name: str, x: Tensor):
    return getattr(F, f"{name}{x.dim() - 2}d")


# Of tensors of any rank; what an op cannot take, the model refuses when dense.
OPS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "program": lambda x: (x * 2 + 1).tanh() * x,
    "softmax": lambda x: x.softmax(-1),
    "softmax of channels": lambda x: x.softmax(1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "channel norm": lambda x: F.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1),
    "group norm": lambda x: F.group_norm(x, 1),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "response norm": lambda x: F.local_response_norm(x, 3),
    "own response norm": lambda x: (
        x / (1 + F.avg_pool3d(x.square().unsqueeze(1), (3, 1, 1), 1, (1, 0, 0)).squeeze(1)).sqrt()
    ),
    "normalize": lambda x: F.normalize(x, dim=1),
    "linear": lambda x: F.linear(x, torch.ones(4, x.shape[-1])),
    "linear to nothing": lambda x: F.linear(x, torch.ones(0, x.shape[-1])),
    "tokens": lambda x: F.linear(x.flatten(2).mT, torch.ones(3, x.shape[1])),
    "convolution": lambda x: of_rank("conv", x)(
        x, torch.ones(4, x.shape[1], *(3,) * (x.dim() - 2))
    ),
    "1x1": lambda x: of_rank("conv", x)(x, torch.ones(5, x.shape[1], *(1,) * (x.dim() - 2))),
    "to no channels": lambda x: F.conv2d(x, torch.ones(0, x.shape[1], 1, 1)),
    "product": lambda x: x @ x.mT,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "average": lambda x: of_rank("avg_pool", x)(x, 3, 1, 1),
    "maximum": lambda x: of_rank("max_pool", x)(x, 2),
    "global average": lambda x: of_rank("adaptive_avg_pool", x)(x, 1),
    "mean": lambda x: x.mean(pixels(x)),
    "gate": lambda x: x * x.mean(pixels(x), keepdim=True).sigmoid(),
    "resampled": lambda x: F.interpolate(x, size=(4,) * (x.dim() - 2)),
    "sampled": lambda x: F.grid_sample(x, torch.zeros(len(x), 4, 4, 2), align_corners=False),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "halves": lambda x: F.glu(x, 1),
    "concat": lambda x: torch.cat((x, x), 1),
    "rolled": lambda x: x.roll(1, 2),
    "padded": lambda x: F.pad(x, (1, 1, 1, 1)),
    "flat": lambda x: x.flatten(1),
    "largest": lambda x: x.amax(1, keepdim=True),
    "argmax": lambda x: x.argmax(1),
    "sum": lambda x: x.sum(1),
}
OPERANDS = {
    "a number": lambda x, y: x.abs().mean(),
    "a number of the result": lambda x, y: y.abs().sum(),
    "an average of one": lambda x, y: F.avg_pool2d(x.abs().mean().expand(1, 1, 2, 2), 2).view(()),
    "one element": lambda x, y: x.flatten()[:1],
    "one element of many dims": lambda x, y: x.mean(tuple(range(x.dim())), keepdim=True),
    "channels": lambda x, y: x.mean((0, *pixels(x)), keepdim=True),
    "a vector": lambda x, y: x.mean((0, *pixels(x))),
    "a row": lambda x, y: x[(0,) * (x.dim() - 1)],
    "images": lambda x, y: x.flatten(1).mean(1),
    "one channel": lambda x, y: x.mean(1, keepdim=True),
    "a gate": lambda x, y: x.mean(pixels(x), keepdim=True).sigmoid(),
    "one dim more": lambda x, y: x.unsqueeze(0),
    "the input": lambda x, y: x,
}
JOINS = {
    "alone": lambda a, b: a,
    "mul": torch.mul,
    "div": lambda a, b: a / (1 + b.abs()),
    "div of": lambda a, b: (1 + a.abs()) / (0.5 + b.abs()),
    "add": torch.add,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b),
    "matmul": torch.matmul,
    "concat": lambda a, b: torch.cat((a.flatten(), b.flatten())),
}


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.images, self.sizes = 2, [6] * chance.choice((1, 2, 2, 2, 3))
        if chance.random() < 0.15:
            self.images = 0
        if chance.random() < 0.15:
            self.sizes[chance.randrange(len(self.sizes))] = 0
        cut = "all" if chance.random() < 0.7 else chance.choice(list(CUTS))
        self.words = (
            cut,
            chance.choice(list(OPS)),
            chance.choice(list(OPS)),
            chance.choice(list(OPERANDS)),
            chance.choice(list(JOINS)),
            chance.random() < 0.5,
        )
        torch.manual_seed(seed)
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(self.sizes) - 1]
        self.layer = kind(CHANNELS, CHANNELS, 3, padding=1)

    def input(self) -> Tensor:
        return torch.rand(self.images, CHANNELS, *self.sizes) + 0.1

    def forward(self, x: Tensor) -> Tensor:
        cut, first, second, operand, join, swapped = self.words
        y = OPS[second](OPS[first](CUTS[cut](self.layer(x))))
        z = OPERANDS[operand](x, y)
        return JOINS[join](*((z, y) if swapped else (y, z)))


@torch.no_grad()
def check(seed: int) -> str | None:
    """What is wrong; "" if nothing is, None if the dense model refuses."""
    model = Model(seed).eval()
    x = model.input()
    try:
        dense = model(x)
    except Exception:
        return None
    results = {
        "optimized": tb.optimize(model, x, tune=False, verify=False)(x),
        "eager": model(x.to_blocked()).to_dense(),
    }
    for form, result in results.items():
        if result.shape != dense.shape or result.dtype != dense.dtype:
            got = f"{list(result.shape)} {result.dtype}"
            return f"{form}: expected {list(dense.shape)} {dense.dtype}, got {got}"
        if not torch.allclose(result, dense, rtol=1e-3, atol=1e-4, equal_nan=True):
            return f"{form}: off by {(result - dense).abs().max().item()}"
    return ""


def check_alone(seed: int, note) -> str | None:
    """In a process for some hundred of them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return check(seed)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    seeds = list(range(options.seed, options.seed + options.models))
    for outcome in isolated.run(check_alone, seeds, jobs=options.jobs):
        wrong = outcome.death or outcome.value
        counts["refused" if wrong is None else "wrong" if wrong else "right"] += 1
        if wrong:
            print(f"seed {outcome.case}: {Model(outcome.case).words}: {wrong}", flush=True)
    print(f"{options.models} models from seed {options.seed} on: {dict(counts)}")
    return bool(counts["wrong"])


if __name__ == "__main__":
    sys.exit(main())
