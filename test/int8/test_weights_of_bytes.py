"""Linear layers whose weights alone are bytes: few rows read the bytes themselves."""

import pytest
import torch
import torch.nn.functional as F
from helpers.int8_layers import OPS
from helpers.optimized import blocked
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")


class Layer(nn.Module):
    """A linear layer of bytes in one of the ways in which models write it."""

    def __init__(self, inputs, outputs, bias, form):
        super().__init__()
        weight = torch.randn(outputs, inputs)
        scales = weight.abs().amax(1).clamp(min=1e-3) / 127
        self.register_buffer("weight", (weight / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(outputs, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None
        self.form = form

    def forward(self, x):
        if self.form == "dequantized":
            weight = OPS.dequantize_per_channel(
                self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
            )
            return F.linear(x, weight, self.bias)
        if self.form == "one scale":
            arguments = (0.01, 0, -128, 127, torch.int8)
            return F.linear(x, OPS.dequantize_per_tensor(self.weight, *arguments), self.bias)
        y = F.linear(x, self.weight.float()) * self.scales
        return y if self.bias is None else y + self.bias


def assert_exact(model, fast, x):
    with torch.no_grad():
        result, own = fast(x), model(x)
        exact = own.double()
        if own.numel():
            weights = model.weight.double() * (
                0.01 if model.form == "one scale" else model.scales.double()[:, None]
            )
            bias = None if model.bias is None else model.bias.double()
            exact = F.linear(x.double(), weights, bias)
        assert torch.equal(result, fast(x)) and result.shape == own.shape
        off, bound = ((each - exact).abs().max() if own.numel() else 0 for each in (result, own))
        assert off <= 4 * bound + 1e-5 * (exact.abs().max() if own.numel() else 0)


@pytest.mark.parametrize("form", ("dequantized", "one scale", "scaled after"))
@pytest.mark.parametrize("outputs", (1, 9, 33, 130))
@pytest.mark.parametrize("inputs", (1, 7, 64, 257))
def test_few_rows(inputs, outputs, form):
    torch.manual_seed(inputs)
    for rows, bias in ((1, True), (3, False), (8, True), (9, True)):
        model = Layer(inputs, outputs, bias, form).eval()
        fast = blocked(model, torch.randn(rows, inputs), verify=False)
        assert_exact(model, fast, torch.randn(rows, inputs))
        names = {step.implementation for step in fast.steps()}
        assert ("few_rows_of_bytes" in names) == (rows <= 8), fast.plan()
        for other in (0, 2, 40):
            assert_exact(model, fast, torch.randn(other, inputs))


@pytest.mark.usefixtures("in_bfloat16")
def test_beside_bfloat16():
    """Bytes are fewer to read than bfloat16; many rows take that."""
    model = Layer(64, 32, True, "dequantized").eval()
    for rows, name in ((2, "few_rows_of_bytes"), (40, "dots_bfloat16")):
        x = torch.randn(rows, 64)
        fast = tb.optimize(model, x, dtype=torch.bfloat16, tune=False, verify=False)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=3e-2, atol=0.2)
        assert name in fast.plan() or rows > 8, fast.plan()


@pytest.mark.parametrize("config", (Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig))
def test_models_of_torchao(config):
    """Their weights are tensors of another class, without memory of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 96)).eval()
    quantize_(model, config())
    for x in (torch.randn(2, 128), torch.randn(40, 128)):
        fast = tb.optimize(model, x, tune=False)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            assert fast.choice == "blocked"
    if config is Int8WeightOnlyConfig:
        assert fast.plan(torch.randn(2, 128)).count("few_rows_of_bytes") == 2
