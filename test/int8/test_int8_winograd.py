"""Convolutions of bytes by Winograd's F(4x4, 3x3) in words, chosen or not."""

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import forced
from helpers.int8_layers import ACTIVATIONS, Conv, Padded, check
from helpers.optimized import blocked
from helpers.problems import CHANNELS, threads

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def words():
    with forced("winograd_words", "quantized_convolution"):
        yield "winograd_words"


@pytest.mark.parametrize("channels", [*CHANNELS[2:], 64, 65, 130])
@pytest.mark.parametrize("images", [0, 1, 3])
def test_winograd(words, channels, images):
    for size in ((7, 9), (16, 12), (1, 2), (3, 21)):
        model = Conv(channels, 17, padding=1, then=F.relu)
        check(model, torch.randn(images, channels, *size), by=words)
    model = Conv(33, channels, bias=False, src=(0.03, 0), to=(0.05, 255))
    check(model, torch.randn(images, 33, 11, 6), by=words)


@pytest.mark.parametrize("then", ACTIVATIONS)
def test_what_follows_winograd(words, then):
    x, residual = torch.randn(2, 19, 8, 9), torch.randn(2, 33, 8, 9)
    for to in ((0.05, 117), None):
        check(Conv(19, 33, padding=1, then=then, to=to), x, by=words)
        model = Conv(19, 33, padding=1, then=then, residual=(0.04, 99), to=to)
        check(model, x, residual, by=words)


def test_other_geometry_of_winograd(words):
    check(Padded(17, 17, padding=1), torch.randn(2, 17, 12, 13), by=words)
    check(Conv(17, 17, padding=(2, 0)), torch.randn(2, 17, 12, 13), by=words)
    check(Conv(18, 20, (1, 3, 3), ndim=3, padding=1), torch.randn(2, 18, 3, 8, 7), by=words)
    huge = Conv(16, 16, padding=1, to=(1e-10, 3))
    check(huge, 1e3 * torch.randn(2, 16, 9, 11), by=words)
    for kernel, geometry in (
        (3, {"stride": 2}),
        (5, {}),
        (3, {"groups": 16}),
        (3, {"dilation": 2}),
    ):
        with pytest.raises(NotImplementedError, match="expected a problem for winograd_words"):
            check(Conv(16, 16, kernel, **geometry), torch.randn(1, 16, 9, 11))


@torch.no_grad()
def test_no_sum_of_winograd_overflows(words):
    """The largest words of src, 18 * 255, meet those of weights, 49 * 127, in all 200 channels."""
    model = Conv(200, 16, bias=False, src=(1.0, 0), to=None).eval()
    model.weight.fill_(127)
    model.scale.fill_(1)
    signs = torch.tensor([1, -1, -1, 1]).repeat(4)
    x = (signs[:, None] * signs > 0).float().mul(255).expand(1, 200, 16, 16).contiguous()
    exact = F.conv2d(x.double(), torch.full((16, 200, 3, 3), 127.0).double())
    result = blocked(model, x, verify=False)(x).double()
    assert (result - exact).abs().max() <= 1e-6 * exact.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
def test_winograd_does_not_depend_on_threads(words, count):
    model, x = Conv(70, 40, padding=1).eval(), torch.randn(1, 70, 57, 61)
    fast = blocked(model, x, verify=False)
    expected = fast(x)
    with threads(count):
        assert torch.equal(blocked(model, x, verify=False)(x), expected)
