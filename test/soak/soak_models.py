"""The models of the soak, their inputs, and the dense results, which are made before it begins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from helpers.int8_layers import Conv as ConvOfBytes
from helpers.nets import Block
from torch import Tensor, nn

CLASSES = 10


class Wrong(AssertionError):
    """A result that is not the dense one."""


def check_close(got: Tensor, wanted: Tensor, what: str, within: float = 1e-3) -> None:
    """within: the error that is allowed, in parts of the largest wanted value."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise Wrong(f"{what}: expected {wanted.dtype} {wanted.shape}, got {got.dtype} {got.shape}")
    error, scale = float((got - wanted).abs().max()), max(float(wanted.abs().max()), 1e-2)
    if not error <= within * scale:  # NaN is wrong, too
        raise Wrong(f"{what}: off by {error:.3g} of {scale:.3g}, allowed: {within * scale:.3g}")


class Convolutions(nn.Module):
    """A small network of convolutions: images -> [N, classes]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(3, 24), Block(24, 40)
        self.last = nn.Linear(40, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(self.first(x), 2)
        return self.last(self.second(x).mean((2, 3)))


class Depthwise(nn.Module):
    """Inverted residuals with squeeze and excitation."""

    def __init__(self, channels=24, hidden=48):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 2, 1)
        self.expand = nn.Conv2d(channels, hidden, 1)
        self.depthwise = nn.Conv2d(hidden, hidden, 5, 1, 2, groups=hidden)
        self.squeeze, self.excite = nn.Conv2d(hidden, 8, 1), nn.Conv2d(8, hidden, 1)
        self.project = nn.Conv2d(hidden, channels, 1)
        self.last = nn.Linear(channels, CLASSES)

    def forward(self, x):
        x = F.hardswish(self.stem(x))
        y = F.hardswish(self.depthwise(F.hardswish(self.expand(x))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))
        x = x + self.project(y * torch.sigmoid(gate))
        return self.last(x.mean((2, 3)))


class Residual(nn.Module):
    """Two residual blocks, the second of stride 2, and a concat."""

    def __init__(self, channels=32):
        super().__init__()
        self.stem = Block(3, channels)
        self.a, self.b = Block(channels, channels), nn.Conv2d(channels, channels, 3, 1, 1)
        self.c, self.short = nn.Conv2d(channels, 48, 3, 2, 1), nn.Conv2d(channels, 48, 1, 2)
        self.last = nn.Conv2d(96, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.b(self.a(x)))
        y, z = self.c(x), self.short(x)
        return self.last(torch.cat([F.relu(y + z), F.avg_pool2d(y, 3, 1, 1)], 1)).mean((2, 3))


class Attention(nn.Module):
    """Patches of an image as tokens, one block of a transformer."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        n, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).view(n, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, tokens, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.last(x.mean(1))


class Recurrent(nn.Module):
    """A convolution over time, an LSTM of both directions and a linear layer for each token."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(12, 24, 3, padding=1)
        self.lstm = nn.LSTM(24, 20, batch_first=True, bidirectional=True)
        self.last = nn.Linear(40, 6)

    def forward(self, x):
        x = F.relu(self.conv(x)).transpose(1, 2)
        return self.last(self.lstm(x)[0])


class OfBytes(nn.Module):
    """Layers on bytes, as quantizers leave them."""

    def __init__(self):
        super().__init__()
        self.first = ConvOfBytes(3, 24, then=F.relu, to=(0.02, 0))
        self.second = ConvOfBytes(24, 40, src=(0.02, 0), to=None)

    def forward(self, x):
        return self.second(self.first(x)).mean((2, 3))


class AsksForSizes(nn.Module):
    """Each size has a capture of its own, because Python computes with it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x):
        y = self.second(F.silu(self.first(x)))
        return y.mean((2, 3)) + float(x.shape[2]) / 16


class Resampled(nn.Module):
    """A small U-Net: pooling, a transposed convolution, nearest pixels, a concat."""

    def __init__(self):
        super().__init__()
        self.down, self.deep = Block(3, 16), Block(16, 32)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, x):
        x = self.down(x)
        y = self.up(self.deep(F.max_pool2d(x, 2)))
        y = self.last(torch.cat([x, y], 1))
        return F.interpolate(y, scale_factor=2.0).amax(3)


IMAGES = ((1, 3, 32, 32), (2, 3, 32, 40), (1, 3, 48, 24), (3, 3, 24, 24))
SEQUENCES = ((1, 12, 20), (3, 12, 20), (2, 12, 33), (1, 12, 7))


@dataclass(frozen=True)
class Source:
    """A model, the dims that it is called with, and how near its results must be."""

    build: Callable[[], nn.Module]
    sizes: tuple[tuple[int, ...], ...] = IMAGES
    within: float = 1e-3


# Few sizes each, so that all plans are kept and memory can be flat. Bytes may round the other way.
SOURCES: dict[str, Source] = {
    "convolutions": Source(Convolutions),
    "depthwise": Source(Depthwise),
    "residual": Source(Residual),
    "attention": Source(Attention),
    "recurrent": Source(Recurrent, SEQUENCES),
    "of bytes": Source(OfBytes, within=2e-2),
    "asks for sizes": Source(AsksForSizes),
    "resampled": Source(Resampled),
}


@dataclass(frozen=True)
class Known:
    """A model with its inputs and its own results."""

    name: str
    dense: nn.Module
    inputs: list[Tensor]
    results: list[Tensor]
    within: float

    def model(self) -> nn.Module:
        """A copy with weights of its own, which come and go with it."""
        return copy.deepcopy(self.dense)

    def check(self, which: int, result: Tensor) -> None:
        check_close(result, self.results[which], f"{self.name}, input {which}", self.within)


@torch.no_grad()
def known_models(seed: int) -> list[Known]:
    """All models, with weights and inputs of this seed."""
    torch.manual_seed(seed)
    known = []
    for name, source in SOURCES.items():
        model = source.build().eval()
        inputs = [torch.randn(size) for size in source.sizes]
        known.append(Known(name, model, inputs, [model(x) for x in inputs], source.within))
    return known
