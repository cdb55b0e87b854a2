"""Activations and residuals behind the sums of each kernel: in registers, or in their own loops."""

import pytest
import torch
from helpers.draws import crossed
from helpers.optimized import assert_exact, blocked
from helpers.problems import prefer, threads
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked import _C

pytestmark = pytest.mark.usefixtures("cache_folder")

# Implementation; input channels, output channels, kernel, groups. Images are 9 x 45 pixels: rows of
# more pixels than are activated at once, and a rest. Vectors of outputs belong to one group, and to
# two and three.
LAYERS = (
    ("direct", (20, 33, 1, 1)),
    ("direct", (64, 48, 3, 2)),
    ("direct", (20, 60, 1, 5)),
    ("direct", (42, 21, 3, 7)),
    ("winograd2", (17, 24, 3, 1)),
    ("winograd4", (17, 24, 3, 1)),
    ("depthwise", (17, 17, 3, 17)),
    ("grouped", (24, 48, 3, 3)),
)
if _C.isa() == "default":  # has no kernels of Winograd's
    LAYERS = tuple(layer for layer in LAYERS if not layer[0].startswith("winograd"))
ACTIVATIONS = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "mish": F.mish,
}
# What becomes of a sum z with the activation f and a residual r.
EPILOGUES = {
    "f": lambda f, z, r: f(z),
    "f, add": lambda f, z, r: f(z) + r,
    "add, f": lambda f, z, r: f(z + r),
    "f, add, f": lambda f, z, r: f(f(z) + r),
}


class Net(nn.Module):
    def __init__(self, inputs, outputs, kernel, groups, activation, epilogue):
        super().__init__()
        self.layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups)
        self.activation, self.epilogue = ACTIVATIONS[activation], EPILOGUES[epilogue]

    def forward(self, x, residual):
        return self.epilogue(self.activation, self.layer(x), residual)


def optimized(net, tensors, implementation):
    """With the layer by this implementation, in blocks."""
    prefer(tb.optimize(net, tensors, tune="full", verify=False), implementation, "nChw")
    return blocked(net, *tensors, tune="full", verify=False)


@pytest.mark.parametrize(
    ("layer", "activation", "epilogue"), crossed(4, LAYERS, ACTIVATIONS, EPILOGUES)
)
def test_epilogue(layer, activation, epilogue):
    implementation, layer = layer
    torch.manual_seed(0)
    inputs, outputs, *_ = layer
    net = Net(*layer, activation, epilogue).eval()
    tensors = torch.randn(2, inputs, 9, 45), torch.randn(2, outputs, 9, 45)
    with threads(2):
        fast = optimized(net, tensors, implementation)
        assert implementation in [step.implementation for step in fast.steps()], fast.plan()
        # 3e-7 of SiLU and GELU themselves; Winograd's own rounding.
        assert_exact(net, fast, *tensors, tolerance=16)


class Function(nn.Module):
    """A function behind a layer that changes nothing."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Conv2d(8, 8, 1, bias=False), function
        nn.init.dirac_(self.layer.weight)

    def forward(self, x):
        return self.function(self.layer(x))


# And how far from float64 they may be, relative to each value: Mish is less than 2^-20 at the end.
FUNCTIONS = {"tanh": (torch.tanh, 4e-7), "mish": (F.mish, 2e-6)}


@pytest.mark.parametrize("implementation", ("direct", "onednn_blocked"))
@pytest.mark.parametrize("function", FUNCTIONS)
@torch.no_grad()
def test_small_and_large_values(function, implementation):
    exact, tolerance = FUNCTIONS[function]
    sizes = torch.logspace(-30, 1.4, 8 * 40 * 50).view(1, 8, 40, 50)
    fast = optimized(Function(exact).eval(), (sizes,), implementation)
    assert f"aten::conv2d + {function}" in fast.plan()
    assert implementation in [step.implementation for step in fast.steps()]
    for x in (sizes, -sizes):
        expected = exact(x.double())
        assert ((fast(x) - expected) / expected).abs().max() <= tolerance
    far = torch.full_like(sizes, 1e30)
    assert torch.equal(fast(far), exact(far)) and torch.equal(fast(-far), exact(-far))
