"""Winograd convolutions of any kernel and dilation: tiles of one, two or three dims, kernels of
more taps in parts, taps apart in phases."""

import pytest
import torch
from helpers.convolutions import OUT_CHANNELS, check_winograd, layer
from helpers.implementations import FUNCTIONS, forced
from helpers.problems import CHANNELS, threads
from torch import nn
from torch.nn import functional as F

import torch_blocked
from torch_blocked import _C
from torch_blocked.tensor import format_name

# Kernels along the dims that are there: 1 to 12 taps, with tiles of F(4, 3) and F(3, 4).
KERNELS = [
    (2,), (3,), (4,), (5,), (7,), (8,), (11,),
    (1, 3), (3, 1), (1, 7), (7, 1), (2, 2), (4, 4), (5, 5), (7, 7), (2, 5), (3, 7), (8, 3),
    (3, 1, 1), (1, 5, 1), (1, 1, 4), (3, 3, 1), (3, 1, 3), (1, 7, 7), (2, 3, 3), (5, 5, 5),
]  # fmt: skip
SIZES = {1: (23,), 2: (9, 13), 3: (5, 7, 8)}


@pytest.mark.parametrize("block", (8, 16))
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "x".join(map(str, kernel)))
def test_kernels(kernel, transposed, block):
    input, weight, bias = layer((2, 17, *SIZES[len(kernel)]), 9, kernel=kernel)
    weight = weight.transpose(0, 1) if transposed else weight
    padding = tuple(taps // 2 for taps in kernel)
    check_winograd("winograd4", (input, weight, bias), block, transposed, padding=padding)


@pytest.mark.parametrize("kernel", [(2, 2), (5, 5), (3, 3, 1), (4, 3, 3)])
def test_kernels_by_small_tiles(kernel):
    check_winograd("winograd2", layer((2, 17, *SIZES[len(kernel)]), 9, kernel=kernel), 8)


@pytest.mark.parametrize("block", (8, 16, 32))
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("batch", (0, 1, 3))
@pytest.mark.parametrize("kernel", [(7,), (5, 5)])
def test_channels(block, channels, batch, kernel):
    dims = (batch, channels, *SIZES[len(kernel)])
    check_winograd("winograd4", layer(dims, OUT_CHANNELS[channels], kernel, batch != 1), block)


@pytest.mark.parametrize("implementation", ("winograd4", "winograd2"))
@pytest.mark.parametrize("padding", (0, 2, (1, 7)))
@pytest.mark.parametrize("dilation", (2, 3, 5, (1, 4), (9, 2)))
@pytest.mark.parametrize("size", ((19, 23), (24, 20)))
def test_dilations(implementation, size, dilation, padding):
    """Phases of equal and of other sizes, also more phases than outputs."""
    check_winograd(
        implementation, layer((2, 9, *size), 17, kernel=(3, 3)), 8,
        padding=padding, dilation=dilation,
    )  # fmt: skip


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("dilation", (2, 3, 6))
@pytest.mark.parametrize("kernel, size", [((3,), (41,)), ((7,), (43,)), ((3, 3, 3), (13, 14, 15))])
def test_dilations_of_other_dims(kernel, size, dilation, transposed):
    input, weight, bias = layer((2, 9, *size), 17, kernel=kernel)
    weight = weight.transpose(0, 1) if transposed else weight
    check_winograd(
        "winograd4", (input, weight, bias), 8, transposed, padding=dilation, dilation=dilation
    )


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("dilation", (2, 3))
@pytest.mark.parametrize(
    "kernel, size",
    [
        ((3, 1), (8, 5)),
        ((1, 3), (5, 8)),
        ((3, 1, 1), (9, 7, 5)),
        ((1, 3, 1), (9, 8, 5)),
        ((1, 1, 3), (9, 7, 11)),
        ((1, 3, 3), (9, 8, 11)),
        ((3, 1, 3), (9, 7, 11)),
    ],
)
def test_dilations_along_one_tap(kernel, size, dilation, transposed):
    """They mean nothing: there tiles of one output had phases, and wrote beyond dst."""
    input, weight, bias = layer((2, 9, *size), 17, kernel=kernel)
    weight = weight.transpose(0, 1) if transposed else weight
    check_winograd("winograd4", (input, weight, bias), 8, transposed, dilation=dilation)


@pytest.mark.parametrize("kernel, dilation", [((5,), 1), ((3, 3), 2), ((1, 7), 1)])
def test_groups(kernel, dilation):
    """Groups of half a block, two of which are one convolution."""
    dims = (2, 32, *SIZES[len(kernel)])
    input, weight, bias = layer(dims, 32, kernel=kernel)
    weight = weight[:, :8].contiguous()
    check_winograd("winograd4", (input, weight, bias), 16, groups=4, padding=2, dilation=dilation)


@pytest.mark.parametrize("kernel, dilation", [(7, 1), (3, 5)])
def test_gradients(kernel, dilation):
    """That of the input is a transposed convolution of the same kind."""
    conv = nn.Conv1d(24, 40, kernel, padding=3, dilation=dilation)
    x = torch.randn(2, 24, 50, requires_grad=True)
    with forced("winograd4"):
        conv(x.to_blocked("nCw8c")).square().sum().backward()
    ours, x.grad = x.grad, None
    conv(x).square().sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dilation", (1, 3))
@pytest.mark.parametrize("taps", (2, 3, 4, 5, 7, 11))
def test_how_far_a_nan_reaches(taps, dilation):
    """docs/formats.md: from k outputs to k + 8 at most, each the dilation apart."""
    weight = torch.randn(8, 8, taps)
    reached = []
    for at in range(60, 80):
        input = torch.zeros(1, 8, 160)
        input[0, 0, at] = torch.nan
        with forced("winograd4"), torch.no_grad():
            output = F.conv1d(input.to_blocked("nCw8c"), weight, dilation=dilation).to_dense()
        dense = F.conv1d(input, weight, dilation=dilation)[0, 0].isnan()
        spread = output[0, 0].isnan()
        assert spread[dense].all()
        where = spread.nonzero().flatten()
        assert ((where - where[0]) % dilation == 0).all()
        reached.append(int(where[-1] - where[0]) // dilation + 1)
    assert taps <= max(reached) <= taps + 8


def test_one_dim_has_no_small_tiles():
    input, weight, _ = layer((1, 8, 30), 8, kernel=(3,))
    refused = pytest.raises(NotImplementedError, match="expected a problem for winograd2")
    with forced("winograd2"), torch_blocked.strict(), refused:
        F.conv1d(input.to_blocked("nCw8c"), weight)


# Where the products that are saved pay for the transforms.
CHOICES = [
    ((1, 64, 1024), (64, 64, 11), 1),
    ((1, 256, 28, 28), (256, 256, 3, 3), 4),
    ((1, 64, 56, 56), (64, 64, 7, 7), 1),
    ((1, 64, 8, 28, 28), (64, 64, 3, 3, 1), 1),
]


@pytest.mark.parametrize("dims, weight_dims, dilation", CHOICES)
def test_choice(dims, weight_dims, dilation):
    weight = torch.randn(weight_dims) * 0.01
    blocked = torch.randn(dims).to_blocked(format_name(len(dims), torch_blocked.native_blocks()[0]))
    with threads(1), torch.no_grad():
        padding = [dilation * (taps // 2) for taps in weight_dims[2:]]
        FUNCTIONS[len(dims) - 2, False](blocked, weight, padding=padding, dilation=dilation)
    # With AMX it is the faster one where one dim of many taps saves half of the products only.
    by_tiles = _C.isa() == "amx" and len(dims) == 3
    assert _C.last_implementation("convolution") == ("amx" if by_tiles else "winograd4")
