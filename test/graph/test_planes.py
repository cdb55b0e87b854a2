"""1x1 convolutions of planes: what reads and writes plain memory needs no block and no reorder."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked, steps
from helpers.problems import CHANNELS, prefer
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")

ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "hardswish": F.hardswish}
PLAIN = {3: "ncw", 4: "nchw", 5: "ncdhw"}
DIMS = {1: (37,), 2: (13, 17), 3: (3, 5, 7)}


class Net(nn.Module):
    """A layer of planes, and what follows it."""

    def __init__(self, channels, outputs, dims, activation="none", adds=False, bias=True):
        super().__init__()
        self.layer = getattr(nn, f"Conv{dims}d")(channels, outputs, 1, bias=bias)
        self.activation, self.adds = ACTIVATIONS[activation], adds

    def forward(self, x, y):
        z = self.layer(x)
        return self.activation(z + y if self.adds else z)


def planes(net, *tensors):
    """Optimized by what a file of times says: the layer in planes."""
    tuned = tb.optimize(net, tensors, tune="full", verify=False)
    prefer(tuned, "planes", "-" + PLAIN[tensors[0].dim()])
    fast = blocked(net, *tensors, tune="full", verify=False)
    assert [step.implementation for step in fast.steps()] == ["planes"], fast.plan()
    assert_exact(net, fast, *tensors)
    return fast


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("dims", DIMS)
def test_channels(channels, batch, dims):
    torch.manual_seed(channels)
    outputs = 34 - channels
    x, y = torch.randn(batch, channels, *DIMS[dims]), torch.randn(batch, outputs, *DIMS[dims])
    planes(Net(channels, outputs, dims).eval(), x, y)


@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(activation, bias, adds):
    x, y = torch.randn(2, 5, 20, 33), torch.randn(2, 6, 20, 33)
    planes(Net(5, 6, 2, activation, adds, bias).eval(), x, y)


@pytest.mark.parametrize("pixels", (1, 15, 16, 63, 64, 65, 255, 256, 257, 1000))
def test_pixels(pixels):
    """Vectors, tiles and units with a rest and without."""
    x, y = torch.randn(2, 3, pixels), torch.randn(2, 7, pixels)
    fast = planes(Net(3, 7, 1, "relu").eval(), x, y)
    x[1, 2, 0] = torch.nan
    assert fast(x, y)[1, :, 0].isnan().all() and not fast(x, y)[1, :, 1:].isnan().any()


def test_mixed_heads_need_no_reorder():
    """Attention whose heads are mixed before and after the softmax."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, q, k, v):
            scores = q @ k.transpose(-2, -1)
            scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            weights = scores.softmax(dim=-1)
            return self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v

    net = Mixed().eval()
    tensors = [torch.randn(1, 4, 196, 48) * 0.3 for _ in range(3)]
    fast = blocked(net, *tensors, tune=True)
    assert not steps(fast, "reorder"), fast.plan()
    assert len(steps(fast, "matmul")) == 2, fast.plan()
    assert_exact(net, fast, *tensors)
