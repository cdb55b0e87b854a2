"""Linear layers of tokens next to the image whose pixels these are: 1x1 convolutions of it."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked, steps
from helpers.problems import CHANNELS, threads
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cache_folder")


def to_image(x, size, how):
    n, _, c = x.shape
    if how == "transpose":
        return x.transpose(1, 2).view(n, c, *size)
    if how == "permute":
        return x.permute(0, 2, 1).reshape(n, c, *size)
    return x.reshape(n, *size, c).permute(0, 3, 1, 2)


def to_tokens(x, how):
    if how == "transpose":
        return x.flatten(2).transpose(1, 2)
    if how == "permute":
        return x.reshape(*x.shape[:2], -1).permute(0, 2, 1)
    return x.permute(0, 2, 3, 1).flatten(1, 2)


class TokenNet(nn.Module):
    """Layers of tokens around a depthwise convolution of their image, as in SegFormer."""

    def __init__(self, channels, hidden, how, size, act_first=False):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.first, self.second = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.middle = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.how, self.size, self.act_first = how, size, act_first

    def forward(self, x):
        y = self.first(self.norm(x))
        if self.act_first:
            y = F.relu(y)
        y = to_tokens(self.middle(to_image(y, self.size, self.how)), self.how)
        return x + self.second(F.gelu(y))


@pytest.mark.parametrize("act_first", [False, True])
@pytest.mark.parametrize("how", ["transpose", "permute", "last"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_layers_of_tokens(channels, how, act_first):
    net = TokenNet(channels, 40, how, (6, 8), act_first).eval()
    x = torch.randn(2, 48, channels)
    fast = blocked(net, x)
    images = [step.output for step in steps(fast, "linear")]
    assert len(images) == 2 and all("[2, " in each and "6, 8]" in each for each in images)
    assert_exact(net, fast, x)


@threads(2)
def test_rows_of_tokens_in_turn():
    net = TokenNet(32, 128, "transpose", (64, 64)).eval()
    x = torch.randn(1, 4096, 32)
    fast = blocked(net, x)
    assert sum("in turn" in step.why for step in fast.steps()) == 3, fast.plan()
    assert_exact(net, fast, x)
    assert torch.equal(fast(x), fast(x))


def test_wide_layers_before_few_channels_stay():
    """A layer of fewer outputs than inputs, before an image: its result is the smaller one."""

    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.conv = nn.Linear(64, 16), nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x):
            return self.conv(to_image(self.linear(x), (4, 4), "transpose"))

    net, x = Narrow().eval(), torch.randn(2, 16, 64)
    fast = blocked(net, x)
    assert [step.output for step in steps(fast, "linear")] == ["ncw [2, 16, 16]"]
    assert_exact(net, fast, x)
