"""Weights of a tensor class that computes on other tensors, and has no memory itself."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")


class Scaled(torch.Tensor):
    """Bytes with scales, as other quantizers keep weights: each op gets the numbers."""

    @staticmethod
    def __new__(cls, bytes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, bytes.shape, dtype=scales.dtype)

    def __init__(self, bytes, scales):
        self.bytes, self.scales = bytes, scales

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]

        def numbers(value):
            return value.bytes * value.scales if isinstance(value, Scaled) else value

        return func(*pytree.tree_map(numbers, args), **pytree.tree_map(numbers, kwargs or {}))


def wrapped(layer):
    """The layer with its weight as bytes."""
    weight = layer.weight.detach()
    scales = weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True) / 127
    layer.weight = nn.Parameter(Scaled((weight / scales).round().to(torch.int8), scales), False)
    return layer


@pytest.mark.parametrize(
    "layer, dims",
    (
        (nn.Conv2d(16, 8, 3, padding=1), (16, 9, 9)),
        (nn.ConvTranspose2d(16, 8, 3), (16, 5, 5)),
        (nn.Conv1d(16, 8, 3), (16, 9)),
        (nn.Linear(16, 8), (5, 16)),
    ),
    ids=("2d", "transposed", "1d", "linear"),
)
def test_layers_are_optimized(layer, dims):
    torch.manual_seed(0)
    model = nn.Sequential(wrapped(layer), nn.ReLU()).eval()
    with torch.no_grad():
        for x in (torch.randn(2, *dims), torch.randn(1, *dims)):
            fast = tb.optimize(model, x, tune=False, verify=False)
            assert fast.choice == "blocked"
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert "aten::mul" not in {step.op for step in fast.steps()}, fast.plan()
