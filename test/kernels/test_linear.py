"""Linear layers of optimized models: kernels of ours for few rows and for many, and oneDNN's."""

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import forced
from helpers.problems import threads
from torch import nn

import torch_blocked
from torch_blocked import _C

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "mish": F.mish,
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


class Sum(nn.Module):
    """activation(linear(f(x)) + x), in either order."""

    def __init__(self, inputs, outputs, activation, order):
        super().__init__()
        self.linear, self.activation, self.order = nn.Linear(inputs, outputs), activation, order

    def forward(self, x, y):
        z = self.linear(x)
        return self.activation(z + y if self.order == "layer-first" else y + z)


# Groups of outputs with a rest and without, sums of one and two parts.
SUMS = [
    ("few_rows", 3, 70, 33),
    ("direct", 2, 7, 17),
    ("direct", 37, 1030, 100),
    ("direct", 500, 32, 48),
    ("onednn", 37, 33, 9),
    ("strassen", 512, 512, 512),
]


@pytest.mark.parametrize("order", ["layer-first", "layer-last"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("implementation, rows, inputs, outputs", SUMS)
@torch.no_grad()
def test_sums(implementation, rows, inputs, outputs, activation, order):
    torch.manual_seed(inputs)
    model = Sum(inputs, outputs, ACTIVATIONS[activation], order).eval()
    x, y = torch.randn(rows, inputs), torch.randn(rows, outputs)
    y_before = y.clone()
    with forced(implementation, "linear"):
        fast = torch_blocked.optimize(model, (x, y), tune=False)
        fast.choice = "blocked"
        assert len(fast.steps()) == 1, fast.plan()
        output = fast(x, y)
        assert _C.last_implementation("linear") == implementation
        expected = model.double()(x.double(), y.double())
        own = (model.float()(x, y) - expected).abs().max()
        assert (output - expected).abs().max() <= 4 * own + 3e-6 * expected.abs().max()
        assert torch.equal(output, fast(x, y)) and torch.equal(y, y_before)
        y[0, 0] = torch.nan
        assert torch.equal(fast(x, y).isnan(), model(x, y).isnan())


@torch.no_grad()
@pytest.mark.parametrize("implementation, rows, inputs, outputs", SUMS)
def test_sums_of_what_nobody_else_reads(implementation, rows, inputs, outputs):
    """Whose memory the result may take, or not, by what each implementation writes when."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)

        def forward(self, x):
            y = F.gelu(self.first(x))
            return self.second(y.sin()) + y

    torch.manual_seed(inputs)
    model, x = Net().eval(), torch.randn(rows, inputs)
    with forced(implementation, "linear"):
        fast = torch_blocked.optimize(model, x, tune=False)
        fast.choice = "blocked"
        output = fast(x)
        assert _C.last_implementation("linear") == implementation
    expected = model.double()(x.double())
    own = (model.float()(x) - expected).abs().max()
    assert (output - expected).abs().max() <= 4 * own + 3e-6 * expected.abs().max()


@torch.no_grad()
def test_sums_that_are_no_epilogue():
    """Of other dims, of itself, of another factor, of an activation: right, in whatever steps."""
    linear, square = nn.Linear(17, 24), nn.Linear(17, 17)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.square = linear, square

        def forward(self, x):
            z, s = self.linear(x), self.square(x)
            return (
                z + z[:1], z + z, torch.add(s, x, alpha=2), F.gelu(s.clone()) + x,
                self.square(x) + x, F.relu(self.square(x)) + x, self.linear(x) + x[..., :1],
            )  # fmt: skip

    net, x = Net().eval(), torch.randn(3, 5, 17)
    fast = torch_blocked.optimize(net, x, tune=False)
    fast.choice = "blocked"
    for ours, theirs in zip(fast(x), net(x), strict=True):
        torch.testing.assert_close(ours, theirs)
