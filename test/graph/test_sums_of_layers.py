"""Sums of convolutions and scales of one image: a layer whose weight is the sum."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked, randomized
from helpers.problems import CHANNELS
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cache_folder")

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def ops(fast):
    return [step.op for step in fast.steps() if step.op not in ("reorder", "contiguous")]


class RepBlock(nn.Module):
    """As RepVGG has it while it is trained: 3x3, 1x1 and the image itself, each with its norm."""

    def __init__(self, channels, outputs=None, dims=2, stride=1, groups=1):
        super().__init__()
        outputs = outputs or channels
        conv, norm = CONVS[dims], NORMS[dims]
        what = {"stride": stride, "groups": groups, "bias": False}
        self.large = nn.Sequential(conv(channels, outputs, 3, padding=1, **what), norm(outputs))
        self.small = nn.Sequential(conv(channels, outputs, 1, **what), norm(outputs))
        same = channels == outputs and stride == 1
        self.identity = norm(channels) if same else None

    def forward(self, x):
        y = self.large(x) + self.small(x)
        return F.relu(y if self.identity is None else self.identity(x) + y)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels", CHANNELS)
def test_block(channels, dims):
    net = randomized(RepBlock(channels, dims=dims))
    x = torch.randn(3, channels, *(6, 5, 7)[:dims])
    fast = blocked(net, x)
    assert len(ops(fast)) == 1, fast.plan()
    assert_exact(net, fast, x)


@pytest.mark.parametrize("channels, groups", [(16, 16), (33, 33), (32, 2), (24, 3)])
def test_groups(channels, groups):
    net, x = randomized(RepBlock(channels, groups=groups)), torch.randn(2, channels, 9, 8)
    fast = blocked(net, x)
    assert len(ops(fast)) == 1, fast.plan()
    assert_exact(net, fast, x)


def test_stride():
    net, x = randomized(RepBlock(8, 24, stride=2)), torch.randn(2, 8, 9, 8)
    fast = blocked(net, x)
    assert len(ops(fast)) == 1, fast.plan()
    assert_exact(net, fast, x)


class Mixer(nn.Module):
    """FastViT's: x + scale * (conv(x) + narrow(x) + norm(x) - norm(x))."""

    def __init__(self, channels):
        super().__init__()
        self.wide = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.narrow = nn.Conv2d(channels, channels, 1, groups=channels, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x):
        a, b, c, d = self.norms
        mixed = d(x) + b(self.narrow(x)) + a(self.wide(x))
        return x + self.scale * (mixed - c(x))


@pytest.mark.parametrize("channels", CHANNELS)
def test_mixer(channels):
    net, x = randomized(Mixer(channels)), torch.randn(2, channels, 10, 9)
    fast = blocked(net, x)
    # The scale of one channel is a number, which stays with the sum behind it.
    assert len(ops(fast)) == (1 if channels > 1 else 2), fast.plan()
    assert_exact(net, fast, x)


class Sum(nn.Module):
    def __init__(self, *layers, combine=lambda a, b: a + b):
        super().__init__()
        self.layers, self.combine = nn.ModuleList(layers), combine

    def forward(self, x):
        return self.combine(*(layer(x) for layer in self.layers))


def conv(kernel, padding, **what):
    return nn.Conv2d(8, 16, kernel, padding=padding, **what)


ONE = {
    "3x3 in 5x5": (conv(5, 2), conv(3, 1)),
    "1x1 in 3x3, dilated": (conv(3, 2, dilation=2), conv(1, 0)),
    "3x3 dilated in 5x5": (conv(3, 2, dilation=2), conv(5, 2)),
    "rows in 3x3": (conv((1, 3), (0, 1)), conv(3, 1)),
    "same size": (conv(3, 1), conv(3, 1)),
    "even": (conv(4, "same"), conv(3, "same")),
    "padded": (conv(3, (2, 1)), conv(1, (1, 0))),
    "strides": (conv(3, 1, stride=2), conv(1, 0, stride=2)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("layers", ONE.values(), ids=ONE)
@pytest.mark.parametrize("subtracts", [False, True])
def test_one_kernel_in_another(layers, subtracts):
    combine = (lambda a, b: a - b) if subtracts else (lambda a, b: b + a)
    net, x = Sum(*layers, combine=combine).eval(), torch.randn(2, 8, 9, 7)
    fast = blocked(net, x)
    assert len(ops(fast)) == 1, fast.plan()
    assert_exact(net, fast, x)


def transposed(kernel):
    return nn.ConvTranspose2d(8, 16, kernel, padding=kernel // 2)


SEVERAL = {
    "neither holds the other": (conv((1, 3), (0, 1)), conv((3, 1), (1, 0))),
    "other strides": (conv(2, 0, stride=2), nn.Sequential(nn.MaxPool2d(2), conv(1, 0))),
    "an activation": (conv(3, 1), nn.Sequential(conv(1, 0), nn.ReLU())),
    "other groups": (conv(3, 1, groups=8), conv(1, 0)),
    "transposed": (transposed(3), transposed(1)),
}


@pytest.mark.parametrize("layers", SEVERAL.values(), ids=SEVERAL)
def test_others_stay(layers):
    net, x = Sum(*layers).eval(), torch.randn(2, 8, 8, 6)
    fast = blocked(net, x)
    assert len([op for op in ops(fast) if "conv" in op]) == 2, fast.plan()
    assert_exact(net, fast, x)


def test_what_others_read_stays():
    net = Sum(conv(3, 1), conv(1, 0), combine=lambda a, b: torch.cat((a + b, b), 1)).eval()
    x = torch.randn(2, 8, 8, 6)
    fast = blocked(net, x)
    assert len([op for op in ops(fast) if "conv" in op]) == 2, fast.plan()
    assert_exact(net, fast, x)


def test_alpha_stays():
    net = Sum(conv(3, 1), conv(1, 0), combine=lambda a, b: torch.add(a, b, alpha=2)).eval()
    x = torch.randn(2, 8, 8, 6)
    assert_exact(net, blocked(net, x), x)


def test_plans_share_the_weight():
    """It is summed and packed once, whatever the number of sizes."""
    net = randomized(nn.Sequential(RepBlock(16), Mixer(16)))
    fast = blocked(net, torch.randn(1, 16, 20, 20))
    fast(torch.randn(1, 16, 20, 20))
    before = fast._weights.packed_bytes()
    for size in (21, 22, 23):
        x = torch.randn(1, 16, size, size)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert fast._weights.packed_bytes() == before
