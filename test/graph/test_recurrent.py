"""LSTM, GRU and RNN layers in optimized models, against float64: the products with their inputs as
linear layers, the steps in a kernel of ours."""

import pytest
import torch
from helpers.draws import crossed
from torch import nn

import torch_blocked as tb


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)


class All(nn.Module):
    """All results of a recurrent layer, flat."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *states):
        if not isinstance(self.layer, nn.LSTM):
            states = states[0] if states else None
        result, last = self.layer(x, states or None) if states == () else self.layer(x, states)
        return result, *(last if isinstance(last, tuple) else (last,))


def made(kind, *args, **options):
    layer = getattr(nn, kind)(*args, **options)
    with torch.no_grad():
        for each in layer.parameters():
            each.mul_(2)  # so that gates are neither open nor closed
    return All(layer).eval()


def ops_of(optimized):
    return [line.split("  ")[0] for line in optimized.plan().splitlines()[2:]]


def check(model, optimized, *args):
    exact = model.double()(*(each.double() for each in args))
    model.float()
    results = optimized(*args)
    for result, expected in zip(results, exact, strict=True):
        assert result.shape == expected.shape
        torch.testing.assert_close(result, expected.float(), rtol=2e-6, atol=2e-6)
    for result, again in zip(results, optimized(*args), strict=True):
        assert torch.equal(result, again)


def optimized_of(model, *args):
    optimized = tb.optimize(model, args, tune=False)
    assert optimized.choice == "blocked"
    rows = [line.split() for line in optimized.plan().splitlines()[2:]]
    steps = [row for row in rows if row[0].startswith(("aten::lstm", "aten::gru", "aten::rnn"))]
    assert steps and all("torch_blocked" in row for row in steps)
    return optimized


KINDS = ["LSTM", "GRU", "RNN"]
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "both directions": {"bidirectional": True, "batch_first": True},
    "layers": {"num_layers": 3, "dropout": 0.5},
    "all": {"num_layers": 2, "bidirectional": True, "bias": False},
}


SIZES = [(h, each) for h in (1, 3, 7, 8, 9, 15, 16, 17, 33) for each in ("plain", "all")]
SIZES += [(h, each) for h in (7, 24) for each in ("batch first", "both directions", "layers")]


@pytest.mark.parametrize(("sizes", "kind"), crossed(2, SIZES, KINDS))
@torch.no_grad()
def test_layers(sizes, kind):
    hidden, options = sizes
    model = made(kind, 5, hidden, **OPTIONS[options])
    for batch in (1, 8, 21):
        x = torch.randn(batch, 4, 5) if "first" in options else torch.randn(4, batch, 5)
        optimized = optimized_of(model, x)
        check(model, optimized, x)
        ops = ops_of(optimized)
        layers = OPTIONS[options].get("num_layers", 1)
        assert ops.count("aten::linear") == layers
        assert sum(op.startswith(("aten::lstm", "aten::gru", "aten::rnn")) for op in ops) == layers


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_states_that_are_given_and_other_sizes(kind):
    model = made(kind, 6, 10, num_layers=2, bidirectional=True, batch_first=True)

    def arguments(batch, steps):
        states = [torch.randn(4, batch, 10) for _ in range(2 if kind == "LSTM" else 1)]
        return torch.randn(batch, steps, 6), *states

    optimized = optimized_of(model, *arguments(2, 7))
    for batch, steps in ((2, 7), (2, 1), (1, 3), (40, 5)):
        check(model, optimized, *arguments(batch, steps))


@torch.no_grad()
def test_a_first_state_that_is_learned():
    """One for all sequences, expanded: its rows lie on each other."""

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(4, 9, batch_first=True)
            self.first = nn.Parameter(torch.randn(1, 1, 9))

        def forward(self, x):
            return self.layer(x, self.first.expand(-1, x.shape[0], -1))

    model = Learned().eval()
    optimized = optimized_of(model, torch.randn(3, 5, 4))
    for batch in (3, 1, 12):
        check(model, optimized, torch.randn(batch, 5, 4))


@torch.no_grad()
def test_relu_cells_and_sequences_without_a_batch():
    model = made("RNN", 4, 9, nonlinearity="relu")
    x = torch.randn(6, 4)
    optimized = optimized_of(model, x)
    check(model, optimized, x)
    x[2, 1] = torch.nan
    for result, expected in zip(optimized(x), model(x), strict=True):
        assert torch.equal(result.isnan(), expected.isnan()) and expected.isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_large_values_and_nan(kind):
    model, x = made(kind, 4, 9), 1e30 * torch.randn(5, 3, 4)
    optimized = tb.optimize(model, x / 1e30, tune=False)
    for result, expected in zip(optimized(x), model(x), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    x[1, 2] = torch.nan
    for result, expected in zip(optimized(x), model(x), strict=True):
        assert torch.equal(result.isnan(), expected.isnan())
        assert expected.isnan().any() and not expected.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2, 20])
@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits(kind, batch):
    """Of one sequence they share the products of each step, of many the sequences."""
    model, x = made(kind, 6, 70, batch_first=True), torch.randn(batch, 5, 6)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            results.append(optimized_of(model, x)(x))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@torch.no_grad()
def test_within_a_network_and_from_a_file(tmp_path):
    class Reads(nn.Module):
        """As those that read lines of text: columns of an image are steps."""

        def __init__(self):
            super().__init__()
            self.image = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3))
            self.columns = nn.LSTM(12, 16, bidirectional=True, batch_first=True)
            self.letters = nn.Linear(32, 7)

        def forward(self, x):
            columns = self.image(x).mean(2).transpose(1, 2)
            return self.letters(self.columns(columns)[0]).log_softmax(-1)

    model = Reads().eval()
    optimized = tb.optimize(model, torch.randn(2, 1, 16, 24), tune=False)
    for x in (torch.randn(2, 1, 16, 24), torch.randn(1, 1, 20, 40)):
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
    assert "aten::lstm" in ops_of(optimized)
    optimized.save(tmp_path / "model.pt")
    loaded = tb.load(tmp_path / "model.pt")
    assert torch.equal(loaded(x), optimized(x))
    optimized.release()
    assert torch.equal(loaded(x), optimized(x))


@pytest.mark.parametrize("case", ["projection", "weights", "empty", "float64"])
@torch.no_grad()
def test_what_the_kernel_does_not_take(case):
    """It runs through ATen, and the plan says why."""
    model, x = made("LSTM", 4, 9, proj_size=3 if case == "projection" else 0), torch.randn(5, 3, 4)
    if case == "weights":

        class Computed(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = made("GRU", 4, 9).layer

            def forward(self, x):
                weights = [each * (1 + 0 * x.mean()) for each in self.layer.parameters()]
                return torch.gru(
                    x, x.new_zeros(1, 3, 9), weights, True, 1, 0.0, False, False, False
                )

        model = Computed().eval()
    if case == "empty":
        x = x[:, :0]
    if case == "float64":
        model, x = model.double(), x.double()
    optimized = tb.optimize(model, x, tune=False)
    for result, expected in zip(optimized(x), model(x), strict=True):
        torch.testing.assert_close(result, expected)
    assert ("is empty" if case == "empty" else "its kernel takes") in optimized.plan()
