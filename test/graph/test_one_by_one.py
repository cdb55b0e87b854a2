"""1x1 convolutions behind one another, before what enlarges images and behind average pooling."""

import itertools

import pytest
import torch
from helpers.optimized import assert_exact, blocked, steps
from helpers.problems import CHANNELS
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cache_folder")


def flops(fast):
    return sum(step.flops for step in fast.steps())


# ---- one after another ---------------------------------------------------------------------------


@pytest.mark.parametrize("biases", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_two_are_one(dims, biases):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    net = nn.Sequential(conv(7, 24, 1, bias=biases[0]), norm(24), conv(24, 33, 1, bias=biases[1]))
    net[1].running_mean.normal_(), net[1].running_var.uniform_(0.5, 2)
    x = torch.randn(3, 7, *(6, 5, 4)[:dims])
    fast = blocked(net.eval(), x)
    assert len(steps(fast, "conv")) == 1, fast.plan()
    assert_exact(net, fast, x)


class Between(nn.Module):
    """What keeps two layers apart."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 16, 1)
        if kind in ("stride", "padding", "groups"):
            what = {"stride": {"stride": 2}, "padding": {"padding": 1}, "groups": {"groups": 8}}
            self.second = nn.Conv2d(24, 16, 1, **what[kind])
        self.kind = kind

    def forward(self, x):
        y = self.first(x)
        if self.kind == "activation":
            y = F.relu(y)
        z = self.second(y)
        return (y, z) if self.kind == "read" else z


@pytest.mark.parametrize("kind", ["activation", "read", "stride", "padding", "groups"])
def test_two_stay_two(kind):
    net, x = Between(kind).eval(), torch.randn(2, 8, 9, 7)
    fast = blocked(net, x)
    assert len(steps(fast, "conv")) == 2, fast.plan()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


def test_a_bottleneck_stays():
    net = nn.Sequential(nn.Conv2d(64, 4, 1), nn.Conv2d(4, 64, 1)).eval()
    x = torch.randn(1, 64, 8, 8)
    fast = blocked(net, x)
    assert len(steps(fast, "conv")) == 2
    assert_exact(net, fast, x)


# ---- before what enlarges images -----------------------------------------------------------------

ENLARGE = {
    "nearest": {"mode": "nearest"},
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "corners": {"mode": "bilinear", "align_corners": True},
    "exact": {"mode": "nearest-exact"},
    "bicubic": {"mode": "bicubic", "align_corners": False},
}


class Neck(nn.Module):
    """A 1x1 convolution of images, of which some are enlarged to the size of the largest."""

    def __init__(self, channels, outputs, enlarge="nearest", norm=True, then=nn.SiLU):
        super().__init__()
        self.conv = nn.Conv2d(sum(channels), outputs, 1, bias=not norm)
        self.norm, self.then = nn.BatchNorm2d(outputs) if norm else nn.Identity(), then()
        self.enlarge = ENLARGE[enlarge]

    def forward(self, *images):
        size = max(tuple(each.shape[2:]) for each in images)
        same = [
            each if tuple(each.shape[2:]) == size else F.interpolate(each, size, **self.enlarge)
            for each in images
        ]
        return self.then(self.norm(self.conv(torch.cat(same, 1))))


def images(*channels, n=2, sizes=()):
    sizes = sizes or [(12, 10) if i % 2 else (6, 5) for i in range(len(channels))]
    return [torch.randn(n, c, *size) for c, size in zip(channels, sizes, strict=True)]


@pytest.mark.parametrize("enlarge", ENLARGE)
@pytest.mark.parametrize("channels", CHANNELS)
def test_part_of_a_concat(channels, enlarge):
    """The part that is enlarged is multiplied before, with a quarter of its products."""
    net = Neck((32, channels), 24, enlarge).eval()
    xs = images(32, channels)
    fast = blocked(net, *xs)
    assert flops(fast) == 2 * 24 * 2 * (32 * 30 + channels * 120), fast.plan()
    assert_exact(net, fast, *xs)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order(order, n):
    all_channels, all_sizes = (17, 32, 24, 9), [(3, 2), (12, 10), (6, 5), (12, 10)]
    channels = [all_channels[i] for i in order]
    net = Neck(channels, 16, "bilinear", norm=False).eval()
    xs = images(*channels, n=n, sizes=[all_sizes[i] for i in order])
    fast = blocked(net, *xs)
    assert flops(fast) == 2 * 16 * n * (17 * 6 + 24 * 30 + (32 + 9) * 120), fast.plan()
    assert_exact(net, fast, *xs)


def test_many_more_outputs_stay_behind():
    """They would cost more to enlarge than their products do."""
    net, xs = Neck((2, 3), 64).eval(), images(2, 3)
    fast = blocked(net, *xs)
    assert flops(fast) == 2 * 64 * 2 * 5 * 120
    assert_exact(net, fast, *xs)


class Direct(nn.Module):
    def __init__(self, dims, mode, reader=None):
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](33, 9, 1)
        self.mode, self.reader = mode, reader

    def forward(self, x):
        y = F.interpolate(x, scale_factor=2, mode=self.mode)
        z = F.relu(self.conv(y))
        return (z, y) if self.reader else z


@pytest.mark.parametrize(
    "dims, mode",
    [
        (1, "nearest"),
        (1, "linear"),
        (2, "nearest"),
        (2, "bicubic"),
        (3, "nearest"),
        (3, "trilinear"),
    ],
)
def test_alone(dims, mode):
    net, x = Direct(dims, mode).eval(), torch.randn(3, 33, *(4, 5, 6)[:dims])
    fast = blocked(net, x)
    assert flops(fast) == 2 * 33 * 9 * x.numel() // 33, fast.plan()
    assert_exact(net, fast, x)


def test_what_others_read_stays():
    net, x = Direct(2, "nearest", reader=True).eval(), torch.randn(1, 33, 4, 4)
    fast = blocked(net, x)
    assert flops(fast) == 2 * 33 * 9 * 64
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


def test_what_is_made_smaller_stays():
    net = nn.Sequential(nn.Upsample(scale_factor=0.5), nn.Conv2d(16, 8, 1)).eval()
    x = torch.randn(1, 16, 8, 8)
    fast = blocked(net, x)
    assert flops(fast) == 2 * 16 * 8 * 16
    assert_exact(net, fast, x)


def test_other_sizes():
    net, xs = Neck((32, 16), 24, "bilinear").eval(), images(32, 16)
    fast = blocked(net, *xs)
    for sizes in ([(3, 3), (9, 7)], [(5, 5), (5, 5)], [(8, 8), (4, 4)]):
        others = images(32, 16, n=1, sizes=sizes)
        with torch.no_grad():
            torch.testing.assert_close(fast(*others), net(*others), rtol=1e-4, atol=1e-5)


# ---- behind average pooling ----------------------------------------------------------------------

POOLS = {
    "2x2": (nn.AvgPool2d(2), (4, 5)),
    "beyond": (nn.AvgPool2d(2, ceil_mode=True), (4, 6)),
    "unpadded": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (4, 6)),
    "adaptive": (nn.AdaptiveAvgPool2d((3, 4)), (3, 4)),
    "global": (nn.AdaptiveAvgPool2d(1), (1, 1)),
}


class Transition(nn.Module):
    """As DenseNet has between its blocks."""

    def __init__(self, channels, outputs, pool, between=None):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, outputs, 1)
        self.pool, self.between = pool, between or nn.Identity()

    def forward(self, x):
        return self.pool(self.between(self.conv(F.relu(self.norm(x)))))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_pooled_first(channels, pool):
    layer, (h, w) = POOLS[pool]
    net, x = Transition(channels, 24, layer).eval(), torch.randn(3, channels, 8, 11)
    fast = blocked(net, x)
    assert sum(step.flops for step in steps(fast, "conv")) == 2 * channels * 24 * 3 * h * w
    assert_exact(net, fast, x)


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(3, 1, 1),
        nn.MaxPool2d(2),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
    ],
)
def test_no_mean_stays_behind(pool):
    """Padding that counts, or a divisor, makes no mean of a bias; a maximum is no mean."""
    net, x = Transition(32, 16, pool).eval(), torch.randn(2, 32, 7, 9)
    fast = blocked(net, x)
    assert sum(step.flops for step in steps(fast, "conv")) == 2 * 32 * 16 * 2 * 63, fast.plan()
    assert_exact(net, fast, x)


def test_an_activation_stays_in_between():
    net, x = Transition(32, 16, nn.AvgPool2d(2), nn.ReLU()).eval(), torch.randn(2, 32, 8, 8)
    fast = blocked(net, x)
    assert sum(step.flops for step in steps(fast, "conv")) == 2 * 32 * 16 * 2 * 64
    assert_exact(net, fast, x)
