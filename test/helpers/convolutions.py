"""Layers that the kernels of convolutions are tested with, each an input, weights and a bias."""

from math import prod

import torch
import torch.nn.functional as F

from helpers.implementations import FUNCTIONS, forced
from helpers.problems import CHANNELS, WINOGRAD_ERROR_FACTOR, assert_close, threads
from torch_blocked import _C
from torch_blocked.tensor import format_name, tail_is_zero

THREADS = (1, 2, 3)

# Output channels for each number of input channels: every one of CHANNELS serves as both.
OUT_CHANNELS = dict(zip(CHANNELS, reversed(CHANNELS), strict=True))

CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}

TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}

# (dims, output channels, kernel, arguments): in place, strided, padded, dilated, planes; rows that
# are one tile, several, and part of one; all lanes in one part of a sum, and not.
LAYERS = (
    ((1, 64, 56, 56), 24, (1, 1), {}),
    ((2, 24, 14, 14), 144, (1, 1), {}),
    ((1, 1300, 7, 7), 40, (1, 1), {}),
    ((1, 48, 15, 13), 96, (1, 1), {"stride": 2}),
    ((1, 20, 9, 11), 33, (1, 1), {"padding": 1}),
    ((1, 20, 5, 5), 33, (1, 1), {"stride": 2, "padding": 2}),  # as many outputs as inputs
    ((1, 3, 37, 41), 40, (7, 7), {"stride": 2, "padding": 3}),
    ((2, 3, 18, 17), 33, (3, 3), {"stride": 2, "padding": 1}),
    ((1, 4, 9, 9), 9, (3, 2), {"dilation": (2, 3)}),
    ((1, 3, 48, 32), 20, (16, 16), {"stride": 16}),
    ((1, 3, 11, 19), 9, (5, 3), {"stride": (2, 4), "padding": 1}),
    ((2, 4, 9, 2), 9, (1, 1), {"stride": 2}),  # rows of one output
    ((1, 2, 12, 15), 17, (3, 3), {"stride": 2, "dilation": (1, 3), "padding": 3}),
    ((1, 40, 15, 29), 72, (3, 3), {"stride": 2, "padding": 1}),
    ((1, 160, 8, 7), 24, (3, 3), {"padding": 1}),
    ((2, 17, 6, 30), 17, (5, 5), {"padding": 2}),
    ((1, 17, 9, 14), 33, (7, 1), {"padding": (3, 0)}),
    ((1, 17, 9, 14), 33, (1, 7), {"padding": (0, 3)}),
    ((1, 17, 20, 20), 17, (3, 3), {"dilation": 6, "padding": 6}),
    ((2, 40, 17, 24), 33, (3, 3), {"dilation": (5, 8), "padding": (5, 8)}),
    ((1, 33, 16, 16), 25, (3, 3), {"dilation": 12, "padding": 12}),
    ((1, 16, 9, 30), 40, (3, 5), {"dilation": (1, 4), "padding": (0, 10)}),
    ((3, 8, 60), 9, (2,), {"dilation": 32, "padding": 32}),
    ((1, 16, 5, 6, 18), 17, (2, 3, 3), {"dilation": (2, 2, 7), "padding": (1, 2, 7)}),
    ((2, 24, 12, 12), 16, (3, 3), {}),
    ((1, 9, 12, 12), 9, (4, 3), {"stride": (3, 2), "dilation": (2, 1), "padding": (3, 2)}),
    ((1, 9, 2, 2), 9, (2, 2), {"padding": 3}),
    ((2, 17, 1000), 9, (11,), {"padding": 5}),
    ((1, 33, 100), 17, (3,), {"stride": 3, "dilation": 5, "padding": 4}),
    ((1, 17, 5, 6, 7), 33, (3, 3, 3), {"padding": 1}),
    ((1, 1, 6, 8, 9), 17, (3, 3, 3), {"stride": 2, "padding": 1}),
)

KERNEL = {4: (3, 3), 5: (3, 3, 3)}  # by rank


def layer(dims, out_channels, kernel=None, with_bias=True, seed=0):
    """Input as a relu leaves it, weights after He, bias."""
    generator = torch.Generator().manual_seed(seed)
    weight_dims = (out_channels, dims[1], *(kernel or KERNEL[len(dims)]))
    weight = torch.randn(weight_dims, generator=generator)
    bias = torch.randn(out_channels, generator=generator) if with_bias else None
    input = torch.randn(dims, generator=generator).relu()
    return input, weight * (2 / prod(weight_dims[1:])) ** 0.5, bias


def layer_id(row):
    dims, out_channels, kernel, arguments = row
    words = [f"{dims[1]}-{out_channels}@{'x'.join(map(str, dims[2:]))}", f"k{kernel}"]
    return " ".join(words + [f"{key}{value}" for key, value in arguments.items()])


# Input dims, kernel, arguments: in place, to slots, phases of other sizes, dilated, cut.
UPSAMPLINGS = (
    ((2, 17, 9, 15), (2, 2), {"stride": 2}),
    ((1, 64, 7, 6), (2, 2), {"stride": 2}),
    ((1, 17, 9, 7), (4, 4), {"stride": 2, "padding": 1}),
    ((1, 3, 6, 7), (3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    ((1, 17, 5, 6), (5, 3), {"stride": (3, 1), "padding": (4, 0), "dilation": (2, 2)}),
    ((2, 33, 40), (16,), {"stride": 8, "padding": 4}),
    ((1, 17, 3, 5, 4), (3, 2, 2), {"stride": 2, "padding": (1, 0, 0)}),
)


def assert_same_bits_on_any_threads(convolve):
    """Nor does a plan made for another number of threads change them."""
    results = []
    for count in (*THREADS, *reversed(THREADS)):
        with threads(count):
            results.append(convolve()._physical)
    assert all(torch.equal(results[0], result) for result in results[1:])


def check_winograd(implementation, tensors, block, transposed=False, **arguments):
    """Against float64, with the same bits on any number of threads, and with a zero tail."""
    input, weight, bias = tensors
    function = FUNCTIONS[input.dim() - 2, transposed]
    blocked = input.to_blocked(format_name(input.dim(), block))
    results = []
    for count in (1, 2, 1):
        with forced(implementation), torch.no_grad(), threads(count):
            results.append(function(blocked, weight, bias, **arguments))
    assert input.shape[0] == 0 or _C.last_implementation("convolution") == implementation
    assert tail_is_zero(results[0])
    assert all(torch.equal(results[0]._physical, each._physical) for each in results)
    expected = function(input, weight, bias, **arguments)
    exact = function(
        input.double(), weight.double(), None if bias is None else bias.double(), **arguments
    )
    assert_close(results[0].to_dense(), expected, exact, WINOGRAD_ERROR_FACTOR)
