"""Linear layers of optimized models: kernels of ours for few rows and for many, and oneDNN's."""

import pytest
import torch
import torch.nn.functional as F
from problems import threads
from torch import nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.bench.convolution import forced

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
}


class Layer(nn.Module):
    def __init__(self, inputs, outputs, bias, activation):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.linear(x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "inputs, outputs, bias",
    [(1, 1, True), (7, 17, False), (300, 70, True), (513, 130, True), (64, 1000, False)],
)
@torch.no_grad()
def test_rows(inputs, outputs, bias, activation):
    torch.manual_seed(inputs)
    model = Layer(inputs, outputs, bias, ACTIVATIONS[activation]).eval()
    optimized = torch_blocked.optimize(model, torch.randn(2, inputs), tune=False)
    optimized.choice = "blocked"
    assert ("aten::linear + " in optimized.plan()) == (activation != "none")
    for rows in (1, 2, 3, 4, 5, 8, 9):
        x = torch.randn(rows, inputs)
        output = optimized(x)
        expected = model.double()(x.double())
        own = (model.float()(x) - expected).abs().max()
        assert (output - expected).abs().max() <= 2 * own + 1e-6 * expected.abs().max()
        assert torch.equal(output, optimized(x))
        with threads(1):
            assert torch.equal(output, optimized(x))


# A tile of rows and several, groups of outputs with a rest and without, sums of one and two parts.
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "hardswish"])
@pytest.mark.parametrize("implementation", ["direct", "onednn"])
@pytest.mark.parametrize(
    "inputs, outputs, bias", [(1, 1, True), (3, 33, True), (64, 48, False), (1030, 100, True)]
)
@torch.no_grad()
def test_many_rows(implementation, inputs, outputs, bias, activation):
    torch.manual_seed(inputs)
    model = Layer(inputs, outputs, bias, ACTIVATIONS[activation]).eval()
    with forced(implementation, "linear"):
        optimized = torch_blocked.optimize(model, torch.randn(2, inputs), tune=False)
        optimized.choice = "blocked"
        for dims in ((1,), (13,), (2, 15), (3, 10, 10), (500,)):
            x = torch.randn(*dims, inputs)
            output = optimized(x)
            assert _C.last_implementation("linear") == implementation
            expected = model.double()(x.double())
            own = (model.float()(x) - expected).abs().max()
            # oneDNN adds all inputs up in one chain.
            relative = 1e-6 if implementation == "direct" else 3e-6
            assert (output - expected).abs().max() <= 2 * own + relative * expected.abs().max()
            with threads(1):  # oneDNN shares the inputs of few rows among threads
                assert implementation == "onednn" or torch.equal(output, optimized(x))
            x[..., 0, :1] = torch.nan
            assert torch.equal(optimized(x).isnan(), model(x).isnan())


def test_linear_layers_are_timed(tmp_path, monkeypatch):
    """Where two implementations take a layer, the file keeps which was faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, x = nn.Linear(64, 48).eval(), torch.randn(2, 64)
    with threads(1):  # beside other tests two seldom have both cores, and nothing would be kept
        optimized = torch_blocked.optimize(model, x)
        optimized.choice = "blocked"
        plan = optimized.plan()
    (row,) = [line for line in plan.splitlines() if line.startswith("aten::linear")]
    assert "fastest alone" in row
    (file,) = tmp_path.rglob("tuning-*.tsv")
    (line,) = [
        line for line in file.read_text().splitlines() if " linear 2 x 64 -> 48 bias" in line
    ]
    assert line.split("\t")[1] in row
    with forced("onednn", "linear"):
        many = torch_blocked.optimize(model, torch.randn(200, 64))
        many.choice = "blocked"
        assert "fastest alone" not in many.plan()
