"""Layer norms over the last dim in torch_blocked.optimize: one pass over the rows."""

import itertools

import pytest
import torch
from helpers.optimized import assert_exact, blocked
from helpers.problems import threads
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cache_folder")


class Norm(nn.Module):
    def __init__(self, channels, weight=True, bias=True, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5) if weight else None
        self.bias = nn.Parameter(torch.randn(channels)) if bias else None
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


@pytest.mark.parametrize("parameters", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("channels", [1, 3, 7, 8, 9, 15, 16, 17, 33, 192, 1000])
@torch.no_grad()
def test_rows(channels, parameters):
    torch.manual_seed(channels)
    model = Norm(channels, *parameters).eval()
    for dims in ((1,), (3,), (2, 5), (2, 3, 7), (1, 3, 2, 4), (2400,)):
        x = 3 * torch.randn(*dims, channels) + 2
        optimized = blocked(model, x)
        assert " torch_blocked " in optimized.plan()
        assert_exact(model, optimized, x)
        result = optimized(x)
        with threads(1):
            assert torch.equal(result, optimized(x))
        empty = torch.empty(0, *x.shape[1:])
        assert optimized(empty).shape == empty.shape


@torch.no_grad()
def test_numbers_that_are_hard():
    """Equal values far from 0, whose mean must be exact; and NaN, infinities."""
    model = Norm(100, False, False).eval()
    x = torch.full((4, 100), 1e4) + torch.tensor([0.1, 0.2, 0.3, 0.0])[:, None]
    optimized = blocked(model, x)
    torch.testing.assert_close(optimized(x), torch.zeros_like(x), rtol=0, atol=1e-3)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    assert torch.equal(optimized(x).isnan(), model(x).isnan())


class Other(nn.Module):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-2:])


def test_over_other_dims():
    x = torch.randn(2, 3, 5, 7)
    assert_exact(Other().eval(), blocked(Other().eval(), x), x)


class Pixels(nn.Module):
    """As ConvNeXt has it: of the channels of each pixel."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 18, 3), nn.Conv2d(18, 5, 1)
        self.norm = Norm(18)

    def forward(self, x):
        return self.last(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@pytest.mark.parametrize("tune", [False, True])
def test_pixels_of_images(tune):
    model, x = Pixels().eval(), torch.randn(2, 3, 9, 8)
    assert_exact(model, blocked(model, x, tune=tune), x)


class ChannelNorms(nn.Module):
    """Norms over channels of images, which keep the format: one that convolutions read, one that is
    summed with what it normalizes, one whose permutation somebody else reads."""

    def __init__(self, channels, spatial=2):
        super().__init__()
        conv = nn.Conv2d if spatial == 2 else nn.Conv3d
        self.first, self.last = conv(3, channels, 3, padding=1), conv(channels, 5, 1)
        self.norms = nn.ModuleList((Norm(channels), Norm(channels, False, False), Norm(channels)))

    def norm(self, i, x):
        last = torch.movedim(x, 1, -1) if i == 2 else x.permute(0, *range(2, x.ndim), 1)
        y = self.norms[i](last).permute(0, x.ndim - 1, *range(1, x.ndim - 1))
        return y * last.mean() if i == 2 else y

    def forward(self, x):
        x = self.norm(0, self.first(x))
        x = self.norm(1, x) + x
        return self.last(self.norm(2, x))


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("spatial", [2, 3])
@pytest.mark.parametrize("channels", [1, 7, 8, 16, 17, 33, 200])
@torch.no_grad()
def test_channels_of_images(channels, spatial, tune):
    torch.manual_seed(channels)
    model = ChannelNorms(channels, spatial).eval()
    for images in (1, 3):
        x = torch.randn(images, 3, *(5, 9, 8)[-spatial:])
        optimized = blocked(model, x, tune=tune)
        norms = [step for step in optimized.steps() if step.op == "aten::layer_norm"]
        kept = [n.output for n in norms if n.output.startswith(("nChw", "nhwc", "nCdhw", "ndhwc"))]
        assert len(norms) == 3 and len(kept) >= 2, optimized.plan()
        assert_exact(model, optimized, x)
        with threads(1):
            assert torch.equal(optimized(x), optimized(x))
    assert optimized(torch.empty(0, *x.shape[1:])).shape[0] == 0


class Turns(nn.Module):
    """A linear layer and a norm between permutations, each to channels last, back, or none."""

    ORDERS = {"last": (0, 2, 3, 1), "first": (0, 3, 1, 2), "none": (0, 1, 2, 3)}

    def __init__(self, turns):
        super().__init__()
        self.turns, self.linear = [self.ORDERS[each] for each in turns], nn.Linear(6, 6)

    def forward(self, x):
        x = self.linear(x.permute(self.turns[0])).relu().permute(self.turns[1])
        return F.layer_norm(x, x.shape[-1:]).permute(self.turns[2])


@pytest.mark.parametrize("turns", list(itertools.product(Turns.ORDERS, repeat=3)))
@torch.no_grad()
def test_permutations_in_a_row(turns):
    """One to channels last may follow another: then it is not images that it makes."""
    model, x = Turns(turns).eval(), torch.randn(2, 6, 6, 6)
    assert_exact(model, blocked(model, x), x)
