"""Convolutions whose rows go through all in turn: the same bits as one after the other."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from problems import CHANNELS, threads
from test_int8 import Conv
from test_optimize import blocked, cache_folder  # noqa: F401
from torch import nn

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Chain(nn.Module):
    """Convolutions of bytes, of which the last one may add what the first one reads."""

    def __init__(self, *convolutions, residual=False):
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.residual = residual

    def forward(self, x):
        y = x
        for convolution in self.convolutions[:-1]:
            y = convolution(y)
        return self.convolutions[-1](y, x) if self.residual else self.convolutions[-1](y)


def depthwise(channels, kernel=3, to=(0.05, 117), **geometry):
    geometry = {"padding": kernel // 2, **geometry}
    return Conv(channels, channels, kernel, groups=channels, then=F.relu, src=(0.05, 117), to=to,
                **geometry)  # fmt: skip


def point(inputs, outputs, src=(0.05, 117), **what):
    return Conv(inputs, outputs, 1, src=src, **what)


def steps_in_turn(fast):
    return sum("in turn" in step.why for step in fast.steps())


@torch.no_grad()
def check(model, x, steps):
    """In turn, and one after the other, as a profiler sees them; `steps` of them in turn."""
    fast = blocked(model.eval(), x, verify=False)
    in_turn = fast(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        apart = fast(x)
    assert torch.equal(in_turn, apart)
    assert torch.equal(in_turn, fast(x))
    expected = model(x)
    off = ((in_turn - expected) / 0.05).abs().round()
    assert off.max() <= 3 and (off > 0).float().mean() < 0.02, off.max()
    assert steps_in_turn(fast) == steps, fast.plan()


def has_chains():
    """Whether src of bytes is multiplied as it is: words are widened, and have no chains."""
    model = Chain(point(16, 96, src=(0.03, 101)), depthwise(96), point(96, 16)).eval()
    return steps_in_turn(blocked(model, torch.randn(1, 16, 20, 20), verify=False)) == 3


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("channels", CHANNELS[2:])
def test_inverted_residual(channels, images, count):
    all_steps = has_chains()
    with threads(count):
        for (stride, kernel), residual in itertools.product(
            ((1, 3), (2, 3), (1, 5), (2, 5)), (False, True)
        ):
            if residual and stride > 1:
                continue
            block = Chain(
                point(channels, 3 * channels, then=F.relu6),
                depthwise(3 * channels, kernel, stride=stride),
                point(3 * channels, channels, residual=(0.05, 117) if residual else None),
                residual=residual,
            )
            model = nn.Sequential(point(channels, channels, src=(0.03, 101)), block)
            steps = 3 if residual else 4  # what the sum reads, too, is written
            check(model, torch.randn(images, channels, 33, 29), steps * all_steps)


@pytest.mark.parametrize("size", [(64, 64), (200, 96), (9, 300), (5, 16), (128, 31)])
def test_sizes(size):
    steps = 3 if has_chains() else 0
    for count in (1, 2):
        with threads(count):
            model = Chain(point(24, 96, src=(0.03, 101)), depthwise(96), point(96, 24))
            check(model, torch.randn(1, 24, *size), steps)


def test_what_is_in_turn():
    """A first layer; a depthwise one with its 1x1 alone; two blocks in a row; uneven padding."""
    all_steps = has_chains()
    first = Conv(3, 32, 3, padding=1, stride=2, src=(0.03, 101), then=F.relu)
    x = torch.randn(1, 3, 64, 62)
    check(Chain(first, depthwise(32), point(32, 16)), x, 3 * all_steps)
    x = torch.randn(2, 40, 31, 30)
    check(Chain(depthwise(40), point(40, 24)), x, 2 * all_steps)
    blocks = [point(40, 64), depthwise(64), point(64, 24), point(24, 72), depthwise(72, 5),
              point(72, 24)]  # fmt: skip
    check(Chain(*blocks), x, 6 * all_steps)
    check(Chain(depthwise(40), point(40, 40), depthwise(40), point(40, 40)), x, 4 * all_steps)
    asymmetric = depthwise(64, padding=(0, 2), stride=2)
    check(Chain(point(40, 64), asymmetric, point(64, 24)), x, 3 * all_steps)


@pytest.mark.parametrize("width", [64, 65, 66, 67])
@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("stride", [2, 3, 4])
def test_windows_that_do_not_reach_the_end_of_a_row(width, kernel, stride):
    all_steps = has_chains()
    x = torch.randn(1, 24, 41, width)
    for geometry in ({"padding": 0}, {"padding": (kernel // 2, 0)}):
        middle = depthwise(48, kernel, stride=stride, **geometry)
        check(Chain(point(24, 48, src=(0.03, 101)), middle, point(48, 24)), x, 3 * all_steps)
        check(Chain(depthwise(24, kernel, stride=stride, **geometry), point(24, 24)), x,
              2 * all_steps)  # fmt: skip
        dense = Conv(48, 32, kernel, src=(0.05, 117), stride=stride, **geometry)
        check(Chain(point(24, 48, src=(0.03, 101)), dense, point(32, 24)), x, 3 * all_steps)


def test_who_is_not_in_turn():
    """Large weights beside few pixels; a value that another layer or the caller reads."""
    check(Chain(point(200, 600), depthwise(600), point(600, 200)), torch.randn(1, 200, 7, 7), 0)

    class Both(Chain):
        def forward(self, x):
            y = self.convolutions[0](x)
            return self.convolutions[1](y) + y

    model = Both(point(24, 48), depthwise(48)).eval()
    fast = blocked(model, torch.randn(1, 24, 30, 30), verify=False)
    assert steps_in_turn(fast) == 0


@torch.no_grad()
def test_residual_stays_until_all_have_read_it():
    """The sum may not lie over the image that other rows still read."""
    block = Chain(
        point(32, 96, src=(0.05, 117), then=F.relu),
        depthwise(96),
        point(96, 32, residual=(0.05, 117)),
        residual=True,
    )
    model = nn.Sequential(point(32, 32, src=(0.03, 101)), block, block).eval()
    x = torch.randn(1, 32, 60, 60)
    fast = blocked(model, x, verify=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        expected = fast(x)
    for _ in range(5):
        assert torch.equal(fast(x), expected)
