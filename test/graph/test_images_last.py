"""What models compute on images with channels last, between permutations, runs on images."""

import random

import pytest
import torch
from torch import nn

import torch_blocked

PERMUTATIONS = {4: ((0, 2, 3, 1), (0, 3, 1, 2)), 5: ((0, 2, 3, 4, 1), (0, 4, 1, 2, 3))}
CHANNELS = (1, 3, 8, 15, 16, 33)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=outputs % 2 == 0)

    def forward(self, x):
        return self.layer(x)


class Scale(nn.Module):
    """Times a number for each channel, plus one for all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(channels))

    def forward(self, x):
        return x * self.gamma + 0.5


class ResponseNorm(nn.Module):
    """As in ConvNeXt V2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.randn(1, 1, 1, channels)) for _ in range(2))

    def forward(self, x):
        gains = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim() - 1)), keepdim=True)
        gains = gains / (gains.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * gains) + self.beta + x


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.layer(self.norm(x))


class Twice(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * channels, channels)

    def forward(self, x):
        return self.layer(torch.cat([x.sin(), x], -1))


class Gate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Linear(channels, channels)

    def forward(self, x):
        return x * self.layer(x.mean(tuple(range(1, x.dim() - 1)), keepdim=True)).sigmoid()


class Last(nn.Module):
    """A convolution, layers on channels last, the way back, a sum and a convolution."""

    def __init__(self, rank: int, channels: int, layers: list[nn.Module]) -> None:
        super().__init__()
        conv = {4: nn.Conv2d, 5: nn.Conv3d}[rank]
        self.first = conv(3, channels, 3, padding=1)
        self.layers = nn.Sequential(*layers)
        self.last = conv(channels, 4, 1)
        self.to_last, self.from_last = PERMUTATIONS[rank]

    def forward(self, x):
        x = self.first(x)
        y = self.layers(x.permute(self.to_last)).permute(self.from_last)
        return self.last(x + y)


def drawn_layers(draw: random.Random, channels: int) -> list[nn.Module]:
    kinds = (
        lambda: nn.LayerNorm(channels),
        lambda: Linear(channels, channels),
        lambda: nn.GELU(),
        lambda: Scale(channels),
        lambda: Residual(channels),
        lambda: Twice(channels),
        lambda: Gate(channels),
    )
    layers = [draw.choice(kinds)() for _ in range(draw.randint(1, 5))]
    return [*layers, ResponseNorm(channels)] if draw.random() < 0.3 and channels > 1 else layers


def check(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Optimized, which computes what the model does in float64 and repeats its bits."""
    optimized = torch_blocked.optimize(model, x, verify=False)
    with torch.no_grad():
        result, expected = optimized(x), model.double()(x.double())
    model.float()
    assert torch.allclose(result.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(result, optimized(x))
    return optimized


@pytest.mark.parametrize("seed", range(30))
def test_drawn_layers_keep_no_permutation(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rank = draw.choice((4, 4, 5))
    channels = draw.choice(CHANNELS)
    layers = drawn_layers(draw, channels)
    if rank == 5:
        layers = [each for each in layers if not isinstance(each, ResponseNorm)]
    model = Last(rank, channels, layers).eval()
    x = torch.randn(draw.choice((1, 3)), 3, *(draw.randint(4, 9) for _ in range(rank - 2)))
    optimized = check(model, x)
    assert "permute" not in {step.op for step in optimized.steps()}


class ReadAsItIs(Last):
    """Somebody else reads the image with channels last."""

    def forward(self, x):
        x = self.first(x).permute(self.to_last)
        return self.layers(x).permute(self.from_last), x.flatten(1, 2)


class AlongRows(Last):
    """An op along a dim that is not the channels'."""

    def forward(self, x):
        x = self.first(x).permute(self.to_last)
        return self.last(x.softmax(1).permute(self.from_last))


class Prelu(Last):
    """Its weights are those of the second dim, which is the rows."""

    def forward(self, x):
        x = self.first(x).permute(self.to_last)
        weight = torch.linspace(-1, 1, x.shape[1])
        return self.last(nn.functional.prelu(x, weight).permute(self.from_last))


@pytest.mark.parametrize("kind", [ReadAsItIs, AlongRows, Prelu])
def test_what_needs_channels_last_keeps_them(kind: type[Last]) -> None:
    torch.manual_seed(0)
    model = kind(4, 16, [nn.LayerNorm(16), nn.Linear(16, 16)]).eval()
    x = torch.randn(2, 3, 6, 7)
    optimized = torch_blocked.optimize(model, x, verify=False)
    with torch.no_grad():
        for result, expected in zip(
            torch.utils._pytree.tree_leaves(optimized(x)),
            torch.utils._pytree.tree_leaves(model(x)),
            strict=True,
        ):
            assert torch.allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_blocks_of_convnext_have_no_reorders() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(32, 32, 7, padding=3, groups=32)
            self.norm = nn.LayerNorm(32)
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
            self.gamma = nn.Parameter(torch.rand(32))

        def forward(self, x):
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            y = self.gamma * self.down(nn.functional.gelu(self.up(y)))
            return x + y.permute(0, 3, 1, 2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 4, 4), Block(), Block(), nn.Conv2d(32, 8, 1)).eval()
    optimized = check(model, torch.randn(1, 3, 64, 64))
    moves = [step.op for step in optimized.steps() if "reorder" in step.op or "permute" in step.op]
    assert len(moves) <= 2  # of the input and the result
