"""Programs that a convolution runs on what it has just stored, by each implementation: of pixels in
rows, in tiles, or of all of them at the end; and in chains, whose stages store a few rows."""

import pytest
import torch
from helpers.draws import crossed
from helpers.optimized import assert_exact, blocked
from helpers.problems import prefer, threads
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")

# Implementation: a layer on images of 9 x 45 pixels, or what the shape says.
LAYERS = {
    "direct": lambda: nn.Conv2d(20, 33, 1),
    "direct, stride 2": lambda: nn.Conv2d(20, 33, 3, stride=2),
    "direct, transposed": lambda: nn.ConvTranspose2d(20, 33, 4, stride=2, padding=1),
    "winograd2": lambda: nn.Conv2d(17, 24, 3, padding=1),
    "winograd4": lambda: nn.Conv2d(17, 24, 3, padding=1),
    "winograd4, stride 2": lambda: nn.Conv2d(17, 24, 3, stride=2, padding=1),
    "winograd4, groups": lambda: nn.Conv2d(32, 48, 3, padding=1, groups=2),
    "winograd4, dilation": lambda: nn.Conv2d(17, 24, 3, padding=2, dilation=2),
    "winograd4, one column": lambda: nn.Conv2d(17, 24, (3, 1)),
    "winograd3": lambda: nn.Conv2d(3, 24, 7, stride=2, padding=3),
    "depthwise": lambda: nn.Conv2d(17, 17, 3, padding=1, groups=17),
    "depthwise, stride 2": lambda: nn.Conv2d(17, 17, 5, stride=2, padding=2, groups=17),
    "depthwise, transposed": lambda: nn.ConvTranspose2d(17, 17, 4, stride=2, groups=17),
    "grouped": lambda: nn.Conv2d(24, 48, 3, padding=1, groups=3),
    "onednn_blocked": lambda: nn.Conv2d(16, 32, 3, padding=1),
}
VOLUMES = {
    "direct": lambda: nn.Conv3d(20, 33, 1),
    "winograd4": lambda: nn.Conv3d(17, 24, 3, padding=1),
    "winograd2": lambda: nn.Conv3d(17, 24, 3, padding=1),
    "depthwise": lambda: nn.Conv3d(17, 17, 3, padding=1, groups=17),
}


class Net(nn.Module):
    def __init__(self, layer, function, adds):
        super().__init__()
        self.layer, self.adds, self.function = layer, adds, function
        self.slopes = nn.Parameter(torch.randn(layer.out_channels))

    def forward(self, x, *residual):
        x = self.layer(x)
        if self.adds:
            x = x + residual[0]
        return self.function(x, self.slopes)


# The cosine of the tail's zeros is 1.
FUNCTIONS = {
    "prelu": F.prelu,
    "elu": lambda x, slopes: F.elu(x, 0.7),
    "cos": lambda x, slopes: torch.cos(x),
    "chain": lambda x, slopes: torch.exp(-x.abs()) * slopes.view(-1, *[1] * (x.dim() - 2)) + 1,
}


def check(layer, function, implementation, sizes, adds, count):
    torch.manual_seed(0)
    x = torch.randn(sizes)
    tensors = (x, torch.randn_like(layer(x))) if adds else (x,)
    net = Net(layer, FUNCTIONS[function], adds).eval()
    with threads(count):
        where = {3: "nCw", 4: "nChw", 5: "nCdhw"}[len(sizes)]
        prefer(tb.optimize(net, tensors, tune="full", verify=False), implementation, where)
        fast = blocked(net, *tensors, tune="full", verify=False)
        steps = [step for step in fast.steps() if step.op.startswith("aten::conv")]
        assert [step.implementation for step in steps] == [implementation], fast.plan()
        assert " + " in steps[0].op and len(fast.steps()) <= 3 + adds, fast.plan()
        with torch.no_grad():
            assert_exact(net, fast, *tensors, tolerance=16)
            assert torch.equal(fast(*tensors), fast(*tensors))


@pytest.mark.parametrize(
    ("layer", "function", "adds"), crossed(4, LAYERS, FUNCTIONS, (False, True))
)
def test_of_images(layer, function, adds):
    made = LAYERS[layer]()
    check(made, function, layer.split(",")[0], (2, made.in_channels, 9, 45), adds, 2)


@pytest.mark.parametrize("function", ("prelu", "cos"))
@pytest.mark.parametrize("layer", VOLUMES)
def test_of_volumes(layer, function):
    made = VOLUMES[layer]()
    check(made, function, layer, (2, made.in_channels, 5, 6, 13), True, 1)


@pytest.mark.parametrize("function", ("prelu", "cos"))
def test_of_sequences(function):
    check(nn.Conv1d(17, 24, 3, padding=1), function, "winograd4", (2, 17, 131), False, 2)


@pytest.mark.parametrize("channels", [1, 3, 7, 8, 9, 15, 16, 17, 33])
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_of_any_channels(channels, batch, function):
    torch.manual_seed(0)
    net = nn.Sequential(
        Net(nn.Conv2d(5, channels, 3, padding=1), FUNCTIONS[function], False),
        Net(nn.Conv2d(channels, channels, 1), FUNCTIONS[function], False),
    ).eval()
    x = torch.randn(batch, 5, 7, 6)
    fast = blocked(net, x, tune=False)
    assert sum(step.op.startswith("aten::conv") for step in fast.steps()) == 2
    with torch.no_grad():
        torch.testing.assert_close(fast(x).double(), net.double()(x.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ("prelu", "cos"))
def test_in_chains(function):
    """Stages run in bands of rows; both threads have some."""
    torch.manual_seed(0)

    def net_of(layer):
        return Net(layer, FUNCTIONS[function], False)

    net = nn.Sequential(
        net_of(nn.Conv2d(16, 96, 1)),
        net_of(nn.Conv2d(96, 96, 3, padding=1, groups=96)),
        nn.Conv2d(96, 16, 1),
    ).eval()
    x = torch.randn(1, 16, 112, 112)
    with threads(2):
        fast = blocked(net, x, tune=False)
        assert sum("rows go through steps" in step.why for step in fast.steps()) == 3, fast.plan()
        with torch.no_grad():
            assert_exact(net, fast, x, tolerance=16)


def test_who_else_reads_the_sum_gets_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(8, 16, 1)

        def forward(self, x):
            y = self.layer(x)
            return y, F.elu(y)

    net, x = Model().eval(), torch.randn(1, 8, 5, 7)
    sums, results = tb.optimize(net, x, tune=False)(x)
    torch.testing.assert_close(sums, net.layer(x))
    torch.testing.assert_close(results, F.elu(net.layer(x)))
