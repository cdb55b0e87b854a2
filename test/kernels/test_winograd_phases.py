"""Winograd convolutions of transposed problems with strides: one at stride 1 for each phase."""

import pytest
import torch
from helpers.convolutions import OUT_CHANNELS, check_winograd, layer
from helpers.implementations import forced
from helpers.optimized import assert_exact, blocked
from helpers.problems import CHANNELS, prefer
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked import _C

pytestmark = pytest.mark.usefixtures("cache_folder")

SIZES = {1: (23,), 2: (9, 13)}


def transposed_layer(dims, out_channels, kernel, with_bias=True):
    input, weight, bias = layer(dims, out_channels, kernel, with_bias)
    return input, weight.transpose(0, 1), bias


@pytest.mark.parametrize("block", (8, 16, 32))
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("batch", (0, 1, 3))
@pytest.mark.parametrize("kernel", [(4,), (4, 4), (3, 3)], ids=("4", "4x4", "3x3"))
def test_channels(block, channels, batch, kernel):
    dims = (batch, channels, *SIZES[len(kernel)])
    tensors = transposed_layer(dims, OUT_CHANNELS[channels], kernel, batch != 1)
    check_winograd("winograd_phases", tensors, block, True, stride=2, padding=1)


@pytest.mark.parametrize("padding, output_padding", [(0, 0), (0, 1), (1, 0), (1, 1), ((0, 1), 1)])
@pytest.mark.parametrize(
    "kernel, stride",
    [
        ((3, 3), 2), ((4, 4), 2), ((5, 5), 2), ((6, 6), 2), ((7, 7), 2), ((8, 8), 2), ((3, 6), 2),
        ((6, 6), 3), ((8, 8), 4), ((4, 3), (2, 1)), ((3, 8), (1, 4)), ((16,), 8), ((11,), 5),
    ],
)  # fmt: skip
def test_kernels(kernel, stride, padding, output_padding):
    """Tiles of 2 to 4 taps, and phases that have fewer."""
    if output_padding and (len(kernel) == 1 or 1 in (stride if isinstance(stride, tuple) else ())):
        output_padding = tuple(int(s > 1) for s in ((stride,) if len(kernel) == 1 else stride))
    if len(kernel) == 1 and isinstance(padding, tuple):
        padding = 2
    tensors = transposed_layer((2, 17, *SIZES[len(kernel)]), 9, kernel)
    check_winograd("winograd_phases", tensors, 8, True, stride=stride, padding=padding,
          output_padding=output_padding)  # fmt: skip


@pytest.mark.parametrize("size", range(1, 12))
def test_sizes(size):
    """Below, at and above those of a tile."""
    tensors = transposed_layer((2, 9, size, 12 - size), 17, (4, 4))
    check_winograd("winograd_phases", tensors, 16 if size % 2 else 8, True, stride=2, padding=1)


@pytest.mark.parametrize(
    "kernel, more",
    [
        ((4, 4), {"stride": 1}),
        ((2, 2), {"stride": 2}),
        ((3, 3), {"stride": 4}),
        ((9, 9), {"stride": 2}),
        ((4, 4), {"stride": 2, "padding": 3}),
        ((3, 3), {"stride": 2, "dilation": 4}),
        ((4, 4), {"stride": 2, "groups": 2}),
        ((4, 4, 4), {"stride": 2}),
    ],
)
def test_what_it_does_not_take(kernel, more):
    sizes = {2: (9, 13), 3: (5, 6, 7)}[len(kernel)]
    input, weight, _ = transposed_layer((2, 16, *sizes), 16, kernel)
    weight = weight[:, : 16 // more.get("groups", 1)]
    function = {2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(kernel)]
    with forced("winograd_phases"), pytest.raises(NotImplementedError), tb.strict():
        function(input.to_blocked(), weight, **more)


class Net(nn.Module):
    def __init__(self, kernel, stride):
        super().__init__()
        self.layer = nn.ConvTranspose2d(17, 24, kernel, stride, 1)

    def forward(self, x, residual):
        return F.silu(self.layer(x)) + residual


@pytest.mark.parametrize("kernel", (3, 4, 6))
def test_epilogues(kernel):
    torch.manual_seed(0)
    net, x = Net(kernel, 2).eval(), torch.randn(2, 17, 12, 15)
    residual = torch.randn_like(net.layer(x))
    prefer(tb.optimize(net, (x, residual), tune="full", verify=False), "winograd_phases", "nChw")
    fast = blocked(net, x, residual, tune="full", verify=False)
    assert "winograd_phases" in [step.implementation for step in fast.steps()]
    assert_exact(net, fast, x, residual, tolerance=16)


def test_gradients():
    """By src of a convolution at stride 2, which is such a problem."""
    x = torch.randn(2, 17, 24, 18, requires_grad=True)
    weight = torch.randn(24, 17, 4, 4)
    F.conv2d(x.to_blocked(), weight, stride=2, padding=1).to_dense().square().sum().backward()
    own, x.grad = x.grad, None
    F.conv2d(x, weight, stride=2, padding=1).square().sum().backward()
    torch.testing.assert_close(own, x.grad, rtol=1e-4, atol=1e-3 * x.grad.abs().max())


def test_is_the_choice_for_large_images():
    x = torch.randn(1, 128, 32, 32).to_blocked()
    F.conv_transpose2d(x, torch.randn(128, 64, 4, 4), stride=2, padding=1)
    by_isa = {"default": "direct", "amx": "amx"}  # tiles take 0.9 of the time
    assert _C.last_implementation("convolution") == by_isa.get(_C.isa(), "winograd_phases")
