"""Max pooling: windows of all kinds, of numbers and of bytes, and what becomes of NaN."""

import pytest
import torch
from helpers.int8_layers import Conv, fake
from helpers.optimized import assert_exact, blocked
from torch import nn

pytestmark = pytest.mark.usefixtures("cache_folder")

NAN, INF = float("nan"), float("inf")

POOLS = {
    "2x2": nn.MaxPool2d(2),
    "3x3": nn.MaxPool2d(3, 2, 1),
    "same": nn.MaxPool2d((5, 3), 1, (2, 1)),
    "ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
    "dilated": nn.MaxPool2d(3, 1, 1, dilation=2),
    "far": nn.MaxPool2d(2, 3, 1, dilation=4),
    "apart": nn.MaxPool2d(2, 3),
    "3-D": nn.MaxPool3d((1, 3, 2), 2, (0, 1, 1)),
}


@pytest.mark.parametrize("channels", (1, 16, 17))
@pytest.mark.parametrize("pool", POOLS)
@torch.no_grad()
def test_maxima_keep_it(pool, channels):
    model = POOLS[pool]
    rank = 3 if pool == "3-D" else 2
    convolution = (nn.Conv2d, nn.Conv3d)[rank - 2](channels, channels, 1)
    nn.init.dirac_(convolution.weight)
    whole = nn.Sequential(convolution, model).eval()
    x = torch.randn(2, channels, *(4, 9, 11)[-rank:])
    optimized = blocked(whole, x)
    assert " maximum " in optimized.plan()
    for value in (0.0, NAN, INF, -INF):
        images = [torch.full_like(x, value)]
        for at in (0, 2, -1):
            images.append(x.clone())
            images[-1][(1, 0, *[at] * rank)] = value
        for image in images:
            assert torch.allclose(optimized(image), whole(image), atol=1e-5, equal_nan=True)


class OfBytes(nn.Module):
    """Bytes of a layer, pooled."""

    def __init__(self, channels, pool, ndim):
        super().__init__()
        self.to = (0.05, 117)
        self.layer, self.pool = Conv(3, channels, 1, ndim=ndim, to=self.to), pool

    def forward(self, x):
        return fake(self.pool(self.layer(x)), *self.to)


@pytest.mark.parametrize("channels", (3, 16, 33))
@pytest.mark.parametrize("pool", POOLS)
@torch.no_grad()
def test_of_bytes(pool, channels):
    ndim = 3 if pool == "3-D" else 2
    model = OfBytes(channels, POOLS[pool], ndim).eval()
    x = torch.randn(2, 3, *(5, 9, 40)[-ndim:])
    fast = blocked(model, x, verify=False)
    assert any("maximum" in step.implementation for step in fast.steps()), fast.plan()
    apart = ((fast(x) - model(x)) / model.to[0]).round().abs()
    assert apart.max() <= 1 and apart.mean() < 0.01  # the layer's own rounding


class OfRows(nn.Module):
    """Beside layers, for rows longer than are pooled at a time."""

    def __init__(self, pool):
        super().__init__()
        self.layer, self.pool = nn.Conv2d(3, 9, 1), pool

    def forward(self, x):
        return self.pool(self.layer(x))


@pytest.mark.parametrize("pool", [each for each in POOLS if each != "3-D"])
def test_long_rows(pool):
    model, x = OfRows(POOLS[pool]).eval(), torch.randn(1, 3, 11, 1500)
    fast = blocked(model, x)
    assert " maximum " in fast.plan()
    assert_exact(model, fast, x)
