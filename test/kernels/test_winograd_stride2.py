"""Winograd convolutions at stride 2: even and odd rows and columns in tiles of their own."""

import pytest
import torch
from helpers.convolutions import OUT_CHANNELS, check_winograd, layer
from helpers.implementations import FUNCTIONS, forced
from helpers.problems import CHANNELS, threads
from torch.nn import functional as F

import torch_blocked
from torch_blocked import _C
from torch_blocked.tensor import format_name

by_implementation = pytest.mark.parametrize("implementation", ("winograd4", "winograd2"))
by_block = pytest.mark.parametrize("block", (8, 16, 32))


@by_implementation
@by_block
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("batch", (0, 1, 3))
@pytest.mark.parametrize("spatial", ((17, 14), (5, 9, 12)), ids=("2d", "3d"))
def test_channels(implementation, block, channels, batch, spatial):
    tensors = layer((batch, channels, *spatial), OUT_CHANNELS[channels], with_bias=batch != 1)
    check_winograd(implementation, tensors, block, padding=1, stride=2)


@by_implementation
@pytest.mark.parametrize("padding", (0, 1, 2, (0, 3)))
@pytest.mark.parametrize("size", range(1, 20))
def test_sizes(implementation, padding, size):
    """Maps of even and odd sizes, below, at and above those of a tile."""
    tensors = layer((2, 17, size, 23 - size), 9)
    if size < 3 and padding in (0, (0, 3)):
        pytest.raises(RuntimeError, F.conv2d, *tensors, padding=padding, stride=2)
        return
    check_winograd(implementation, tensors, 8 if size % 2 else 16, padding=padding, stride=2)


@by_implementation
@pytest.mark.parametrize("padding", (0, 1, 3))
@pytest.mark.parametrize(
    "kernel",
    [(2, 2), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (9, 9), (11, 11), (3, 4), (5, 2), (7, 4)],
    ids=lambda kernel: "x".join(map(str, kernel)),
)
def test_kernels(implementation, kernel, padding):
    """The tiles of 3 to 6 taps, and several for larger kernels."""
    tensors = layer((2, 9, 22, 19), 17, kernel=kernel)
    check_winograd(implementation, tensors, 8, padding=padding, stride=2)


@by_implementation
@pytest.mark.parametrize(
    "kernel, stride",
    [
        ((3, 3, 3), (1, 2, 2)),
        ((3, 3, 3), (3, 2, 2)),
        ((1, 3, 3), (1, 2, 2)),
        ((1, 3, 3), (2, 2, 2)),
        ((3, 1, 3), (2, 5, 2)),
        ((3, 3, 1), (2, 2, 3)),
        ((5, 4, 3), (2, 2, 2)),
    ],
)
def test_strides_along_other_dims(implementation, kernel, stride):
    """Of which tiles have one output."""
    tensors = layer((2, 9, 9, 11, 12), 17, kernel=kernel)
    padding = tuple(taps // 2 for taps in kernel)
    check_winograd(implementation, tensors, 8, padding=padding, stride=stride)


@by_implementation
def test_one_weight_at_two_strides(implementation):
    weight = torch.nn.Parameter(layer((1, 17, 9, 9), 9)[1])
    for stride in (2, 1, 2):
        check_winograd(implementation, (torch.randn(1, 17, 12, 9), weight, None), 8, stride=stride)


@by_implementation
@by_block
def test_groups(implementation, block):
    """Of half a block, two of which are one convolution, and of whole blocks."""
    for of_group, groups in ((block // 2, 4), (block, 3)):
        input, weight, bias = layer((2, of_group * groups, 14, 11), of_group * groups)
        weight = weight[:, :of_group].contiguous()
        check_winograd(
            implementation, (input, weight, bias), block, stride=2, padding=1, groups=groups
        )


@by_implementation
@pytest.mark.parametrize("kernel", (3, 4, 5, 6))
def test_error_of_layers(implementation, kernel):
    """By a sum of many products."""
    tensors = layer((1, 256, 28, 28), 64, kernel=(kernel, kernel))
    check_winograd(implementation, tensors, 8, padding=kernel // 2, stride=2)


@by_implementation
@pytest.mark.parametrize("arguments", ({"stride": 3}, {"stride": (2, 1)}, {"dilation": 2}))
def test_refuses_other_strides(implementation, arguments):
    x, weight = torch.zeros(1, 8, 9, 9).to_blocked("nChw8c"), torch.zeros(8, 8, 3, 3)
    refused = pytest.raises(NotImplementedError, match=f"expected a problem for {implementation}")
    with forced(implementation), torch_blocked.strict(), refused:
        F.conv2d(x, weight, **({"stride": 2} | arguments))


@by_implementation
def test_refuses_transposed(implementation):
    x, weight = torch.zeros(1, 8, 9, 9).to_blocked("nChw8c"), torch.zeros(8, 8, 3, 3)
    refused = pytest.raises(NotImplementedError, match=f"expected a problem for {implementation}")
    with forced(implementation), torch_blocked.strict(), refused:
        F.conv_transpose2d(x, weight, stride=2)


@by_implementation
@pytest.mark.parametrize("kernel", (3, 4, 5, 6, 7))
def test_how_far_a_nan_reaches(implementation, kernel):
    """docs/formats.md says it."""
    weight, reached = torch.randn(8, 8, kernel, kernel), 0
    for at in range(20, 36):
        input = torch.zeros(1, 8, 64, 64)
        input[0, 0, at, at + 1] = torch.nan
        with forced(implementation), torch.no_grad():
            output = F.conv2d(input.to_blocked("nChw8c"), weight, stride=2).to_dense()
        dense = F.conv2d(input, weight, stride=2)[0, 0].isnan()
        spread = output[0, 0].isnan()
        assert spread[dense].all()
        for side in (spread.any(0), spread.any(1)):
            where = side.nonzero().flatten()
            reached = max(reached, int(where[-1] - where[0]) + 1)
    if kernel == 3:
        assert reached == {"winograd4": 5, "winograd2": 2}[implementation]
    assert reached <= kernel // 2 + 8


# Where the products that are saved pay for the transforms.
CHOICES = (
    ((1, 64, 112, 112), (64, 64, 3, 3), "winograd4"),
    ((1, 128, 56, 56), (256, 128, 3, 3), "winograd4"),
    ((1, 256, 28, 28), (512, 256, 3, 3), "winograd2"),
    ((1, 64, 56, 56), (128, 64, 5, 5), "winograd4"),
    ((1, 64, 16, 48, 48), (128, 64, 3, 3, 3), "winograd4"),
)
NOT_CHOSEN = (
    ((1, 3, 224, 224), (32, 3, 3, 3)),
    ((1, 8, 56, 56), (16, 8, 3, 3)),
    ((1, 64, 56, 56), (64, 64, 2, 2)),
    ((1, 64, 4, 4), (64, 64, 3, 3)),
)


def chosen(dims, weight_dims):
    weight = torch.randn(weight_dims) * 0.01
    blocked = torch.randn(dims).to_blocked(format_name(len(dims), torch_blocked.native_blocks()[0]))
    with threads(1), torch.no_grad():
        padding = [taps // 2 for taps in weight_dims[2:]]
        FUNCTIONS[len(dims) - 2, False](blocked, weight, padding=padding, stride=2)
    return _C.last_implementation("convolution")


@pytest.mark.parametrize("dims, weight_dims, implementation", CHOICES)
def test_choice(dims, weight_dims, implementation):
    """With AMX products cost less, and tiles are not worth it for all of these."""
    taken = chosen(dims, weight_dims)
    assert taken == implementation or (_C.isa() == "amx" and taken == "amx")


@pytest.mark.parametrize("dims, weight_dims", NOT_CHOSEN)
def test_not_chosen(dims, weight_dims):
    assert not chosen(dims, weight_dims).startswith("winograd")
