"""LSTM, GRU and RNN layers with weights of bytes: what quantize() makes of them, against the
quantized graph run op by op."""

import pytest
import torch
from helpers.draws import crossed
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")

OPTIONS = {
    "plain": {},
    "layers": {"num_layers": 3},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without biases": {"bidirectional": True, "bias": False},
}
STEPS = ("aten::lstm", "aten::gru", "aten::rnn")


class Network(nn.Module):
    """A linear layer, a recurrent one, and a linear one on its result and its last state."""

    def __init__(self, kind, hidden, options):
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.recurrent = getattr(nn, kind)(20, hidden, **options)
        self.last = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), 8)

    def forward(self, x):
        result, state = self.recurrent(torch.relu(self.first(x)))
        return self.last(result), *(state if isinstance(state, tuple) else (state,))


def distance(a, b):
    return float((a - b).double().norm() / b.double().norm())


def check_like_graph(quantized, x):
    """The optimized model gives what the graph gives, and the same bits again."""
    fast = tb.optimize(quantized, x, tune=False)
    assert fast.choice == "blocked"
    results, again = fast(x), fast(x)
    for result, expected, other in zip(results, quantized(x), again, strict=True):
        assert result.shape == expected.shape
        assert distance(result, expected) < 5e-3  # some bytes may go the other way
        assert torch.equal(result, other)
    return fast


def implementations(fast, *names):
    return [step.implementation for step in fast.steps() if step.op.startswith(names)]


HIDDEN = (4, 7, 8, 16, 33)


@pytest.mark.parametrize(
    ("hidden", "kind", "options", "batch"),
    crossed(12, HIDDEN, ("LSTM", "GRU", "RNN"), OPTIONS, (1, 3, 8, 9)),
)
@torch.no_grad()
def test_what_quantize_makes(hidden, kind, options, batch):
    torch.manual_seed(0)
    model = Network(kind, hidden, OPTIONS[options]).eval()
    of_steps = torch.randn(5, batch, 12)
    x = of_steps.transpose(0, 1).contiguous() if "all" in options else of_steps
    quantized = tb.quantize(model, [x, x.flip(0)])
    fast = check_like_graph(quantized, x)
    for result, expected in zip(fast(x), model(x), strict=True):
        assert distance(result, expected) < 0.1
    assert set(implementations(fast, *STEPS)) == {"torch_blocked"}, fast.plan()
    layers = OPTIONS[options].get("num_layers", 1)
    of_bytes = implementations(fast, "aten::linear").count("dots")
    whole = hidden % 4 == 0  # the kernels of bytes take fours of inputs
    assert of_bytes == (2 + layers if whole else 2), fast.plan()


@torch.no_grad()
def test_inputs_of_the_model_stay_numbers():
    """Spectra span decades: bytes for them, and for the weights that meet them, lose all."""
    torch.manual_seed(0)
    model = nn.LSTM(40, 64, num_layers=2).eval()
    scales = torch.logspace(2, -4, 40)
    model.weight_ih_l0.mul_(1 / scales)
    data = [torch.rand(9, 2, 40) * scales for _ in range(4)]
    quantized = tb.quantize(model, data)
    for result, expected in zip(quantized(data[0])[1], model(data[0])[1], strict=True):
        assert distance(result, expected) < 0.05
    fast = tb.optimize(quantized, data[0], tune=False)
    assert implementations(fast, "aten::linear").count("dots") == 1, fast.plan()


@torch.no_grad()
def test_other_batches_and_lengths():
    torch.manual_seed(0)
    model = Network("GRU", 16, OPTIONS["all"]).eval()
    quantized = tb.quantize(model, [torch.randn(2, 6, 12)])
    fast = tb.optimize(quantized, torch.randn(2, 6, 12), tune=False)
    for batch, length in ((1, 3), (3, 9), (12, 6)):
        x = torch.randn(batch, length, 12)
        for result, expected in zip(fast(x), quantized(x), strict=True):
            assert distance(result, expected) < 5e-3


@torch.no_grad()
def test_report_keep_and_target():
    torch.manual_seed(0)
    model, said = Network("LSTM", 16, OPTIONS["layers"]).eval(), []
    data = [torch.randn(6, 2, 12) for _ in range(3)]
    tb.quantize(model, data, report=said.append)
    rows = [each for each in said[0].layers if each.path == "recurrent"]
    assert len(rows) == 3 and all(0 < each.own < 0.1 for each in rows)
    kept = tb.quantize(model, data, keep=["recurrent"])
    quantized_weights = [
        node.args[0].target
        for node in kept.graph.nodes
        if "dequantize_per_channel" in str(node.target)
    ]
    assert len(quantized_weights) == 2
    exact = tb.quantize(model, data, target=1e-6)
    assert sorted(exact.meta["kept"]) == ["first", "last", "recurrent"]
    assert max(distance(a, b) for a, b in zip(exact(data[0]), model(data[0]), strict=True)) < 1e-6


class OneDirectionOfBytes(nn.Module):
    """As another quantizer may leave it: the weights of one direction are bytes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8, bidirectional=True)
        for name in ("weight_ih_l0", "weight_hh_l0"):
            weight = getattr(self.layer, name).detach()
            scales = weight.abs().amax(1) / 127
            self.register_buffer(name, (weight / scales[:, None]).round().to(torch.int8))
            self.register_buffer(name + "_scales", scales)
        self.register_buffer("zeros", torch.zeros(24, dtype=torch.int64))

    def forward(self, x):
        def numbers(name):
            scales = getattr(self, name + "_scales")
            return torch.ops.quantized_decomposed.dequantize_per_channel(
                getattr(self, name), scales, self.zeros, 0, -127, 127, torch.int8
            )

        weights = list(self.layer._flat_weights)
        weights[:2] = numbers("weight_ih_l0"), numbers("weight_hh_l0")
        states = torch.zeros(2, x.shape[1], 8)
        return torch._VF.gru(x, states, weights, True, 1, 0.0, False, True, False)


@pytest.mark.parametrize("batch", [2, 12])
@torch.no_grad()
def test_one_direction_of_bytes(batch):
    import torchao.quantization.pt2e  # noqa: F401  registers the ops

    torch.manual_seed(0)
    model, x = OneDirectionOfBytes().eval(), torch.randn(5, batch, 8)
    fast = tb.optimize(model, x, tune=False)
    assert set(implementations(fast, *STEPS)) == {"torch_blocked"}, fast.plan()
    for result, expected in zip(fast(x), model(x), strict=True):
        torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-6)
