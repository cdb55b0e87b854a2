"""Layers of bytes are lists of implementations like all others: forced, timed and explained."""

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import forced
from helpers.int8_layers import OPS, Conv, fake
from torch import nn

import torch_blocked
from torch_blocked import _C

ON_BYTES = ("dots", "winograd_words")


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs)
        self.register_buffer("scale", weight.abs().amax(1) / 127)
        self.register_buffer("weight", (weight / self.scale[:, None]).round().to(torch.int8))
        self.register_buffer("zeros", torch.zeros(outputs, dtype=torch.int64))

    def forward(self, x):
        arguments = (self.scale, self.zeros, 0, -127, 127, torch.int8)
        weight = OPS.dequantize_per_channel(self.weight, *arguments)
        return fake(F.linear(fake(x, 0.03, 101), weight), 0.2, 117)


def alternatives(model: nn.Module, x: torch.Tensor) -> dict[str, object]:
    """Of the only layer that runs on bytes."""
    explained = torch_blocked.explain(model.eval(), x)
    [layer] = [each for each in explained.layers if each.implementation in ON_BYTES]
    return {each.implementation: each for each in layer.alternatives}


def test_their_families():
    names = _C.implementations()
    assert names["quantized_linear"] == ["dots"]
    assert names["quantized_convolution"] == ["dots_depthwise", "winograd_words", "dots"]
    with pytest.raises(ValueError, match="expected one of"):
        _C.force_implementation("quantized_linear", "winograd_words")


@torch.no_grad()
def test_a_linear_layer_may_be_forced():
    model, x = Linear(32, 24).eval(), torch.randn(5, 32)
    with forced("dots", "quantized_linear"):
        fast = torch_blocked.optimize(model, x, tune=False)
        apart = ((fast(x) - model(x)) / 0.2).round().abs()
    assert apart.max() <= 1
    assert [step.implementation for step in fast.steps()].count("dots") == 1
    assert _C.last_implementation("quantized_linear") == "dots"


def test_a_linear_layer_is_explained():
    found = alternatives(Linear(32, 24), torch.randn(5, 32))
    assert set(found) <= {"dots"}
    assert all(each.microseconds > 0 for each in found.values())


def test_a_convolution_is_explained():
    """Which one runs depends on the CPU."""
    found = alternatives(Conv(16, 16), torch.randn(1, 16, 24, 24))
    assert found["dots_depthwise"].refusal == "is for groups of one channel"
    assert found["dots"].microseconds > 0 and not found["dots"].refusal
    assert bool(found["winograd_words"].refusal) == (_C.isa() == "default")
