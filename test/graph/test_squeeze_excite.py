"""Squeeze and excitation in torch_blocked.optimize: one step, whatever its form."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked
from helpers.problems import threads
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")

STEP = "squeeze and excitation in one step"


class Excited(nn.Module):
    """A convolution and its gates; `form` is the way from means to gates."""

    def __init__(self, channels, form, squeezed=6, bias=True):
        super().__init__()
        self.convolution = nn.Conv2d(8, channels, 3, padding=1)
        Layer = nn.Linear if "linear" in form else lambda i, o, bias: nn.Conv2d(i, o, 1, bias=bias)
        inner = 0 if "single" in form else squeezed
        self.first = Layer(channels, inner or channels, bias=bias)
        self.second = Layer(inner, channels, bias=bias) if inner else None
        self.form = FORMS[form]

    def forward(self, x):
        return self.form(self, self.convolution(x))


def two_layers(m, y):
    return y * torch.sigmoid(m.second(F.silu(m.first(F.adaptive_avg_pool2d(y, 1)))))


def gate_first(m, y):
    return F.hardsigmoid(m.second(F.relu(m.first(y.mean((2, 3), keepdim=True))))) * y


def linear(m, y):
    n, c = y.shape[:2]
    gates = m.second(F.relu(m.first(F.adaptive_avg_pool2d(y, 1).view(n, c))))
    return y * torch.sigmoid(gates).view(n, c, 1, 1).expand_as(y)


def linear_hardswish(m, y):
    gates = m.second(F.hardswish(m.first(y.mean((2, 3)))))
    return y * F.hardsigmoid(gates)[:, :, None, None]


def single(m, y):
    return y * F.hardsigmoid(m.first(F.adaptive_avg_pool2d(y, (1, 1))))


def single_linear(m, y):
    return y * torch.sigmoid(m.first(y.mean((2, 3))).unsqueeze(-1).unsqueeze(-1))


FORMS = {
    "two layers": two_layers,
    "gate first": gate_first,
    "linear": linear,
    "linear hardswish": linear_hardswish,
    "single": single,
    "single linear": single_linear,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("channels", [16, 9])
def test_forms(form, channels):
    model = Excited(channels, form, bias=channels == 16).eval()
    x = torch.randn(3, 8, 9, 7)
    optimized = blocked(model, x, tune=channels == 16)
    for image in (x, x[:1]):
        assert_exact(model, optimized, image)
    plan = optimized.plan()
    assert plan.count(STEP) == 1
    assert "aten::sigmoid" not in plan and "aten::hardsigmoid" not in plan


@pytest.mark.parametrize("channels", [1, 3, 8, 15, 33])
def test_channels(channels):
    model = Excited(channels, "two layers").eval()
    x = torch.randn(2, 8, 5, 6)
    assert_exact(model, blocked(model, x), x)


# Of the gated value z and a value that others read, too: what joins the step, and its name.
AFTER = {
    "read twice": (lambda z, kept: F.relu(z) + 1.5 * z, "mul "),
    "sum": (lambda z, kept: F.relu(kept + z), "mul + add + relu "),
    "activation": (lambda z, kept: F.hardswish(z), "mul + hardswish "),
    "all": (lambda z, kept: F.silu(F.leaky_relu(z) + kept), "mul + leaky_relu + add + silu "),
    "activations": (lambda z, kept: F.relu6(F.silu(z)), "mul + silu "),
}


class Followed(Excited):
    def __init__(self, channels, after):
        super().__init__(channels, "two layers")
        self.other = nn.Conv2d(8, channels, 1)
        self.after = AFTER[after][0]

    def forward(self, x):
        kept = F.relu(self.other(x))
        return self.after(super().forward(x), kept) * kept


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("channels", [16, 7])
def test_what_follows_joins(after, channels):
    model = Followed(channels, after).eval()
    x = torch.randn(3, 8, 9, 7)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert AFTER[after][1] in optimized.plan()


def test_large_maps_and_layers():
    # more than one part of a row, of a sum of inputs and of a group of images
    model = Excited(300, "two layers", squeezed=70).eval()
    x = torch.randn(9, 8, 52, 45)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    expected = optimized(x)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(optimized(x), expected)


def test_other_sizes_batches_and_files(tmp_path):
    model = Excited(17, "two layers").eval()
    optimized = blocked(model, torch.randn(1, 8, 5, 5))
    for dims in ((3, 8, 6, 9), (1, 8, 1, 1), (12, 8, 4, 4)):
        assert_exact(model, optimized, torch.randn(dims))
    assert optimized(torch.randn(0, 8, 5, 5)).shape == (0, 17, 5, 5)
    optimized.save(tmp_path / "model.pt")
    loaded = tb.load(tmp_path / "model.pt")
    x = torch.randn(3, 8, 6, 9)
    assert torch.equal(loaded(x), optimized(x)) and STEP in loaded.plan(x)
    optimized.release()
    assert torch.equal(loaded(x), optimized(x))


def test_volumes():
    model = nn.Sequential(nn.Conv3d(3, 9, 3), Gated3d(9), nn.Conv3d(9, 4, 1)).eval()
    x = torch.randn(2, 3, 6, 5, 7)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert STEP in optimized.plan()


class Gated3d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv3d(channels, 2, 1)
        self.second = nn.Conv3d(2, channels, 1)

    def forward(self, x):
        return x * self.second(self.first(x.mean((2, 3, 4), keepdim=True)).relu()).sigmoid()


def test_infinite_sums_stay_out_of_the_tail():
    """Gates of infinity are 1. In the tail, whose weights are 0, they would be NaN, which the next
    convolution would meet there."""
    last = nn.ConvTranspose2d(7, 16, 3, stride=2)  # reads whole blocks
    model = nn.Sequential(nn.Conv2d(3, 7, 1), Excite(7), last).eval()
    for layer in (model[0], model[1].second):
        nn.init.ones_(layer.weight)
    nn.init.constant_(model[1].first.weight, 1e20)
    nn.init.constant_(last.weight, 1e-20)
    x = torch.full((2, 3, 6, 6), 1e20)
    result = blocked(model, x)(x)
    assert result.isfinite().all()
    assert torch.allclose(result, model(x))


class Excite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        return x * self.second(F.relu(self.first(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


OTHERS = {
    "gates read twice": lambda m, y: (lambda g: y * g + g)(
        torch.sigmoid(m.second(m.first(F.adaptive_avg_pool2d(y, 1))))
    ),
    "greatest value": lambda m, y: (
        y * torch.sigmoid(m.second(m.first(F.adaptive_max_pool2d(y, 1))))
    ),
    "two by two": lambda m, y: (
        y
        * F.interpolate(torch.sigmoid(m.second(m.first(F.adaptive_avg_pool2d(y, 2)))), y.shape[2:])
    ),
    "other gate": lambda m, y: y * torch.tanh(m.second(m.first(F.adaptive_avg_pool2d(y, 1)))),
    "own mean": lambda m, y: y * torch.sigmoid(F.adaptive_avg_pool2d(y, 1)),
    "another mean": lambda m, y: (
        y * torch.sigmoid(m.second(m.first(F.adaptive_avg_pool2d(y.abs(), 1))))
    ),
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_it(form, monkeypatch):
    monkeypatch.setitem(FORMS, "other", OTHERS[form])
    model = Excited(16, "other").eval()
    x = torch.randn(2, 8, 6, 6)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert STEP not in optimized.plan()
