"""Ops that quantize and dequantize at once: models trained for bytes, and other quantizers."""

import pytest
import torch
from helpers.optimized import blocked
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")

# least, most and zero point of values
RANGES = {"unsigned": (0, 255, 117), "signed": (-128, 127, -11), "of 4 bits": (0, 15, 6)}


class Layer(nn.Module):
    """A layer between fake quantizations, whose parameters are numbers or tensors."""

    def __init__(self, layer, range="unsigned", per_channel=True, tensors=False, weights=127):
        super().__init__()
        self.layer, self.range, self.weights = layer, RANGES[range], weights
        outputs = int(getattr(layer, "transposed", False))
        self.axis = outputs if per_channel else None
        weight = layer.weight.detach().transpose(0, outputs).flatten(1).abs()
        most = weight.amax(1) if per_channel else weight.amax()
        self.register_buffer("scales", most.clamp(min=1e-3) / weights)
        self.register_buffer("zeros", torch.zeros(most.shape, dtype=torch.int32))
        self.register_buffer("scale", torch.tensor([0.05]) if tensors else None)
        self.register_buffer("zero", torch.tensor([self.range[2]], dtype=torch.int32))

    def values(self, x):
        least, most, zero = self.range
        scale, zero = (0.05, zero) if self.scale is None else (self.scale, self.zero)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, least, most)

    def weight(self):
        bounds = (-self.weights - 1, self.weights)
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(
                self.layer.weight, self.scales, self.zeros, *bounds
            )
        return torch.fake_quantize_per_channel_affine(
            self.layer.weight, self.scales, self.zeros, self.axis, *bounds
        )

    def forward(self, x):
        y = torch.func.functional_call(self.layer, {"weight": self.weight()}, (self.values(x),))
        return self.values(torch.relu(y))


@torch.no_grad()
def check(model, x, step=0.05, by=("dots", "winograd_words")):
    """As in PyTorch, but where a number lies between two bytes; on bytes; the same bits twice."""
    fast = blocked(model.eval(), x, verify=False)
    for each in (x, x[:1], torch.cat((x, x))):
        result, expected = fast(each), model(each)
        apart = ((result - expected) / step).abs()
        assert apart.max() < 1.001 and (apart > 0.1).float().mean() < 0.01
        assert torch.equal(fast(each), result)
    assert any(each.implementation.startswith(by) for each in fast.steps()), fast.plan()
    return fast


@pytest.mark.parametrize("tensors", (False, True), ids=("numbers", "tensors"))
@pytest.mark.parametrize("per_channel", (True, False), ids=("per channel", "per tensor"))
@pytest.mark.parametrize("range", RANGES)
def test_convolutions(range, per_channel, tensors):
    torch.manual_seed(0)
    for inputs, outputs in ((3, 16), (17, 9), (16, 33)):
        layer = Layer(
            nn.Conv2d(inputs, outputs, 3, padding=1, stride=2), range, per_channel, tensors
        )
        check(layer, torch.randn(2, inputs, 9, 11))


@pytest.mark.parametrize(
    "layer, dims",
    (
        (nn.Conv1d(8, 7, 3), (8, 13)),
        (nn.Conv3d(8, 7, 3, padding=1), (8, 4, 5, 6)),
        (nn.ConvTranspose2d(8, 7, 3, stride=2), (8, 5, 6)),
        (nn.Conv2d(16, 16, 3, padding=1, groups=16), (16, 9, 9)),
        (nn.Linear(16, 9), (16,)),
    ),
    ids=("1d", "3d", "transposed", "depthwise", "linear"),
)
def test_kinds_of_layers(layer, dims):
    torch.manual_seed(0)
    check(Layer(layer), torch.randn(3, *dims))
    check(Layer(layer, weights=7), torch.randn(3, *dims))


def test_weights_that_are_no_bytes_stay_numbers():
    """12 bits, and a zero point that is not 0."""
    wide, shifted = Layer(nn.Conv2d(8, 8, 1), weights=2047), Layer(nn.Conv2d(8, 8, 1))
    shifted.zeros += 3
    x = torch.randn(2, 8, 6, 6)
    for model in (wide.eval(), shifted.eval()):
        fast = blocked(model, x, verify=False)
        with torch.no_grad():
            assert ((fast(x) - model(x)) / 0.05).abs().max() < 1.001
        assert "dots" not in {each.implementation for each in fast.steps()}, fast.plan()


def trained(x):
    """As torch's flow for training leaves a model: observers are off."""
    values = FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    weights = FakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )

    class Block(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
            self.before, self.of_weight, self.after = values(), weights(), values()

        def forward(self, x):
            weight = self.of_weight(self.conv.weight)
            y = nn.functional.conv2d(self.before(x), weight, self.conv.bias, padding=1)
            return self.after(torch.relu(y))

    model = nn.Sequential(Block(3, 16), Block(16, 8))
    with torch.no_grad():
        model(x)
    model.apply(torch.ao.quantization.disable_observer)
    return model.eval()


def test_models_trained_for_bytes():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 10)
    model = trained(x)
    fast = check(model, x, step=float(model[1].after.scale))
    names = [each.implementation for each in fast.steps()]
    assert sum(name.startswith(("dots", "winograd_words")) for name in names) == 2


class Weighted(nn.Module):
    """Weights that are bytes times scales, minus zero points, as NNCF's graphs have them."""

    def __init__(self, per_channel=True, zero=0.0, norm=False):
        super().__init__()
        scales = torch.rand(8, 1, 1, 1) * 0.01 + 0.001 if per_channel else torch.tensor(0.004)
        self.register_buffer("bytes", torch.randint(-128, 128, (8, 16, 3, 3), dtype=torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.full_like(scales, zero))
        self.bias = nn.Parameter(torch.randn(8))
        self.norm = nn.BatchNorm2d(8) if norm else None
        if norm:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        def bytes(x):
            return torch.fake_quantize_per_tensor_affine(x, 0.05, 117, 0, 255)

        weight = self.bytes * self.scales - self.zeros
        y = nn.functional.conv2d(bytes(x), weight, self.bias, padding=1)
        return bytes(torch.relu(self.norm(y) if self.norm else y))


@pytest.mark.parametrize("norm", (False, True), ids=("", "batch norm"))
@pytest.mark.parametrize("per_channel", (True, False), ids=("per channel", "per tensor"))
def test_weights_times_scales(per_channel, norm):
    torch.manual_seed(0)
    fast = check(Weighted(per_channel, norm=norm), torch.randn(2, 16, 9, 11))
    (layer,) = (step for step in fast.steps() if "conv2d" in step.op)
    assert ("batch_norm" in layer.op) == norm


def test_zero_points_of_weights_stay():
    torch.manual_seed(0)
    model, x = Weighted(zero=0.1).eval(), torch.randn(2, 16, 9, 11)
    with torch.no_grad():
        assert ((blocked(model, x, verify=False)(x) - model(x)) / 0.05).abs().max() < 1.001


def test_a_linear_layer_behind_a_view_finds_bytes():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Layer(nn.Linear(16 * 6, 9))

        def forward(self, x):
            x = torch.fake_quantize_per_tensor_affine(torch.relu(x), 0.02, 0, 0, 255).flatten(1)
            return nn.functional.linear(x, self.linear.weight(), self.linear.layer.bias)

    torch.manual_seed(0)
    x = torch.randn(3, 16, 2, 3)
    fast = blocked(Head().eval(), x, verify=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), Head.forward(fast._model, x), rtol=1e-4, atol=1e-4)
    assert any(step.implementation == "dots" for step in fast.steps()), fast.plan()


def test_saved_and_exported(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 9, 9)
    model = Layer(nn.Conv2d(8, 16, 3, padding=1)).eval()
    fast = blocked(model, x, verify=False)
    fast.save(tmp_path / "model.tb")
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        for each in (tb.load(tmp_path / "model.tb"), blocked(exported, x, verify=False)):
            assert torch.equal(each(x), fast(x))
            assert any(step.implementation.startswith("dots") for step in each.steps())
