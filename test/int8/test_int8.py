"""Models of quantized_decomposed's ops, as PyTorch's quantizers write them, run on bytes."""

import pytest
import torch
import torch.nn.functional as F
from helpers.int8_layers import ACTIVATIONS, OPS, Conv, Padded, check, fake
from helpers.optimized import blocked
from torch import nn

import torch_blocked as tb

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


CHANNELS = [1, 3, 7, 8, 9, 15, 16, 17, 33]


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("images", [0, 1, 3])
def test_convolutions(channels, images):
    check(Conv(channels, 17, padding=1, then=F.relu), torch.randn(images, channels, 7, 9))
    check(Conv(5, channels, 1, bias=False), torch.randn(images, 5, 7, 9))


@pytest.mark.parametrize(
    "geometry",
    [
        {"kernel": 7, "stride": 2, "padding": 3},
        {"kernel": (1, 3), "padding": (0, 1)},
        {"kernel": 3, "dilation": 2, "padding": 2},
        {"kernel": 5, "stride": (1, 2)},
        {"kernel": 1, "stride": 2},
        {"kernel": 2, "stride": 3, "padding": 1},
        {"kernel": 3, "padding": 1, "groups": 2},
        {"kernel": 3, "padding": 1, "groups": 4},
        {"kernel": 3, "padding": 1, "groups": 16},
        {"kernel": 1, "groups": 32},
    ],
)
def test_geometry(geometry):
    check(Conv(32, 64, **geometry, to=(0.02, 3)), torch.randn(2, 32, 13, 15))


TRANSPOSED = [
    {"kernel": 2, "stride": 2},
    {"kernel": 4, "stride": 2, "padding": 1},
    {"kernel": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel": 3, "padding": 1},
    {"kernel": (2, 5), "stride": (3, 1), "padding": (0, 2), "output_padding": (2, 0)},
    {"kernel": 2, "stride": 3},  # the third phase meets no tap
    {"kernel": 1, "stride": 2},
    {"kernel": 3, "stride": 3, "padding": 3},  # phases leave out pixels of src
    {"kernel": 3, "stride": 2, "dilation": 2, "padding": 1},
    {"kernel": 3, "stride": 4, "dilation": 3, "padding": 2},
    {"kernel": 4, "stride": 2, "padding": 1, "groups": 2},
    {"kernel": 3, "stride": 2, "groups": 32, "bias": False},
]


@pytest.mark.parametrize("geometry", TRANSPOSED)
def test_transposed(geometry):
    for then in (F.relu, F.silu):
        model = Conv(32, 64, **geometry, to=(0.02, 3), then=then, transposed=True)
        check(model, torch.randn(2, 32, 5, 7))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("images", [0, 1, 3])
def test_transposed_channels(channels, images):
    model = Conv(channels, 17, 4, stride=2, padding=1, transposed=True)
    check(model, torch.randn(images, channels, 1, 6))


@pytest.mark.parametrize("ndim", [1, 3])
def test_transposed_of_other_ranks(ndim):
    model = Conv(9, 20, 3, ndim=ndim, stride=2, padding=1, to=None, transposed=True)
    check(model, torch.randn(2, 9, *[4] * ndim))


def test_a_transposed_sum():
    model = Conv(16, 24, 2, stride=2, residual=(0.04, 90), then=F.relu, transposed=True)
    check(model, torch.randn(2, 16, 5, 7), torch.randn(2, 24, 10, 14))


@pytest.mark.parametrize(
    "channels, groups", [(32, 8), (32, 4), (24, 6), (40, 5), (20, 10), (64, 4)]
)
@pytest.mark.parametrize("kernel, stride", [(1, 1), (3, 1), (3, 2), (5, 1)])
def test_groups_of_few_channels(channels, groups, kernel, stride):
    """As many inputs as outputs, so that blocks of both have the same groups."""
    geometry = {"stride": stride, "padding": kernel // 2, "groups": groups}
    for then in (F.relu, F.silu):
        model = Conv(channels, channels, kernel, then=then, **geometry)
        check(model, torch.randn(2, channels, 13, 15))


@pytest.mark.parametrize("groups", [1, 16])
def test_sums_beyond_all_bytes(groups):
    """As of a layer that saw zeros only in calibration: sums are beyond 32 bits in its bytes."""
    check(Conv(16, 16, 3, padding=1, groups=groups, to=(1e-10, 3)), 1e3 * torch.randn(2, 16, 9, 11))


@pytest.mark.parametrize("ndim", [1, 3])
def test_other_ranks(ndim):
    check(Conv(18, 20, 3, ndim=ndim, stride=2, padding=1), torch.randn(2, 18, *[7] * ndim))


@pytest.mark.parametrize("channels", CHANNELS[1:])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (4, 3)])
def test_depthwise(channels, kernel, stride):
    model = Conv(
        channels,
        channels,
        kernel,
        stride=stride,
        padding=kernel // 2,
        groups=channels,
        then=F.relu6,
        to=(0.024, 0),
    )
    x = torch.randn(2, channels, 19, 14)
    check(model, x)
    if channels > 4:  # fewer lie in blocks of four
        steps = [step.implementation for step in blocked(model, x, verify=False).steps()]
        assert "dots_depthwise" in steps


@pytest.mark.parametrize("then", ACTIVATIONS)
def test_what_follows(then):
    x = torch.randn(1, 19, 8, 9)
    check(Conv(19, 33, padding=1, then=then), x)
    check(Conv(19, 33, padding=1, then=then, to=None), x)
    residual = torch.randn(1, 33, 8, 9)
    check(Conv(19, 33, padding=1, then=then, residual=(0.04, 99)), x, residual)
    check(Conv(19, 33, padding=1, then=then, residual=(0.04, 99), to=None), x, residual)


@pytest.mark.parametrize("channels", [3, 17])
@pytest.mark.parametrize("groups", [1, 17])
def test_padding_joins_the_convolution(channels, groups):
    groups = groups if channels == groups else 1
    model = Padded(channels, 17, 3, stride=2, padding=1, groups=groups)
    check(model, torch.randn(2, channels, 12, 13))
    steps = blocked(model, torch.randn(2, channels, 12, 13), verify=False).steps()
    assert not any("pad" in step.op for step in steps)


def test_short_rows():
    for width in (1, 2, 3, 4, 6, 7):
        check(Conv(32, 80, padding=1), torch.randn(2, 32, 5, width))


def test_signed_bytes_are_unsigned_inside():
    signed = (0.03, -5, torch.int8, -128, 127)
    check(Conv(17, 16, padding=1, src=signed, to=signed), torch.randn(1, 17, 9, 9))


def test_seven_bits_stay_within_them():
    narrow = (0.01, 20, torch.uint8, 0, 127)
    check(Conv(17, 16, src=narrow, to=narrow), torch.randn(1, 17, 9, 9))


class InBfloat16(nn.Module):
    """Bytes to bfloat16, as tools write it for mixed precision."""

    def __init__(self):
        super().__init__()
        self.to = (0.03, 101, 0, 255, torch.uint8)
        self.conv = nn.Conv2d(17, 8, 3).bfloat16()

    def forward(self, x):
        x = OPS.quantize_per_tensor(x, *self.to)
        return self.conv(OPS.dequantize_per_tensor(x, *self.to, out_dtype=torch.bfloat16)).float()


@torch.no_grad()
def test_numbers_of_other_types_stay_what_they_are():
    model, x = InBfloat16().eval(), torch.randn(1, 17, 9, 9)
    fast = blocked(model, x, verify=False)
    torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.02)


def implementations(model, *inputs):
    return [step.implementation for step in blocked(model, *inputs, verify=False).steps()]


class Function(nn.Module):
    """A function between bytes."""

    def __init__(self, function, src=(0.03, 101), to=(0.02, 90)):
        super().__init__()
        self.function, self.src, self.to = function, src, to

    def forward(self, *inputs):
        return fake(self.function(*(fake(x, *self.src) for x in inputs)), *self.to)


FUNCTIONS = {
    "relu": F.relu,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.3),
    "mish": F.mish,
    "several": lambda x: torch.tanh(x * 2 + 1).clamp(min=-0.5) * x,
    "other bytes": lambda x: x,
    "of NaN": lambda x: torch.log(x).nan_to_num(0.5),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("channels", [1, 7, 16, 33])
@torch.no_grad()
def test_functions_are_tables(function, channels):
    model = Function(FUNCTIONS[function]).eval()
    x = torch.randn(2, channels, 9, 11) * 2
    assert_bytes(model, x)
    steps = blocked(model, x, verify=False).steps()
    assert [step.implementation for step in steps].count("table") == 1
    assert sum("quantize" in step.op for step in steps) <= 3


@torch.no_grad()
def assert_bytes(model, *inputs, share=1e-3):
    """One unit apart at most, and few."""
    fast = blocked(model, *inputs, verify=False)
    expected = model(*inputs)
    apart = ((fast(*inputs) - expected) / model.to[0]).round().abs()
    assert apart.max() <= 1 and apart.sum() <= 1 + share * apart.numel()
    return fast


def test_functions_of_nan_are_no_tables():
    x = torch.randn(1, 8, 5, 5)
    model = Function(lambda x: torch.log(x).clamp(0, 1).nan_to_num(0)).eval()
    assert "table" in implementations(model, x)
    assert "table" not in implementations(Function(torch.log).eval(), x)


POOLINGS = {
    "all": (lambda x: F.adaptive_avg_pool2d(x, 1), 1),
    "mean": (lambda x: x.mean((2, 3), keepdim=True), 1),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (4, 2)), 1),
    "uneven": (lambda x: F.adaptive_avg_pool2d(x, 5), 0),
    "windows": (lambda x: F.avg_pool2d(x, (3, 2), (2, 1), 1), 1),
    "of the input": (lambda x: F.avg_pool2d(x, 3, 1, 1, False, False), 1),
    "wide": (lambda x: F.avg_pool2d(x, (2, 7), 1), 1),
    "with a divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), 1),
    "beyond": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), 1),
}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("channels", [3, 16, 33])
def test_averages(pooling, channels):
    function, count = POOLINGS[pooling]
    x = torch.randn(2, channels, 8, 12)
    for to in ((0.03, 101), (0.0137, 128)):
        model = Function(function, to=to).eval()
        assert_bytes(model, x, share=0.1)  # averages of 6 are ties one time in 6
        assert implementations(model, x).count("sums") == count


@pytest.mark.parametrize("ndim", [1, 3])
def test_averages_of_other_ranks(ndim):
    pool = getattr(F, f"avg_pool{ndim}d")
    model = Function(lambda x: pool(x, 3, 1, 1), to=(0.0137, 99)).eval()
    x = torch.randn(2, 17, *[6] * ndim)
    assert_bytes(model, x)
    assert "sums" in implementations(model, x)


def test_averages_of_bytes_may_be_numbers():
    class Mean(nn.Module):
        def forward(self, x):
            return fake(x, 0.03, 101).mean((2, 3))

    x = torch.randn(2, 17, 9, 9)
    model = Mean().eval()
    torch.testing.assert_close(blocked(model, x, verify=False)(x), model(x))
    assert "sums" in implementations(model, x)


OF_TWO = {
    "sum": (lambda a, b: a + b, None),
    "sum and relu": (lambda a, b: F.relu(b + a), None),
    "difference": (lambda a, b: a - 2 * b, None),
    "gate": (lambda a, b: a * torch.sigmoid(b), (1, 1)),
    "plane": (lambda a, b: a * b, "plane"),
    "twice": (lambda a, b: a * b + a, None),
}


@pytest.mark.parametrize("name", OF_TWO)
@pytest.mark.parametrize("channels", [1, 7, 16, 33])
def test_sums_and_products_read_bytes(name, channels):
    function, other = OF_TWO[name]
    x = torch.randn(2, channels, 19, 23)
    shape = {None: x.shape, (1, 1): (2, channels, 1, 1), "plane": (2, 1, 19, 23)}[other]
    fast = assert_bytes(Function(function).eval(), x, torch.randn(shape))
    assert sum("dequantize" in step.op for step in fast.steps()) <= 1 + (other == (1, 1))


@torch.no_grad()
def test_sums_of_bytes_and_numbers():
    class Sum(nn.Module):
        def forward(self, x, y):
            return fake(x, 0.03, 101) * 2 + y

    x, y = torch.randn(2, 17, 9, 9), torch.randn(2, 17, 9, 9)
    fast = blocked(Sum().eval(), x, y, verify=False)
    torch.testing.assert_close(fast(x, y), Sum()(x, y))
    model = Function(lambda x: x + y).eval()
    assert_bytes(model, x)


class Norm(nn.Module):
    """A norm between bytes: of tokens, or of the channels of an image."""

    def __init__(self, channels, of_images):
        super().__init__()
        self.norm, self.of_images = nn.LayerNorm(channels), of_images
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.first, self.last = Conv(3, channels, padding=1), Conv(channels, 9, 1)

    def forward(self, x):
        if self.of_images:
            return self.last(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return fake(self.norm(fake(x, 0.05, 117)), 0.03, 101)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("of_images", (False, True))
def test_norms_between_bytes(channels, of_images):
    model = Norm(channels, of_images).eval()
    for images in (1, 3, 0):
        x = torch.randn(images, 3, 7, 5) if of_images else torch.randn(images, 11, channels)
        fast = blocked(model, x if images else torch.randn(1, *x.shape[1:]), verify=False)
        with torch.no_grad():
            result, expected = fast(x), model(x)
        # A byte may be the next one where a number lies between two.
        assert result.shape == expected.shape and torch.equal(result, fast(x))
        if images:
            assert ((result - expected).abs() > 1e-4).double().mean() <= 0.05
            ops = [step.op for step in fast.steps()]
            assert sum("quantize" in op for op in ops) == 2, fast.plan()  # the ends


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_in_words(padding):
    check(Conv(17, 16, 4, padding=padding), torch.randn(1, 17, 9, 8))
    check(Conv(17, 17, (2, 3), padding=padding, groups=17), torch.randn(1, 17, 9, 8))


class Chain(nn.Module):
    """Bytes from layer to layer: pooling, concat and a sum of two branches among them."""

    def __init__(self):
        super().__init__()
        self.first = Conv(3, 32, 3, stride=2, padding=1, then=F.relu, to=(0.02, 0))
        self.left = Conv(32, 32, 3, padding=1, then=F.relu, src=(0.02, 0), to=(0.02, 0))
        self.right = Conv(32, 32, 1, src=(0.02, 0), then=F.relu, to=(0.02, 0), residual=(0.02, 0))
        self.last = Conv(64, 10, 1, src=(0.02, 0), to=None)
        self.to = None

    def forward(self, x):
        x = fake(F.max_pool2d(self.first(x), 3, 2, 1), 0.02, 0)
        left = self.left(x)
        joined = fake(torch.cat([left, self.right(left, x)], 1), 0.02, 0)
        return fake(self.last(joined).mean((2, 3)), 0.01, 128).flatten(1)


@torch.no_grad()
def test_bytes_stay_bytes():
    model, x = Chain().eval(), torch.randn(2, 3, 33, 31)
    fast = blocked(model, x, verify=False)
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0.021)
    ops = [step.op for step in fast.steps()]
    assert sum("quantize" in op for op in ops) <= 3, fast.plan()  # the first, and the last two
    assert any("maximum" in step.implementation for step in fast.steps())


@torch.no_grad()
def test_other_sizes_files_and_verification(tmp_path):
    model, x = Chain().eval(), torch.randn(1, 3, 33, 31)
    fast = tb.optimize(model, x)
    assert fast.choice != "model"
    fast(torch.randn(2, 3, 21, 20))
    fast.save(tmp_path / "model.pt")
    again = tb.load(tmp_path / "model.pt")
    assert torch.equal(again(x), fast(x))
    assert "scale 0.02, zero 0" in blocked(model, x).plan()
