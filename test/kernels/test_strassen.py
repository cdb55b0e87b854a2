"""1x1 convolutions and linear layers by Strassen's product: every way to halve rows, lanes and
columns, what becomes of a sum, and the switch that turns it off."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import forced
from helpers.problems import assert_close, prefer, threads
from torch import nn

import torch_blocked
from torch_blocked import _C, BlockedTensor
from torch_blocked.tensor import tail_is_zero

ERROR_FACTOR = 4  # of ATen's, as Winograd's

BLOCK = torch_blocked.native_blocks()[0]

# Input and output channels: whole vectors, an odd number of them, and tails, in either half.
CHANNELS = ((96, 96), (96, 160), (112, 144), (97, 131), (257, 128), (128, 1024), (1040, 96))
# Pixels: halves that share a row or do not; one part of the rows and several.
IMAGES = ((4, 7), (7, 7), (9, 14), (29, 31))


def layer(dims, out_channels, generator=None):
    generator = generator or torch.Generator().manual_seed(0)
    weight = torch.randn(out_channels, dims[1], *[1] * (len(dims) - 2), generator=generator)
    bias = torch.randn(out_channels, generator=generator)
    input = torch.randn(dims, generator=generator).relu()
    return input, weight * (2 / dims[1]) ** 0.5, bias


def run(function, input, weight, bias):
    with forced("strassen"), torch.no_grad():
        result = function(input.to_blocked(), weight, bias)
    assert _C.last_implementation("convolution") == "strassen"
    assert isinstance(result, BlockedTensor) and result.block == BLOCK
    return result


def check(function, input, weight, bias):
    kept = input.clone()
    result, again = (run(function, input, weight, bias) for _ in range(2))
    assert tail_is_zero(result) and torch.equal(input, kept)
    assert torch.equal(result._physical, again._physical)
    expected = function(input, weight, bias)
    exact = function(input.double(), weight.double(), bias.double())
    assert result.shape == expected.shape
    assert_close(result.to_dense(), expected, exact, ERROR_FACTOR)


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_convolutions(channels, size):
    check(F.conv2d, *layer((1, channels[0], *size), channels[1]))


@pytest.mark.parametrize("function, size", ((F.conv1d, (61,)), (F.conv3d, (3, 5, 7))))
def test_batches_of_other_ranks(function, size):
    check(function, *layer((3, 113, *size), 104))


def test_transposed():
    input, weight, bias = layer((2, 130, 9, 9), 97)
    check(F.conv_transpose2d, input, weight.transpose(0, 1), bias)


@pytest.mark.parametrize("arguments", ({"dilation": 2, "output_padding": 1}, {"padding": 1}))
def test_outputs_beyond_the_pixels(arguments):
    input, weight, bias = layer((1, 96, 9, 9), 96)
    with forced("strassen"), torch_blocked.strict(), torch.no_grad():
        with pytest.raises(NotImplementedError, match="expected a problem for strassen"):
            F.conv_transpose2d(input.to_blocked(), weight, bias, **arguments)
    result = F.conv_transpose2d(input.to_blocked(), weight, bias, **arguments)
    expected = F.conv_transpose2d(input, weight, bias, **arguments)
    torch.testing.assert_close(result.to_dense(), expected)


def test_gradients():
    input, weight, bias = layer((2, 128, 9, 9), 96)
    grad = torch.randn(2, 96, 9, 9)

    def gradients(dtype, blocked):
        leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (input, weight, bias)]
        x = leaves[0].to_blocked() if blocked else leaves[0]
        y = F.conv2d(x, *leaves[1:])
        y.backward(grad.to_blocked() if blocked else grad.to(dtype))
        return [t.grad for t in leaves]

    with forced("strassen"):
        ours = gradients(torch.float32, blocked=True)
    theirs, exact = gradients(torch.float32, False), gradients(torch.float64, False)
    for each in zip(ours, theirs, exact, strict=True):
        assert_close(*each, ERROR_FACTOR)


def test_any_number_of_threads():
    input, weight, bias = layer((1, 256, 20, 21), 320)
    with threads(1):
        one = run(F.conv2d, input, weight, bias)
    with threads(3):
        three = run(F.conv2d, input, weight, bias)
    assert torch.equal(one._physical, three._physical)


def test_what_it_refuses():
    input, weight, bias = layer((1, 40, 9, 9), 40)
    with forced("strassen"), torch_blocked.strict(), torch.no_grad():
        with pytest.raises(NotImplementedError, match="expected a problem for strassen"):
            F.conv2d(input.to_blocked(), weight, bias)


class Sum(nn.Module):
    """Sums in place, over the residual and not, with activations before and after."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(112, 112, 1) for _ in range(4))

    def forward(self, x):
        a, b, c, d = self.layers
        x = F.gelu(a(x))
        y = torch.relu(b(x) + x)
        z = F.silu(c(y)) + y
        return F.hardtanh(d(z) + z, 0.0, 6.0) - z


def optimized(model, x, format):
    """By what a file of times says: Strassen's product in this format only."""
    prefer(torch_blocked.optimize(model, x, tune="full", verify=False), "strassen", format)
    fast = torch_blocked.optimize(model, x, tune="full", verify=False)
    fast.choice = "blocked"
    return fast


def check_optimized(model, x, format, layers):
    fast = optimized(model, x, format)
    assert fast.plan().count("strassen") == layers
    with torch.no_grad():
        result, expected = fast(x), model(x)
        assert torch.equal(result, fast(x))
        assert_close(result, expected, model.double()(x.double()), ERROR_FACTOR)


@pytest.mark.parametrize("format", (f"nChw{BLOCK}c-nChw{BLOCK}c", "nhwc-nhwc"))
def test_sums_and_activations(format, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    check_optimized(Sum().eval(), torch.randn(2, 112, 7, 9), format, layers=4)


@pytest.mark.parametrize("rows, inputs, outputs", ((56, 96, 96), (197, 192, 576), (61, 1024, 112)))
@pytest.mark.parametrize("activation", (nn.Identity, nn.GELU, nn.ReLU))
def test_linear(rows, inputs, outputs, activation, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs), activation()).eval()
    check_optimized(model, torch.randn(rows, inputs), "linear", layers=1)


@pytest.mark.any_isa
def test_the_switch():
    """TORCH_BLOCKED_WINOGRAD=0 turns off all that makes fewer products, where times decide, too."""
    # In eager an estimate chooses; optimize() times.
    program = (
        "import torch, torch_blocked\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Conv2d(96, 64, 1), nn.Conv2d(64, 64, 3, padding=1)).eval()\n"
        "fast = torch_blocked.optimize(model, torch.randn(1, 96, 56, 56))\n"
        "print(fast._forms[0].compiled.times())\n"
        "x = torch.zeros(1, 64, 28, 28).to_blocked()\n"
        "torch.nn.functional.conv2d(x, torch.zeros(64, 64, 3, 3), padding=1)\n"
        "print('eager:', torch_blocked._C.last_implementation('convolution'))"
    )
    for setting in ("0", "1"):
        environment = os.environ | {"TORCH_BLOCKED_WINOGRAD": setting}
        output = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert output.returncode == 0, output.stderr
        timed, eager = output.stdout.split("eager: ")
        expected = setting == "1" and _C.isa() != "default"
        assert ("winograd" in timed or "strassen" in timed) == expected, output.stdout
        assert eager.startswith("winograd") == expected, output.stdout
