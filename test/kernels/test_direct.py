"""Our direct convolution, chosen or not: every way it reads src, every cut of its work."""

import pytest
import torch
import torch.nn.functional as F
from helpers.convolutions import (
    CONVOLUTIONS,
    LAYERS,
    OUT_CHANNELS,
    THREADS,
    TRANSPOSED,
    UPSAMPLINGS,
    assert_same_bits_on_any_threads,
    layer,
    layer_id,
)
from helpers.implementations import forced
from helpers.problems import CHANNELS, ERROR_FACTOR, assert_close, threads

import torch_blocked
from torch_blocked import _C, BlockedTensor
from torch_blocked.tensor import format_name, tail_is_zero

BLOCKS = (4, 8, 16, 32)


def run(function, input, weight, bias, block, **arguments):
    with forced("direct"), torch.no_grad():
        blocked = input.to_blocked(format_name(input.ndim, block))
        result = function(blocked, weight, bias, **arguments)
    assert input.shape[0] == 0 or _C.last_implementation("convolution") == "direct"
    assert isinstance(result, BlockedTensor) and result.block == block
    return result


def check(function, input, weight, bias, block, **arguments):
    result = run(function, input, weight, bias, block, **arguments)
    again = run(function, input, weight, bias, block, **arguments)
    assert tail_is_zero(result)
    assert torch.equal(result._physical, again._physical)
    expected = function(input, weight, bias, **arguments)
    double = [None if each is None else each.double() for each in (input, weight, bias)]
    exact = function(*double, **arguments)
    assert result.shape == expected.shape
    assert_close(result.to_dense(), expected, exact, ERROR_FACTOR)


by_layer = pytest.mark.parametrize("row", LAYERS, ids=layer_id)
by_block = pytest.mark.parametrize("block", BLOCKS)


@by_layer
@by_block
def test_layers(row, block):
    dims, out_channels, kernel, arguments = row
    check(CONVOLUTIONS[len(dims)], *layer(dims, out_channels, kernel), block, **arguments)


@by_block
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize(("batch", "kernel"), ((0, 3), (1, 1), (3, 3)))
def test_channels(block, channels, batch, kernel):
    dims = (batch, channels, 9, 7)
    tensors = layer(dims, OUT_CHANNELS[channels], (kernel, kernel), with_bias=batch != 1)
    check(F.conv2d, *tensors, block, padding=kernel // 2)


@pytest.mark.parametrize("width", range(1, 32))
@pytest.mark.parametrize("out_channels", (16, 32, 48))
def test_widths(width, out_channels):
    """Every size of a register tile."""
    tensors = layer((1, 9, 3, width), out_channels, (3, 3))
    check(F.conv2d, *tensors, torch_blocked.native_blocks()[0], padding=1)


@pytest.mark.parametrize("dims", ((2, 17, 11), (2, 17, 9, 7), (1, 17, 5, 6, 7)))
@pytest.mark.parametrize("dilation", (1, 2))
@pytest.mark.parametrize("padding", (0, 1, 3))
def test_transposed(dims, padding, dilation):
    """At stride 1 a transposed convolution, the gradient by the input, is one of flipped weights;
    beyond a padding of 2 it reads a part of its input only."""
    input, weight, bias = layer(dims, 9, (3,) * (len(dims) - 2))
    function = TRANSPOSED[len(dims)]
    check(function, input, weight.transpose(0, 1), bias, 16, padding=padding, dilation=dilation)


@pytest.mark.parametrize("block", torch_blocked.native_blocks())
@pytest.mark.parametrize(("dims", "kernel", "arguments"), UPSAMPLINGS)
def test_upsampling(block, dims, kernel, arguments):
    """A transposed convolution with strides: a convolution for each of its phases."""
    input, weight, bias = layer(dims, 33, kernel)
    function, arguments = TRANSPOSED[len(dims)], {"padding": 0} | arguments
    check(function, input, weight.transpose(0, 1), bias, block, **arguments)
    with threads(1):
        one = run(function, input, weight.transpose(0, 1), bias, block, **arguments)
    again = run(function, input, weight.transpose(0, 1), bias, block, **arguments)
    assert torch.equal(one._physical, again._physical)


@by_layer
def test_threads_change_no_bit(row):
    dims, out_channels, kernel, arguments = row
    tensors = layer(dims, out_channels, kernel)
    function = CONVOLUTIONS[len(dims)]
    assert_same_bits_on_any_threads(lambda: run(function, *tensors, 16, **arguments))


def test_packed_weights_do_not_depend_on_threads():
    tensors = layer((1, 24, 8, 8), 40, (5, 5))
    with threads(THREADS[0]):
        run(F.conv2d, *tensors, 8)
    for count in THREADS:
        with threads(count), torch_blocked.profile() as profile:
            run(F.conv2d, *tensors, 8)
        assert profile.packs == 0


def test_strides_of_weights():
    input, weight, bias = layer((1, 17, 9, 7), 33, (3, 3))
    expected = run(F.conv2d, input, weight, bias, 16, padding=1)._physical
    storage = torch.zeros(33, 17, 6, 9)
    storage[..., ::2, ::3] = weight
    for other in (weight.contiguous(memory_format=torch.channels_last), storage[..., ::2, ::3]):
        assert torch.equal(run(F.conv2d, input, other, bias, 16, padding=1)._physical, expected)


@by_block
@pytest.mark.parametrize("kernel", (1, 3))
def test_infinite_input_leaves_the_tail_zero(block, kernel):
    input, weight, bias = layer((1, 17, 9, 7), 33, (kernel, kernel))
    input[0, 3, 4, 4] = torch.inf
    result = run(F.conv2d, input, weight, bias, block, padding=kernel // 2)
    assert tail_is_zero(result)
    expected = F.conv2d(input, weight, bias, padding=kernel // 2)
    assert torch.equal(result.to_dense().isfinite(), expected.isfinite())


@pytest.mark.parametrize(
    "arguments",
    (
        {"dtype": torch.float64},
        {"function": F.conv_transpose2d, "stride": 4},  # more than the kernel: bare outputs
    ),
    ids=lambda arguments: "-".join(arguments),
)
def test_refuses_other_problems(arguments):
    arguments = {"weight": torch.zeros(8, 8, 3, 3), "dtype": torch.float32} | arguments
    dtype = arguments.pop("dtype")
    weight = arguments.pop("weight").to(dtype)
    function = arguments.pop("function", F.conv2d)
    x = torch.zeros(1, 8, 9, 9, dtype=dtype).to_blocked("nChw8c")
    refused = pytest.raises(NotImplementedError, match="expected a problem for direct")
    with forced("direct"), torch_blocked.strict(), refused:
        function(x, weight, **arguments)


# dims, output channels, kernel, arguments -> chosen in 16c and in 8c. In 16c all but those of few
# channels and a stride are AMX's where the CPU has it.
PHASES = "winograd3" if _C.isa() != "default" else "direct"
CHOICES = (
    ((1, 3, 64, 64), 32, 5, {"stride": 2, "padding": 2}, ("direct", "direct")),
    ((1, 3, 64, 64), 32, 7, {"stride": 2, "padding": 3}, (PHASES, PHASES)),
    ((1, 24, 14, 14), 64, 1, {}, ("direct", "direct")),
    ((1, 64, 14, 14), 64, 1, {}, ("onednn_blocked", "onednn_blocked")),
    ((1, 64, 14, 14), 64, 1, {"stride": 2}, ("direct", "direct")),
    ((1, 64, 42, 42), 64, 3, {"stride": 3, "padding": 1}, ("onednn_blocked", "direct")),
    ((1, 64, 84, 84), 64, 3, {"stride": 3, "padding": 1}, ("onednn_blocked", "onednn_blocked")),
    ((1, 128, 42, 42), 128, 5, {"stride": 3, "padding": 2}, ("onednn_blocked", "direct")),
)


@pytest.mark.parametrize(("dims", "out_channels", "kernel", "arguments", "expected"), CHOICES)
def test_choice(dims, out_channels, kernel, arguments, expected):
    input, weight, bias = layer(dims, out_channels, (kernel, kernel))
    for block, name in zip((16, 8), expected, strict=True):
        if block in torch_blocked.native_blocks():
            with threads(1), torch.no_grad():
                F.conv2d(input.to_blocked(f"nChw{block}c"), weight, bias, **arguments)
            is_tiled = dims[1] > 24 and (kernel, arguments.get("stride")) != (1, 2)
            by_tiles = _C.isa() == "amx" and block == 16 and is_tiled
            assert _C.last_implementation("convolution") == ("amx" if by_tiles else name)


def test_one_weight_at_two_strides():
    """Taps of dilated planes are packed in an order that depends on the stride."""
    weight = torch.nn.Parameter(layer((1, 3, 9, 9), 16, (3, 3))[1])
    input = torch.randn(1, 3, 12, 15)
    for stride in (2, 1, 2):
        arguments = {"stride": stride, "dilation": (1, 3), "padding": 3}
        check(F.conv2d, input, weight, None, torch_blocked.native_blocks()[0], **arguments)
