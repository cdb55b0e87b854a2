"""Depthwise and grouped convolutions by kernels of ours, direct among them, chosen or not."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import FUNCTIONS, forced
from helpers.optimized import blocked
from helpers.problems import CHANNELS, assert_close, prefer, threads
from torch import nn

import torch_blocked
from torch_blocked import _C, BlockedTensor
from torch_blocked.environment import tuning_file
from torch_blocked.tensor import format_name, tail_is_zero

pytestmark = pytest.mark.usefixtures("cache_folder")

# The widest: its vectors are those of the instruction set; a run limited to AVX2 has the others.
BLOCKS = torch_blocked.native_blocks()[:1]
THREADS = (1, 2, 3)

by_block = pytest.mark.parametrize("block", BLOCKS)
by_transposed = pytest.mark.parametrize("transposed", (False, True), ids=("forward", "transposed"))


def layer(dims, groups, out_channels, kernel, transposed=False, bias=True):
    """Input as a relu leaves it, weight after He, bias."""
    generator = torch.Generator().manual_seed(0)
    group = dims[1] // groups, out_channels // groups
    weight_dims = (dims[1], group[1], *kernel) if transposed else (out_channels, group[0], *kernel)
    weight = torch.randn(weight_dims, generator=generator)
    weight *= (2 / (group[0] * torch.Size(kernel).numel())) ** 0.5
    input = torch.randn(dims, generator=generator).relu()
    return input, weight, torch.randn(out_channels, generator=generator) if bias else None


def run(implementation, tensors, block, transposed=False, **arguments):
    input, weight, bias = tensors
    function = FUNCTIONS[input.dim() - 2, transposed]
    with forced(implementation), torch.no_grad(), torch_blocked.strict():
        blocked = input.to_blocked(format_name(input.dim(), block))
        result = function(blocked, weight, bias, **arguments)
    assert input.shape[0] == 0 or _C.last_implementation("convolution") == implementation
    assert isinstance(result, BlockedTensor) and result.block == block
    return result


def check(implementation, tensors, block, transposed=False, **arguments):
    """Values near ATen's in float64, the zero tail, and the same bits on one thread."""
    result = run(implementation, tensors, block, transposed, **arguments)
    with threads(1):
        again = run(implementation, tensors, block, transposed, **arguments)
    assert tail_is_zero(result)
    assert torch.equal(result._physical, again._physical)
    function = FUNCTIONS[tensors[0].dim() - 2, transposed]
    expected = function(*tensors, **arguments)
    exact = function(*(None if t is None else t.double() for t in tensors), **arguments)
    assert result.shape == expected.shape
    assert_close(result.to_dense(), expected, exact)


@by_block
@pytest.mark.parametrize("channels", CHANNELS[1:])
@pytest.mark.parametrize("batch", (0, 1, 3))
def test_depthwise_channels(block, channels, batch):
    tensors = layer((batch, channels, 9, 7), channels, channels, (3, 3), bias=batch != 1)
    check("depthwise", tensors, block, padding=1, groups=channels)


# kernel, stride, padding, dilation: rows in registers at both strides, any others, no tap at all in
# some rows, and kernels beyond every border.
KERNELS = (
    *((k, s, k // 2, 1) for k in (3, 5, 7) for s in (1, 2)),
    *((1, 1, 0, 1), (2, 1, 1, 1), (4, 2, 1, 1), (9, 3, 4, 1), (3, 1, 2, 2), (3, 2, 6, 6)),
    *((3, 3, 0, 1), (2, 3, 1, 1), (3, 1, 3, 1), (13, 1, 6, 1)),
)


@by_block
@by_transposed
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: "k{}s{}p{}d{}".format(*k))
def test_depthwise_kernels(block, transposed, kernel):
    size, stride, padding, dilation = kernel
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 17}
    if transposed:
        arguments["padding"] = min(padding, dilation * (size - 1))
        arguments["output_padding"] = stride - 1
    tensors = layer((2, 17, 13, 33), 17, 17, (size, size), transposed)
    check("depthwise", tensors, block, transposed, **arguments)


@pytest.mark.parametrize("width", (1, 2, 3, 5, 7, 8, 10, 11, 14, 15, 28, 29))
def test_depthwise_widths(width):
    """Every size of tile, alone and with a remainder."""
    tensors = layer((1, 9, 5, width), 9, 9, (3, 5))
    check("depthwise", tensors, BLOCKS[0], padding=(1, 2), groups=9)


@by_transposed
@pytest.mark.parametrize(
    ("spatial", "kernel"), (((300,), (31,)), ((6, 5, 9), (3, 3, 3))), ids=("1d", "3d")
)
@pytest.mark.parametrize("stride", (1, 2))
def test_depthwise_dims(transposed, spatial, kernel, stride):
    tensors = layer((2, 17, *spatial), 17, 17, kernel, transposed)
    arguments = {"stride": stride, "padding": kernel[0] // 2, "groups": 17}
    check("depthwise", tensors, BLOCKS[0], transposed, **arguments)


# Input and output channels of a group, groups: one source of lanes, two and more, groups wider than
# a block, and depthwise with a multiplier.
GROUPS = (
    *((4, 4, 8), (8, 8, 4), (2, 2, 9), (16, 16, 3), (3, 3, 11), (6, 6, 7), (24, 24, 3)),
    *((4, 8, 5), (8, 4, 5), (1, 2, 17), (2, 1, 17), (20, 5, 4), (5, 33, 2)),
)


# direct takes blocks of several vectors, too.
by_implementation = pytest.mark.parametrize(
    ("implementation", "block"), (("grouped", BLOCKS[0]), ("direct", BLOCKS[0]), ("direct", 32))
)


@by_implementation
@by_transposed
@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("channels", GROUPS, ids=lambda c: "{}-{}g{}".format(*c))
def test_groups(implementation, block, transposed, stride, channels):
    inputs, outputs, groups = channels
    tensors = layer((2, inputs * groups, 9, 15), groups, outputs * groups, (3, 3), transposed)
    arguments = {"stride": stride, "padding": 1, "groups": groups}
    check(implementation, tensors, block, transposed, **arguments)


@by_implementation
@pytest.mark.parametrize("channels", ((4, 4, 8), (3, 3, 11), (6, 6, 7), (16, 16, 3)))
@pytest.mark.parametrize(
    ("kernel", "dilation"),
    (((1, 1), 1), ((5, 5), 1), ((3, 3), 2), ((9,), 3), ((3, 3, 3), 1), ((2, 5), 16)),
)
def test_group_kernels(implementation, block, channels, kernel, dilation):
    inputs, outputs, groups = channels
    spatial = {1: (170,), 2: (9, 33), 3: (4, 5, 6)}[len(kernel)]
    tensors = layer((1, inputs * groups, *spatial), groups, outputs * groups, kernel)
    padding = [dilation * (each // 2) for each in kernel]
    check(implementation, tensors, block, padding=padding, dilation=dilation, groups=groups)


@by_implementation
@pytest.mark.parametrize("batch", (0, 1, 3))
@pytest.mark.parametrize("channels", ((16, 48, 2), (20, 5, 4), (300, 16, 3)))
def test_pixels_of_groups(implementation, block, batch, channels):
    inputs, outputs, groups = channels
    tensors = layer((batch, inputs * groups, 7, 9), groups, outputs * groups, (1, 1))
    check(implementation, tensors, block, groups=groups)


LAYERS = (
    ("depthwise", (1, 64, 14, 14), 64),
    ("depthwise", (1, 16, 1, 600), 16),
    ("grouped", (1, 128, 14, 14), 32),
    ("direct", (1, 128, 14, 14), 4),
    ("direct", (1, 60, 14, 14), 5),
)


@pytest.mark.parametrize(("implementation", "dims", "groups"), LAYERS)
def test_threads_change_no_bit(implementation, dims, groups):
    results, sizes = [], set()
    for count in THREADS:
        _C.clear_packed_weights()
        tensors = layer(dims, groups, dims[1], (3, 3))
        with threads(count):
            result = run(implementation, tensors, BLOCKS[0], padding=1, groups=groups)
        results.append(result._physical)
        sizes.add(_C.packed_weight_bytes())
    assert all(torch.equal(results[0], result) for result in results[1:])
    assert len(sizes) == 1


@by_block
@pytest.mark.parametrize("implementation", ("depthwise", "grouped", "direct"))
def test_infinite_input_stays_in_its_group(implementation, block):
    groups = 33 if implementation == "depthwise" else 11
    input, weight, bias = layer((1, 33, 9, 7), groups, 33, (3, 3))
    input[0, 32, 4, 4] = torch.inf
    result = run(implementation, (input, weight, bias), block, padding=1, groups=groups)
    assert tail_is_zero(result)
    assert not result.to_dense()[0, 32, 3:6, 3:6].isfinite().any()
    assert result.to_dense()[0, : 33 - 33 // groups].isfinite().all()


@pytest.mark.parametrize("implementation", ("depthwise", "grouped", "direct"))
def test_strides_of_weights(implementation):
    groups = 12 if implementation == "depthwise" else 3
    input, weight, bias = layer((1, 12, 9, 7), groups, 12, (3, 3))
    storage = torch.zeros(12, 12 // groups, 6, 9)
    storage[..., ::2, ::3] = weight
    results = [
        run(implementation, (input, each, bias), BLOCKS[0], padding=1, groups=groups)._physical
        for each in (weight, storage[..., ::2, ::3], weight.to(memory_format=torch.channels_last))
    ]
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize(
    ("implementation", "groups", "block", "dtype"),
    (
        ("depthwise", 2, 8, torch.float32),
        ("depthwise", 8, 8, torch.float64),
        ("depthwise", 8, 4, torch.float32),
        ("depthwise", 8, 32, torch.float32),
        ("grouped", 8, 8, torch.float32),
        ("grouped", 1, 8, torch.float32),
        ("grouped", 2, 4, torch.float32),
        ("direct", 2, 4, torch.float32),
    ),
)
def test_refuses_other_problems(implementation, groups, block, dtype):
    x = torch.zeros(1, 8, 9, 9, dtype=dtype).to_blocked(f"nChw{block}c")
    refused = pytest.raises(NotImplementedError, match=f"expected a problem for {implementation}")
    with forced(implementation), torch_blocked.strict(), refused:
        F.conv2d(x, torch.zeros(8, 8 // groups, 3, 3, dtype=dtype), groups=groups)


# in and out channels, groups, kernel -> chosen with the widest native block
CHOICES = (
    (64, 64, 64, 3, "depthwise"),
    (128, 128, 32, 3, "grouped"),  # 4 channels a group: oneDNN has only `ref`
    (96, 96, 32, 3, "grouped"),
    (64, 64, 1, 5, None),
    # Nothing shares the permutation of lanes, but a vector of 16 meets more groups than one of 8.
    (96, 96, 32, 1, "grouped" if _C.isa() in ("avx512", "amx") else "direct"),
    (240, 60, 3, 1, "direct"),
    (64, 64, 2, 1, "direct"),
)


@pytest.mark.parametrize(("channels", "outputs", "groups", "kernel", "expected"), CHOICES)
def test_choice(channels, outputs, groups, kernel, expected):
    input, weight, bias = layer((1, channels, 14, 14), groups, outputs, (kernel, kernel))
    with torch.no_grad():
        F.conv2d(input.to_blocked(), weight, bias, padding=kernel // 2, groups=groups)
    if _C.isa() == "default" and expected in ("depthwise", "grouped"):
        expected = None  # too slow without FMA
    if expected:
        assert _C.last_implementation("convolution") == expected
    else:
        assert _C.last_implementation("convolution") not in ("depthwise", "grouped")


class Depthwise(nn.Module):
    """A depthwise convolution, an activation, and a sum with the input where sizes allow one."""

    def __init__(self, rank, channels, transposed=False, **arguments):
        super().__init__()
        kinds = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}
        self.conv = kinds[rank][transposed](channels, channels, groups=channels, **arguments)

    def forward(self, x):
        y = F.gelu(self.conv(x))
        return x + y if x.shape == y.shape else y


def prefer_channels_last(channels):
    """Rewrites the times of the convolutions of so many groups, as if channels-last were best."""
    path = Path(tuning_file())
    lines = []
    for line in path.read_text().splitlines():
        name, implementation, time = line.split("\t")
        if f" g{channels} " in name:
            last = "nhwc-nhwc" in name or "ndhwc-ndhwc" in name
            implementation, time = ("depthwise", "0.01") if last else (implementation, "100000")
        lines.append("\t".join((name, implementation, time)))
    path.write_text("\n".join(lines) + "\n")


@torch.no_grad()
def test_groups_in_channels_last(cache_folder):  # noqa: F811
    """All groups are in each pixel: none is an image of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(60, 64, 3, padding=1, groups=4), nn.SiLU()).eval()
    x = torch.randn(2, 60, 9, 7)
    prefer(torch_blocked.optimize(net, x, tune="full", verify=False), "direct", "nhwc-nhwc")
    fast = blocked(net, x, tune="full", verify=False)
    assert ("direct", "nhwc") in [(s.implementation, s.output.split()[0]) for s in fast.steps()]
    assert_close(fast(x), net(x), copy.deepcopy(net).double()(x.double()))


@pytest.mark.parametrize(
    ("rank", "channels", "arguments"),
    [
        (4, 16, {"kernel_size": 3, "padding": 1}),
        (4, 48, {"kernel_size": 3, "padding": 1, "stride": 2, "bias": False}),
        (4, 32, {"kernel_size": 5, "padding": 4, "dilation": 2}),
        (4, 16, {"kernel_size": (1, 7), "padding": (0, 3)}),
        (4, 32, {"kernel_size": 3, "stride": 2, "transposed": True}),
        (5, 16, {"kernel_size": 3, "padding": 1}),
    ],
)
@pytest.mark.parametrize("batch", (1, 3))
@torch.no_grad()
def test_depthwise_in_channels_last(cache_folder, rank, channels, arguments, batch):  # noqa: F811
    torch.manual_seed(0)
    model = Depthwise(rank, channels, **arguments).eval()
    x = torch.randn(batch, channels, *(9, 15, 6)[: rank - 2])
    blocked(model, x, tune="full", verify=False)
    prefer_channels_last(channels)
    optimized = blocked(model, x, tune="full", verify=False)
    assert "depthwise" in {step.implementation for step in optimized.steps()}
    assert any("hwc [" in step.output and "C" not in step.output for step in optimized.steps())
    exact = model.double()(x.double())
    model.float()
    assert_close(optimized(x), model(x), exact)
    assert torch.equal(optimized(x), optimized(x))
