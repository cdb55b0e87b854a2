"""Convolutions whose kernels cover the image: linear layers of as many rows as there are images."""

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import forced
from helpers.optimized import assert_exact, blocked
from helpers.problems import CHANNELS, assert_close, prefer, tail_is_zero
from torch import nn

import torch_blocked
from torch_blocked import _C

pytestmark = pytest.mark.usefixtures("cache_folder")

BLOCK = torch_blocked.native_blocks()[0]
KERNELS = {"1x1": (1, 1), "3x2": (3, 2), "1-D": (7,), "3-D": (2, 1, 3)}
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def layer(images, channels, outputs, kernel):
    torch.manual_seed(channels)
    weight = torch.randn(outputs, channels, *kernel) * (2 / channels) ** 0.5
    return torch.randn(images, channels, *kernel), weight, torch.randn(outputs)


@pytest.mark.parametrize("images, outputs", ((1, 33), (1, 1000), (3, 3 * BLOCK), (8, BLOCK)))
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_eager(kernel, channels, images, outputs):
    function = FUNCTIONS[len(KERNELS[kernel])]
    input, weight, bias = layer(images, channels, outputs, KERNELS[kernel])
    with forced("few_rows"):
        result, again = (function(input.to_blocked(), weight, bias) for _ in range(2))
    assert _C.last_implementation("convolution") == "few_rows"
    assert tail_is_zero(result) and torch.equal(result._physical, again._physical)
    exact = function(input.double(), weight.double(), bias.double())
    assert_close(result.to_dense(), function(input, weight, bias), exact)


@pytest.mark.parametrize("kernel", ((1, 2), (2, 1), (2, 2)))
@torch.no_grad()
def test_padding_that_lies_at_the_end_only(kernel):
    """ "same" for an even kernel puts the odd zero there: dst has a pixel more than one."""
    model = nn.Conv2d(5, BLOCK, kernel, padding="same").eval()
    x = torch.randn(1, 5, *kernel)
    assert_exact(model, torch_blocked.optimize(model, x, verify=False, tune=False), x)


class Head(nn.Module):
    """What is left of an image, and its residual."""

    def __init__(self, channels, kernel, function):
        super().__init__()
        self.layer = nn.Conv2d(channels, 4 * BLOCK, kernel)
        self.function = function

    def forward(self, x, residual):
        return self.function(self.layer(x), residual)


@pytest.mark.parametrize("format", ("nchw", "nhwc", f"nChw{BLOCK}c"))
@pytest.mark.parametrize("images", (1, 3))
@pytest.mark.parametrize(
    "function",
    (
        lambda y, r: F.hardswish(y),
        lambda y, r: F.relu(y + r),
        lambda y, r: F.silu(y) + r,
        lambda y, r: y + r,
    ),
)
def test_formats_and_epilogues(function, images, format):
    torch.manual_seed(0)
    model = Head(17, (2, 3), function).eval()
    tensors = torch.randn(images, 17, 2, 3), torch.randn(images, 4 * BLOCK, 1, 1)
    tuned = torch_blocked.optimize(model, tensors, tune="full", verify=False)
    prefer(tuned, "few_rows", f" {format}-{format}")
    fast = blocked(model, *tensors, tune="full", verify=False)
    assert " few_rows " in fast.plan()
    assert_exact(model, fast, *tensors)


REFUSED = {
    "a padding": ((1, 16, 3, 3), (3, 3), {"padding": 1}),
    "pixels beyond the kernel": ((1, 16, 3, 4), (3, 3), {}),
    "a dilation": ((1, 16, 5, 5), (3, 3), {"dilation": 2}),
    "groups": ((1, 32, 1, 1), (1, 1), {"groups": 2}),
    "many images": ((9, 16, 1, 1), (1, 1), {}),
    "tails between images": ((2, 16, 1, 1), (1, 1), {}),
}


@pytest.mark.parametrize("reason", REFUSED)
@torch.no_grad()
def test_what_it_refuses(reason):
    dims, kernel, arguments = REFUSED[reason]
    outputs = 33 if reason.startswith("tails") else 2 * BLOCK
    weight = torch.randn(outputs, dims[1] // arguments.get("groups", 1), *kernel)
    with forced("few_rows"), torch_blocked.strict():
        with pytest.raises(NotImplementedError, match="expected a problem for few_rows"):
            F.conv2d(torch.randn(dims).to_blocked(), weight, None, **arguments)
