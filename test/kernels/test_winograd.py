"""Winograd convolutions F(2x2, 3x3) and F(4x4, 3x3), with F(2, 3) along depth, chosen or not. Those
of other kernels and dilations are in test_winograd_taps.py."""

import pytest
import torch
import torch.nn.functional as F
from helpers.convolutions import OUT_CHANNELS, THREADS, layer
from helpers.implementations import FUNCTIONS, forced
from helpers.problems import CHANNELS, WINOGRAD_ERROR_FACTOR, assert_close, threads

import torch_blocked
from torch_blocked import _C, BlockedTensor
from torch_blocked.tensor import format_name, tail_is_zero

IMPLEMENTATIONS = ("winograd4", "winograd2")
BLOCKS = (8, 16, 32)

# 3x3 and 3x3x3 layers at stride 1, [N, C, *spatial], of ResNet, VGG and a 3-D U-Net; as many
# outputs as inputs.
LAYERS = (
    (1, 64, 56, 56),
    (1, 128, 28, 28),
    (2, 256, 14, 14),
    (4, 512, 7, 7),
    (1, 32, 8, 24, 24),
    (1, 128, 4, 6, 6),
)


by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
by_block = pytest.mark.parametrize("block", BLOCKS)


def run(implementation, input, weight, bias, padding, block, transposed=False, groups=1):
    """The blocked result by this implementation."""
    function = FUNCTIONS[input.dim() - 2, transposed]
    with forced(implementation), torch.no_grad():
        blocked = input.to_blocked(format_name(input.dim(), block))
        result = function(blocked, weight, bias, padding=padding, groups=groups)
    assert input.shape[0] == 0 or _C.last_implementation("convolution") == implementation
    assert isinstance(result, BlockedTensor) and result.block == block
    return result


def check(implementation, input, weight, bias, padding, block, transposed=False, groups=1):
    function = FUNCTIONS[input.dim() - 2, transposed]
    result = run(implementation, input, weight, bias, padding, block, transposed, groups)
    again = run(implementation, input, weight, bias, padding, block, transposed, groups)
    assert tail_is_zero(result)
    assert torch.equal(result._physical, again._physical)
    arguments = {"padding": padding, "groups": groups}
    expected = function(input, weight, bias, **arguments)
    exact = function(
        input.double(), weight.double(), None if bias is None else bias.double(), **arguments
    )
    assert result.shape == expected.shape
    assert_close(result.to_dense(), expected, exact, WINOGRAD_ERROR_FACTOR)


@by_implementation
@by_block
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("batch", (0, 1, 3))
@pytest.mark.parametrize("spatial", ((9, 7), (3, 5, 7)), ids=("2d", "3d"))
def test_channels(implementation, block, channels, batch, spatial):
    tensors = layer((batch, channels, *spatial), OUT_CHANNELS[channels], with_bias=batch != 1)
    check(implementation, *tensors, 1, block)


@by_implementation
@by_block
@pytest.mark.parametrize("padding", (0, 1, 2, (0, 2)))
@pytest.mark.parametrize("size", range(1, 18, 2))
def test_sizes(implementation, block, padding, size):
    width = 21 - size  # small by large, odd by even
    if size < 3 and padding in (0, (0, 2)):
        pytest.raises(RuntimeError, F.conv2d, *layer((1, 17, size, width), 9), padding=padding)
    else:
        check(implementation, *layer((2, 17, size, width), 9), padding, block)


@by_implementation
@pytest.mark.parametrize("padding", (0, 1, (2, 0, 1)))
@pytest.mark.parametrize("depth", range(1, 7))
def test_depths(implementation, padding, depth):
    """Depths below, at and above a tile's 2 outputs and 4 inputs."""
    tensors = layer((2, 17, depth, 5, 6), 9)
    if depth < 3 and padding == 0:
        pytest.raises(RuntimeError, F.conv3d, *tensors, padding=padding)
    else:
        check(implementation, *tensors, padding, 8 if depth % 2 else 16)


@by_implementation
@by_block
@pytest.mark.parametrize("padding", (0, (0, 1, 1), (1, 1, 2)))
@pytest.mark.parametrize("transposed", (False, True))
def test_kernels_of_one_plane(implementation, block, padding, transposed):
    """1x3x3: the planes are a batch; along depth it is padded with planes of zeros, or cropped."""
    input, weight, bias = layer((2, 17, 5, 9, 7), 33, kernel=(1, 3, 3))
    weight = weight.transpose(0, 1) if transposed else weight
    check(implementation, input, weight, bias, padding, block, transposed)


@pytest.mark.parametrize("block", (8, 16))
@pytest.mark.parametrize("padding", (0, 1, 2, 3, (3, 2), 4))
@pytest.mark.parametrize("kernel", (6, 7, 8, (7, 8)))
@pytest.mark.parametrize("channels", (1, 3, 4))
def test_stride_2_over_few_channels(block, padding, kernel, channels):
    """winograd3: even and odd rows and columns are channels, of maps odd and even."""
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    input, weight, bias = layer((2, channels, 27, 34 + channels), 17, kernel=(height, width))
    arguments = {"stride": 2, "padding": padding}
    shift = [p % 2 for p in (padding if isinstance(padding, tuple) else (padding, padding))]
    if any((k + s + 1) // 2 != 4 for k, s in zip((height, width), shift, strict=True)):
        with forced("winograd3"), pytest.raises(NotImplementedError), torch_blocked.strict():
            F.conv2d(input.to_blocked(format_name(4, block)), weight, bias, **arguments)
        return
    exact = F.conv2d(input.double(), weight.double(), bias.double(), **arguments)
    expected = F.conv2d(input, weight, bias, **arguments)
    with forced("winograd3"), torch.no_grad():
        results = [
            F.conv2d(input.to_blocked(format_name(4, block)), weight, bias, **arguments)
            for _ in range(2)
        ]
    assert _C.last_implementation("convolution") == "winograd3"
    assert tail_is_zero(results[0]) and results[0].block == block
    assert torch.equal(results[0]._physical, results[1]._physical)
    assert_close(results[0].to_dense(), expected, exact, WINOGRAD_ERROR_FACTOR)


@by_implementation
@pytest.mark.parametrize("padding", (0, 1, 2, 3))
@pytest.mark.parametrize("spatial", ((9, 7), (5, 9, 7)), ids=("2d", "3d"))
def test_transposed(implementation, padding, spatial):
    """At stride 1 a transposed convolution, the gradient by the input, is one of flipped weights;
    beyond a padding of 2 it reads a part of its input only."""
    input, weight, bias = layer((2, 17, *spatial), 33)
    if spatial[0] + 2 - 2 * padding < 1:
        padding = (2, padding, padding)
    check(implementation, input, weight.transpose(0, 1), bias, padding, 16, transposed=True)


# Input and output channels of a group, in quarters of a block, and groups: 1, 2 and 4 fill blocks.
GROUPS = ((4, 4, 3), (8, 4, 2), (2, 2, 4), (6, 2, 4), (1, 3, 8))


@by_implementation
@by_block
@pytest.mark.parametrize("batch", (0, 3))
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("spatial", ((9, 7), (3, 5, 7)), ids=("2d", "3d"))
@pytest.mark.parametrize("channels", GROUPS, ids=lambda channels: "-".join(map(str, channels)))
def test_groups(implementation, block, batch, transposed, spatial, channels):
    inputs, outputs, groups = channels[0] * block // 4, channels[1] * block // 4, channels[2]
    input, weight, bias = layer((batch, inputs, *spatial), outputs * groups)
    input = input.repeat_interleave(groups, 1) * torch.rand(inputs * groups, *(1,) * len(spatial))
    if transposed:
        whole = weight.unflatten(0, (groups, outputs)).transpose(1, 2).flatten(0, 1)
        return check(implementation, input, whole, bias, 1, block, True, groups)
    check(implementation, input, weight, bias, 1, block, groups=groups)


@by_implementation
@pytest.mark.parametrize(
    ("channels", "groups"), ((24, 3), (32, 32)), ids=("left over", "depthwise")
)
def test_groups_that_are_refused(implementation, channels, groups):
    x = torch.zeros(1, channels, 9, 9).to_blocked("nChw16c")
    refused = pytest.raises(NotImplementedError, match=f"expected a problem for {implementation}")
    with forced(implementation), torch_blocked.strict(), refused:
        F.conv2d(x, torch.zeros(channels, channels // groups, 3, 3), groups=groups)


@by_implementation
@by_block
@pytest.mark.parametrize("dims", LAYERS, ids=lambda dims: "x".join(map(str, dims)))
def test_error_of_layers(implementation, block, dims):
    check(implementation, *layer(dims, dims[1]), 1, block)


@by_implementation
@pytest.mark.parametrize(
    "dims", [(1, 40, 14, 14), (3, 33, 17, 15), (1, 8, 60, 60), (2, 33, 5, 14, 15)]
)
def test_threads_change_no_bit(implementation, dims):
    """More threads than units, units that do not divide evenly, blocks of tiles of other sizes."""
    results = []
    for count in THREADS:
        _C.clear_packed_weights()
        with threads(count):
            results.append(run(implementation, *layer(dims, 72), 1, 16)._physical)
    assert all(torch.equal(results[0], result) for result in results[1:])


@by_implementation
def test_packed_weights_do_not_depend_on_threads(implementation):
    sizes = set()
    for count in THREADS:
        _C.clear_packed_weights()
        tensors = layer((1, 24, 8, 8), 40)
        with threads(count):
            run(implementation, *tensors, 1, 8)
        sizes.add(_C.packed_weight_bytes())
        with threads(THREADS[0]), torch_blocked.profile() as profile:
            run(implementation, *tensors, 1, 8)
        assert profile.packs == 0
    assert len(sizes) == 1


@by_implementation
def test_strides_of_weights(implementation):
    input, weight, bias = layer((1, 17, 9, 7), 33)
    expected = run(implementation, input, weight, bias, 1, 16)._physical
    storage = torch.zeros(33, 17, 6, 9)
    storage[..., ::2, ::3] = weight
    for other in (weight.contiguous(memory_format=torch.channels_last), storage[..., ::2, ::3]):
        assert torch.equal(run(implementation, input, other, bias, 1, 16)._physical, expected)
    input, weight, bias = layer((1, 17, 3, 9, 7), 33)
    last = weight.contiguous(memory_format=torch.channels_last_3d)
    expected = run(implementation, input, weight, bias, 1, 16)._physical
    assert torch.equal(run(implementation, input, last, bias, 1, 16)._physical, expected)


@by_implementation
@by_block
@pytest.mark.parametrize("spatial", ((9, 7), (5, 9, 7)), ids=("2d", "3d"))
def test_infinite_input_leaves_the_tail_zero(implementation, block, spatial):
    input, weight, bias = layer((1, 17, *spatial), 33)
    input[0, 3, ..., 4, 4] = torch.inf
    result = run(implementation, input, weight, bias, 1, block)
    assert tail_is_zero(result)
    assert not result.to_dense()[0, ..., 3:6, 3:6].isfinite().any()
    assert result.to_dense()[0, ..., 8:, :].isfinite().all()


@by_implementation
@pytest.mark.parametrize(
    "arguments",
    (
        {"stride": 3},
        {"weight": torch.zeros(8, 8, 1, 1)},
        {"weight": torch.zeros(8, 8, 3, 3, 3), "stride": (2, 1, 1)},
        {"dtype": torch.float64},
    ),
    ids=lambda arguments: "-".join(arguments),
)
def test_refuses_other_problems(implementation, arguments):
    arguments = {"weight": torch.zeros(8, 8, 3, 3), "dtype": torch.float32} | arguments
    dtype = arguments.pop("dtype")
    weight = arguments.pop("weight").to(dtype)
    ndim = weight.dim()
    x = torch.zeros((1, 8) + (9,) * (ndim - 2), dtype=dtype).to_blocked(format_name(ndim, 8))
    refused = pytest.raises(NotImplementedError, match=f"expected a problem for {implementation}")
    with forced(implementation), torch_blocked.strict(), refused:
        FUNCTIONS[ndim - 2, False](x, weight, **arguments)


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"expected one of \[winograd4, .*, got winograd5"):
        _C.force_implementation("convolution", "winograd5")


def chosen(batch, in_channels, out_channels, *spatial):
    """On one thread: on many, estimates tell how many a cut keeps busy."""
    dims = (batch, in_channels, *(spatial if len(spatial) == 3 else spatial * 2))
    input, weight, bias = layer(dims, out_channels)
    blocked = input.to_blocked(format_name(len(dims), torch_blocked.native_blocks()[0]))
    with threads(1), torch.no_grad():
        FUNCTIONS[len(dims) - 2, False](blocked, weight, bias, padding=1)
    return _C.last_implementation("convolution")


CHOICES = (
    ((1, 64, 64, 56), "winograd4"),
    ((1, 256, 256, 14), "winograd4"),
    ((1, 512, 512, 7), "winograd2"),  # F(4x4) has 38 MB of weights for 4 tiles
    ((4, 512, 512, 7), "winograd4"),
    ((1, 64, 64, 4), "onednn_blocked"),
    ((1, 1, 8, 28), "direct"),  # the transforms would take longer than the products
    ((1, 64, 64, 1), "onednn_blocked"),
    ((1, 64, 64, 16, 24, 24), "winograd4"),
    ((1, 128, 256, 4, 6, 6), "winograd2"),  # 8x8 outputs by F(4x4) for 6x6
    ((1, 1, 16, 8, 24, 24), "direct"),
)

CHOICES_OF = {
    # AMX has a quarter of F(4x4)'s weights, and memory is slower against FMAs.
    "amx": {(1, 256, 256, 14): "amx", (1, 512, 512, 7): "amx"},
    "avx2": {(1, 64, 64, 4): "direct", (1, 64, 64, 1): "direct"},
}

# Batch, channels, those of a group, height and width: RegNet's and ResNeXt's, and depthwise.
GROUPED_CHOICES = (
    ((1, 128, 16, 28), "winograd4"),
    ((1, 320, 16, 14), "winograd4"),
    ((1, 256, 8, 28), "winograd4"),
    ((1, 128, 4, 56), "grouped"),  # by zeros between the groups of a block four times the products
    ((1, 64, 1, 28), "depthwise"),
)
GROUPED_CHOICES_BESIDE_AMX = {(1, 320, 16, 14): "winograd2", (1, 256, 8, 28): "grouped"}


@pytest.mark.parametrize(("problem", "implementation"), CHOICES)
def test_choice(problem, implementation):
    if _C.isa() == "default":  # too slow without FMA
        assert not chosen(*problem).startswith("winograd")
    else:
        assert chosen(*problem) == CHOICES_OF.get(_C.isa(), {}).get(problem, implementation)


@pytest.mark.parametrize(("problem", "implementation"), GROUPED_CHOICES)
def test_choice_of_groups(problem, implementation):
    batch, channels, of_group, size = problem
    input, weight, bias = layer((batch, channels, size, size), channels)
    with threads(1), torch.no_grad():
        blocked = input.to_blocked(format_name(4, torch_blocked.native_blocks()[0]))
        F.conv2d(blocked, weight[:, :of_group], bias, padding=1, groups=channels // of_group)
    taken = _C.last_implementation("convolution")
    if _C.isa() == "default":  # too slow without FMA
        assert not taken.startswith("winograd")
    else:
        beside_amx = GROUPED_CHOICES_BESIDE_AMX if _C.isa() == "amx" else {}
        assert taken == beside_amx.get(problem, implementation)


def test_few_units_are_not_for_many_threads():
    """16 outputs of 16 x 16 are 4 units of F(4x4) at most, which 16 threads would mostly watch."""
    input, weight = torch.randn(1, 64, 16, 16), torch.randn(16, 64, 3, 3)
    chosen = []
    for count in (1, 16):
        with threads(count), torch.no_grad():
            F.conv2d(input.to_blocked("nChw8c"), weight, padding=1)
            chosen.append(_C.last_implementation("convolution"))
    assert chosen[0] == "winograd4" != chosen[1]
