"""Products by tiles of bfloat16, three to a float32: every cut of the work, what becomes of numbers
that bfloat16 does not hold, and how exact it is. Collected where the CPU has AMX."""

import pytest
import torch
import torch.nn.functional as F
from helpers.convolutions import (
    CONVOLUTIONS,
    LAYERS,
    OUT_CHANNELS,
    TRANSPOSED,
    UPSAMPLINGS,
    assert_same_bits_on_any_threads,
    layer,
    layer_id,
)
from helpers.implementations import forced
from helpers.optimized import assert_exact, blocked
from helpers.problems import CHANNELS, assert_close, threads
from helpers.processes import python
from torch import nn

import torch_blocked
from torch_blocked import _C, BlockedTensor
from torch_blocked.tensor import tail_is_zero

pytestmark = pytest.mark.usefixtures("cache_folder")

by_layer = pytest.mark.parametrize(
    "row",
    (
        *LAYERS,
        ((1, 800, 7, 7), 70, (1, 1), {}),  # a sum of one part and of several
        ((1, 96, 6, 40), 40, (3, 3), {"padding": 1}),
        ((2, 200, 5, 9), 17, (3, 3), {"padding": 1}),
        ((1, 64, 3, 5000), 48, (3, 3), {"padding": 1}),  # bands of columns
        ((1, 256, 70, 70), 32, (1, 1), {}),
    ),
    ids=layer_id,
)


def run(function, input, weight, bias, **arguments):
    with forced("amx"), torch.no_grad():
        result = function(input.to_blocked(), weight, bias, **arguments)
    assert input.shape[0] == 0 or _C.last_implementation("convolution") == "amx"
    assert isinstance(result, BlockedTensor) and result.block == 16
    return result


def check(function, input, weight, bias, **arguments):
    result, again = (run(function, input, weight, bias, **arguments) for _ in range(2))
    assert tail_is_zero(result)
    assert torch.equal(result._physical, again._physical)
    expected = function(input, weight, bias, **arguments)
    double = [None if each is None else each.double() for each in (input, weight, bias)]
    assert_close(result.to_dense(), expected, function(*double, **arguments), 1)


@by_layer
def test_layers(row):
    dims, out_channels, kernel, arguments = row
    check(CONVOLUTIONS[len(dims)], *layer(dims, out_channels, kernel), **arguments)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize(("batch", "kernel"), ((0, 3), (1, 1), (3, 3)))
def test_channels(channels, batch, kernel):
    tensors = layer(
        (batch, channels, 9, 7), OUT_CHANNELS[channels], (kernel, kernel), with_bias=batch != 1
    )
    check(F.conv2d, *tensors, padding=kernel // 2)


@pytest.mark.parametrize("width", range(1, 36))
@pytest.mark.parametrize("out_channels", (16, 32, 40))
def test_widths(width, out_channels):
    """Every number of rows and of tiles that a row and an image take."""
    check(F.conv2d, *layer((1, 9, 3, width), out_channels, (3, 3)), padding=1)
    check(F.conv2d, *layer((1, 9, 3, width), out_channels, (1, 1)))


@by_layer
def test_threads_change_no_bit(row):
    dims, out_channels, kernel, arguments = row
    tensors = layer(dims, out_channels, kernel)
    function = CONVOLUTIONS[len(dims)]
    assert_same_bits_on_any_threads(lambda: run(function, *tensors, **arguments))


@pytest.mark.parametrize(("dims", "kernel", "arguments"), UPSAMPLINGS)
def test_upsampling(dims, kernel, arguments):
    """A transposed convolution with strides: products for each of its phases."""
    input, weight, bias = layer(dims, 33, kernel)
    check(TRANSPOSED[len(dims)], input, weight.transpose(0, 1), bias, **arguments)


@pytest.mark.parametrize("dims", ((2, 17, 11), (2, 17, 9, 7), (1, 17, 5, 6, 7)))
@pytest.mark.parametrize("padding", (0, 1, 3))
def test_transposed(dims, padding):
    input, weight, bias = layer(dims, 9, (3,) * (len(dims) - 2))
    function = TRANSPOSED[len(dims)]
    check(function, input, weight.transpose(0, 1), bias, padding=padding)


@pytest.mark.parametrize("value", (1.0, torch.nan, torch.inf))
@pytest.mark.parametrize("dims", ((2, 17, 11), (2, 17, 9, 7), (1, 17, 5, 6, 7)))
def test_bare_outputs(dims, value):
    """Those that no tap meets are the bias, whatever src holds."""
    input, weight, bias = layer(dims, 9, (2,) * (len(dims) - 2))
    input[0, 3, 2] = value
    function, weight = TRANSPOSED[len(dims)], weight.transpose(0, 1)
    result = run(function, input, weight, bias, stride=4, output_padding=3)
    assert tail_is_zero(result)
    exact = function(input.double(), weight.double(), bias.double(), stride=4, output_padding=3)
    torch.testing.assert_close(
        result.to_dense().double(), exact, equal_nan=True, rtol=1e-6, atol=1e-6
    )


def test_closer_than_float32():
    """32 products are summed before their sum is rounded, so the error is half of `direct`'s."""
    input, weight, bias = layer((1, 256, 20, 20), 64, (3, 3))
    exact = F.conv2d(input.double(), weight.double(), bias.double())
    own = (run(F.conv2d, input, weight, bias).to_dense() - exact).norm()
    with forced("direct"):
        direct = F.conv2d(input.to_blocked(), weight, bias).to_dense()
    assert own < 0.7 * (direct - exact).norm()


@pytest.mark.parametrize("value", (torch.inf, -torch.inf, torch.nan))
@pytest.mark.parametrize("of_weight", (False, True))
@pytest.mark.parametrize("kernel", (1, 3))
def test_infinities(value, of_weight, kernel):
    """They reach what ATen's reach, and nothing else: no part of one meets a part of the other."""
    input, weight, bias = layer((1, 40, 9, 7), 33, (kernel, kernel))
    weight = weight.abs() * 1e3  # parts of finite weights have either sign
    (weight if of_weight else input)[0, 3, 0, 0] = value
    result = run(F.conv2d, input, weight, bias, padding=kernel // 2)
    assert tail_is_zero(result)
    expected = F.conv2d(input, weight, bias, padding=kernel // 2)
    if not of_weight or value != value:
        torch.testing.assert_close(result.to_dense(), expected, equal_nan=True)
    else:  # an infinity times a 0 of src is NaN
        torch.testing.assert_close(result.to_dense().isfinite(), expected.isfinite())


@pytest.mark.parametrize("scale", (1e-37, 1e-30, 1e30, 2.0**127))
def test_ends_of_the_range(scale):
    """Up to the largest float32; parts below the smallest bfloat16 count as 0."""
    input, weight, bias = layer((1, 40, 5, 7), 33, (1, 1))
    input = (input + 0.5).clamp(0.5, 1.999) * scale
    weight = weight / scale if scale > 1e-36 else weight * 1e20
    result = run(F.conv2d, input, weight, bias).to_dense().double()
    exact = F.conv2d(input.double(), weight.double(), bias.double())
    smallest = 2.0**-126 * 40 * (weight.abs().max().double() + input.abs().max().double())
    bound = F.conv2d(input.double(), weight.double().abs(), bias.double().abs())
    assert ((result - exact).abs() <= 3e-7 * bound + smallest).all()


class Layers(nn.Module):
    def __init__(self, layer, activation, adds):
        super().__init__()
        self.layer, self.activation, self.adds = layer, activation, adds

    def forward(self, x, y):
        z = self.layer(x)
        return self.activation(z + y if self.adds else z)


ACTIVATIONS = (nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.GELU(), nn.SiLU(), nn.LeakyReLU(0.2))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("adds", (False, True))
@torch.no_grad()
def test_epilogues(activation, adds):
    """Behind a convolution, and behind a linear layer whose channels come last and end anywhere."""
    cases = (
        (nn.Conv2d(64, 90, 1), (2, 64, 19, 21), (2, 90, 19, 21)),
        (nn.Linear(100, 70), (37, 100), (37, 70)),
        (nn.Linear(40, 16), (2, 50, 40), (2, 50, 16)),
    )
    for made, dims, out_dims in cases:
        model = Layers(made, activation, adds).eval()
        x, y = torch.randn(dims), torch.randn(out_dims)
        with forced("amx", "linear"):
            fast = blocked(model, x, y)
            assert "amx" in [step.implementation for step in fast.steps()], fast.plan()
            assert_exact(model, fast, x, y)


@pytest.mark.parametrize("inputs, outputs", ((1, 1), (3, 33), (64, 48), (1030, 100)))
@torch.no_grad()
def test_rows(inputs, outputs):
    model = nn.Linear(inputs, outputs).eval()
    with forced("amx", "linear"):
        fast = torch_blocked.optimize(model, torch.randn(2, inputs), tune=False)
        fast.choice = "blocked"
        for rows in (1, 30, 49, 300, 500):
            x = torch.randn(rows, inputs)
            result = fast(x)
            assert _C.last_implementation("linear") == "amx"
            exact = F.linear(x.double(), model.weight.double(), model.bias.double())
            assert_close(result, model(x), exact, 1)
            with threads(1):
                assert torch.equal(result, fast(x))


LIMITED = """
import torch, torch_blocked
from torch_blocked import _C
torch.set_num_threads(2)  # of 16 each would have too few pixels for its tiles
x, weight = torch.randn(1, 64, 14, 14), torch.randn(64, 64, 1, 1)
torch.nn.functional.conv2d(x.to_blocked(), weight)
print(_C.isa(), _C.last_implementation("convolution") == "amx")
"""


@pytest.mark.parametrize("limit", ({}, {"TORCH_BLOCKED_MAX_ISA": "avx512"}))
def test_the_limit_turns_it_off(limit):
    assert python(LIMITED, **limit).stdout.split() == (
        ["avx512", "False"] if limit else ["amx", "True"]
    )


@pytest.mark.parametrize(
    "arguments",
    ({"groups": 2}, {"dtype": torch.bfloat16}, {"block": "nChw8c"}),
    ids=lambda arguments: "-".join(arguments),
)
def test_refuses_other_problems(arguments):
    dtype = arguments.get("dtype", torch.float32)
    groups = arguments.get("groups", 1)
    x = torch.zeros(1, 32, 9, 9, dtype=dtype).to_blocked(arguments.get("block", "nChw16c"))
    refused = pytest.raises(NotImplementedError, match="expected a problem for amx")
    with forced("amx"), torch_blocked.strict(), refused:
        F.conv2d(x, torch.zeros(32, 32 // groups, 1, 1, dtype=dtype), groups=groups)
