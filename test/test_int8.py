"""Models of quantized_decomposed's ops, as PyTorch's quantizers write them, run on bytes."""

import pytest
import torch
import torch.nn.functional as F
from test_optimize import blocked, cache_folder  # noqa: F401
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers the ops

import torch_blocked as tb

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

OPS = torch.ops.quantized_decomposed
CHANNELS = [1, 3, 7, 8, 9, 15, 16, 17, 33]


def fake(x: Tensor, scale: float, zero: int, dtype=torch.uint8, least=0, most=255) -> Tensor:
    """x as bytes, and numbers again."""
    arguments = (scale, zero, least, most, dtype)
    return OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *arguments), *arguments)


class Conv(nn.Module):
    """A convolution of bytes, and what follows it."""

    def __init__(
        self,
        inputs,
        outputs,
        kernel=3,
        *,
        ndim=2,
        bias=True,
        then=None,
        to=(0.05, 117),
        src=(0.03, 101),
        residual=None,
        **geometry,
    ):
        super().__init__()
        conv = getattr(nn, f"Conv{ndim}d")(inputs, outputs, kernel, bias=bias, **geometry)
        weight = conv.weight.detach()
        scale = weight.flatten(1).abs().amax(1).clamp(min=1e-3) / 127
        shape = [-1] + [1] * (weight.dim() - 1)
        self.register_buffer("weight", (weight / scale.view(shape)).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("zeros", torch.zeros(outputs, dtype=torch.int64))
        self.register_buffer("bias", conv.bias.detach() if bias else None)
        self.conv = getattr(F, f"conv{ndim}d")
        self.geometry = {
            name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups")
        }
        self.then, self.to, self.src, self.residual = then, to, src, residual

    def forward(self, x, *others):
        weight = OPS.dequantize_per_channel(
            self.weight, self.scale, self.zeros, 0, -127, 127, torch.int8
        )
        y = self.conv(fake(x, *self.src), weight, self.bias, **self.geometry)
        if self.residual:
            y = y + fake(others[0], *self.residual)
        if self.then:
            y = self.then(y)
        return fake(y, *self.to) if self.to else y


@torch.no_grad()
def check(model: Conv, *inputs: Tensor, ops=1) -> None:
    """Bytes differ by one at most, and few do; the same bits twice; and it runs on bytes."""
    model = model.eval()
    fast = blocked(model, *inputs, verify=False)
    expected, result = model(*inputs), fast(*inputs)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    if model.to:
        apart = ((result - expected) / model.to[0]).round().abs()
        assert apart.numel() == 0 or apart.max() <= 1, apart.max()
        assert (apart > 0).float().mean() < 0.01 or apart.sum() <= 2
    else:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(fast(*inputs), result)
    if result.numel():
        assert sum("dots" in step.implementation for step in fast.steps()) == ops, fast.plan()


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


ACTIVATIONS = [
    F.relu,
    F.relu6,
    F.hardswish,
    F.silu,
    F.gelu,
    F.leaky_relu,
    None,
    lambda x: F.hardtanh(x, -0.5, 0.25),
]


@pytest.mark.parametrize("then", ACTIVATIONS)
def test_what_follows(then):
    x = torch.randn(1, 19, 8, 9)
    check(Conv(19, 33, padding=1, then=then), x)
    check(Conv(19, 33, padding=1, then=then, to=None), x)
    residual = torch.randn(1, 33, 8, 9)
    check(Conv(19, 33, padding=1, then=then, residual=(0.04, 99)), x, residual)
    check(Conv(19, 33, padding=1, then=then, residual=(0.04, 99), to=None), x, residual)


class Padded(Conv):
    """What tools make of "same" padding: more of it at the far ends, before the bytes."""

    def forward(self, x):
        return super().forward(F.pad(x, (0, 1, 1, 2)))


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


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.Hardswish(),
        nn.Conv2d(24, 24, 5, padding=2, groups=24),
        nn.ReLU6(),
        nn.MaxPool2d(2),
        Residual(24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    ).eval()


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return F.relu(x + self.conv(x))


def by_x86(model, calibration):
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (calibration[0],)).module(), quantizer)
    for each in calibration:
        prepared(each)
    return convert_pt2e(prepared)


@pytest.mark.parametrize("quantize", [tb.quantize, by_x86])
@torch.no_grad()
def test_the_flow_of_pytorch(network, quantize):
    calibration = [torch.randn(1, 3, 32, 32) for _ in range(4)]
    quantized = quantize(network, calibration)
    fast = tb.optimize(quantized, calibration[0])
    assert fast.choice != "model"
    fast.choice = "blocked"
    for x in calibration:
        torch.testing.assert_close(fast(x), quantized(x), rtol=0, atol=0.02)
        torch.testing.assert_close(fast(x), network(x), rtol=0, atol=0.1)
    done = [step.implementation for step in fast.steps()]
    assert done.count("dots") >= 2 and "maximum" in done, fast.plan()


@torch.no_grad()
def test_quantize_keeps_modules_and_batches(network):
    calibration = [torch.randn(2, 3, 32, 32), (torch.randn(2, 3, 32, 32),)]
    quantized = tb.quantize(network, calibration, keep=["0", "6.conv"])
    ops = [str(node.target) for node in quantized.graph.nodes]
    assert sum("dequantize_per_channel" in op for op in ops) == 2  # the depthwise, and the last
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(tb.optimize(quantized, x)(x), quantized(x), rtol=0, atol=0.02)


def test_quantize_says_what_is_wrong(network):
    with pytest.raises(ValueError, match="expected calibration inputs, got none"):
        tb.quantize(network, [])
    with pytest.raises(ValueError, match="evaluation mode"):
        tb.quantize(nn.Sequential(nn.Conv2d(3, 3, 1)), [torch.randn(1, 3, 4, 4)])
