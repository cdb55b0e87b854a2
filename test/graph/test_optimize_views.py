"""Views that optimized models read: of inputs, of constants and of their own results."""

import pytest
import torch
from helpers.problems import threads
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked.compile import backend


class Forward(nn.Module):
    def __init__(self, function, *layers):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)
        self.register_buffer("image", torch.randn(6, 9, 8, 2).permute(3, 0, 1, 2))

    def forward(self, x):
        return self.function(self, x, *self.layers)


def conv(inputs, outputs=16, kernel=3):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


# Each on x [2, 6, 9, 8].
CASES = {
    "channels": (lambda m, x, f: f(x[:, :3]), conv(3)),
    "every other channel": (lambda m, x, f: f(x[:, ::2]), conv(3)),
    "rows": (lambda m, x, f: f(x[:, :, 1:-1]), conv(6)),
    "one image": (lambda m, x, f: f(x[1:]) + f(x[:1]), conv(6)),
    "a dim less": (lambda m, x, f: f(x[..., None].expand(-1, -1, -1, -1, 4)[:, :, 1]), conv(6)),
    "unbind": (
        lambda m, x, f: (
            f(torch.stack(x.unbind(1)[:3], 1)) + f(x.unbind(1)[4][:, None].expand(-1, 3, -1, -1))
        ),
        conv(3),
    ),
    "expand": (lambda m, x, f: f(x[:, :1].expand(-1, 6, -1, -1)), conv(6)),
    "transposed": (lambda m, x, f: f(x.transpose(2, 3)), conv(6)),
    "channels last": (lambda m, x, f: f(x.permute(0, 2, 3, 1).permute(0, 3, 1, 2)), conv(6)),
    "reversed": (lambda m, x, f: f(x.flip(1)), conv(6)),
    "imaginary": (lambda m, x, f: f(torch.complex(x, x).conj().imag), conv(6)),
    "1-D": (lambda m, x, f: f(x[..., 1:-1].flatten(2)), nn.Conv1d(6, 8, 3)),
    "1-D rows": (lambda m, x, f: f(x[:, :, 0]), nn.Conv1d(6, 8, 3)),
    "residual": (lambda m, x, f: f(x) + x.flip(3)[:, :, :, :8], conv(6, 6)),
    "residual of a result": (
        lambda m, x, f, g: (lambda y: g(y.transpose(2, 3)) + y.transpose(2, 3))(f(x)),
        conv(6),
        conv(16),
    ),
    "residual that src is a view of": (
        lambda m, x, f, g: (lambda y: g(y[:]) + y)(f(x)),
        conv(6),
        conv(16),
    ),
    "residual that src is rows of": (
        lambda m, x, f, g: (lambda y: g(y.view(y.shape)) + y)(f(x)),
        conv(6),
        conv(16),
    ),
    "batch norm": (lambda m, x, f: f(x[:, ::2]), nn.BatchNorm2d(3)),
    "batch norm, transposed": (lambda m, x, f: f(x.transpose(2, 3)).relu(), nn.BatchNorm2d(6)),
    "pooling": (lambda m, x, f: f(F.max_pool2d(x[:, 1:], 2)), conv(5)),
    "linear": (lambda m, x, f: f(x.transpose(1, 3)), nn.Linear(6, 5)),
    "concat": (
        lambda m, x, f: f(torch.cat([x[:, :2], x.transpose(2, 3).transpose(2, 3)], 1)),
        conv(8),
    ),
    "a constant": (lambda m, x, f: f(m.image) + f(x), conv(6)),
    "of a constant": (lambda m, x, f: f(x + m.image[:1]), conv(6)),
    "squeeze and excitation": (
        lambda m, x, f: x[:, 1:4] * torch.sigmoid(f(x[:, 1:4].mean((2, 3), keepdim=True))),
        conv(3, 3, 1),
    ),
    "one image without a batch": (
        lambda m, x, f: f(x[0]) + F.max_pool2d(x[1], 3, 1, 1)[:1],
        conv(6, 4),
    ),
    "a sum of another type": (lambda m, x, f: f(x) + (x * 8).to(torch.int32), conv(6, 6)),
}


def example(batch=2):
    return torch.randn(batch, 6, 9, 8)


def assert_agrees(result, model, x):
    with torch.no_grad():
        dense = model(x)
        exact = model.double()(x.double())
        model.float()
    assert result.shape == dense.shape and result.dtype == dense.dtype
    scale = exact.abs().max()
    assert (result - exact).abs().max() <= 4 * (dense - exact).abs().max() + 2e-6 * scale


@pytest.fixture(autouse=True)
def seed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)


@pytest.mark.parametrize("tune", (False, True), ids=("estimated", "tuned"))
@pytest.mark.parametrize("name", CASES)
def test_views(name, tune, tmp_path):
    function, *layers = CASES[name]
    model = Forward(function, *layers).eval()
    x = example()
    optimized = tb.optimize(model, x, tune=tune, verify=False)
    optimized.choice = "blocked"
    optimized.save(tmp_path / "model.pt")
    loaded = tb.load(tmp_path / "model.pt")
    for y in (x, example(), x.to(memory_format=torch.channels_last), x[:, :, :, :].flip(0)):
        for form in (optimized, loaded):
            assert_agrees(form(y), model, y)
            assert torch.equal(form(y), form(y))
    assert_agrees(optimized(x.to_blocked("nChw8c")), model, x)


@pytest.mark.parametrize("name", list(CASES)[::4])
def test_views_under_the_backend(name):
    function, *layers = CASES[name]
    model = Forward(function, *layers).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    x = example()
    with torch.no_grad():
        assert_agrees(compiled(x), model, x)
        if name != "imaginary":
            assert_agrees(tb.to_dense(compiled(x.to_blocked())), model, x)


# Runs of 1, 2, 3, 4, 8 and 96 floats; gaps in every dim; dims that come together; a tail of rows.
COPIED = {
    "patches": ((2, 6, 8, 8), lambda x: x.reshape(48, 2, 4, 2).transpose(1, 2)),
    "runs of three": ((2, 5, 7, 3), lambda x: x.permute(2, 0, 1, 3)),
    "runs of four": ((2, 4, 33, 4), lambda x: x.permute(2, 1, 0, 3)),
    "runs of eight": ((3, 4, 5, 16), lambda x: x[..., 8:].transpose(0, 2)),
    "windows": ((1, 14, 14, 96), lambda x: x.view(1, 2, 7, 2, 7, 96).permute(0, 1, 3, 2, 4, 5)),
    "heads": ((1, 12, 64, 4), lambda x: x.transpose(1, 3)),
    "transposed": ((37, 41), lambda x: x.t()),
    "steps": ((4, 9, 35), lambda x: x[:, ::2, 1::3]),
    "expanded": ((3, 1, 5), lambda x: x.expand(3, 40, 5)),
    "reversed dims": ((2, 3, 4, 5, 6), lambda x: x.permute(4, 3, 2, 1, 0)),
}


@pytest.mark.parametrize("of", ("an input", "a result"))
@pytest.mark.parametrize("name", COPIED)
@torch.no_grad()
def test_copies_of_views(name, of):
    """A layer that reads a view gets a copy in order, for any number of threads."""
    dims, view = COPIED[name]
    x = torch.randn(dims)
    last = view(x).shape[-1]
    layer = nn.Linear(last, last, bias=False).eval()
    nn.init.eye_(layer.weight)

    def viewed(x):
        return view(x if of == "an input" else x.relu())

    class Viewed(nn.Module):
        def forward(self, x):
            y = viewed(x)
            return layer(y), y.contiguous()

    optimized = tb.optimize(Viewed().eval(), x, tune=False)
    optimized.choice = "blocked"
    assert "contiguous" in optimized.plan()
    for count in (1, 2):
        with threads(count):
            for result in optimized(x):
                assert torch.equal(result, viewed(x))


def halves_swapped(m, x, f):
    a, b = f(x).chunk(2, 2)
    return torch.cat([b, a], 2), a + 1, b.transpose(1, 2) * 2


def halves_in_order(m, x, f):
    a, b = f(x).chunk(2, 1)
    return torch.cat([a, b], 1), torch.cat([b, a], 1), torch.cat([a, a.transpose(1, 2).mT], 1)


def written_over(m, x, f):
    """Sums that could be stored over what a view still shows."""
    y = f(x)
    view = y.view(*y.shape[:2], 4, 8).transpose(1, 2)
    z = (y + 1) * 2
    return z - y.relu() + view.transpose(1, 2).flatten(2), view.sum(-1)


def heads(m, x, f, g):
    """Windows and heads, to and fro, through a layer in between."""
    q, k, v = f(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    y = (q * 0.5 + k[..., :1].expand_as(q)).softmax(-1) @ v.mT @ v
    return g(y.transpose(1, 2).flatten(2)) + x, y[:, :, ::2], v


def rolled(m, x, f):
    y = f(x).view(x.shape[0], 6, 3, 4).roll(1, 1)
    return y[:, 1:, :, ::2].permute(2, 3, 0, 1).contiguous() + 1, y.unfold(1, 2, 1).squeeze()


# Each on tokens [N, 6, 24].
OF_RESULTS = {
    "halves swapped": (halves_swapped, nn.Linear(24, 32)),
    "halves in order": (halves_in_order, nn.Linear(24, 6)),
    "written over": (written_over, nn.Linear(24, 32)),
    "heads": (heads, nn.Linear(24, 48), nn.Linear(16, 24)),
    "rolled": (rolled, nn.Linear(24, 12)),
}


@pytest.mark.parametrize("name", OF_RESULTS)
@torch.no_grad()
def test_views_of_results(name):
    """Their strides are known when memory is planned; what shares it stays apart."""
    function, *layers = OF_RESULTS[name]
    model = Forward(function, *layers).eval()
    optimized = tb.optimize(model, torch.randn(2, 6, 24), tune=False)
    assert optimized.choice == "blocked"
    for batch in (2, 1, 3, 0):
        for _ in range(2):
            x = torch.randn(batch, 6, 24)
            results = optimized(x)
            for result, expected in zip(results, model(x), strict=True):
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
            for result, again in zip(results, optimized(x), strict=True):
                assert torch.equal(result, again)
