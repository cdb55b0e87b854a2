"""compare: the values of plans in float32, bfloat16 and bytes beside the model in float64."""

import copy
import dataclasses
import json
import math
import sys

import pytest
import torch
from helpers.browser import laid_out, told_by
from helpers.nets import Op
from helpers.optimized import blocked, randomized
from torch import nn

import torch_blocked as tb
from torch_blocked import _C, exact

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NARROW = "bfloat16" if _C.multiplies_bfloats() else "float32"


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


class Tokens(nn.Module):
    """Layers on [N, H, W, C], which a plan has as images."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.linear(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


@pytest.fixture
def network():
    return randomized(
        nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.BatchNorm2d(24),
            nn.Hardswish(),
            Residual(24),
            nn.Sequential(nn.MaxPool2d(2), Residual(24)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 10),
        )
    )


def image(size=32):
    return torch.randn(2, 3, size, size)


def modules(found):
    return {row.module for row in found.rows}


def test_float32(network):
    x = image()
    fast = blocked(network, x)
    found = tb.compare(fast, network, x)
    assert {row.dtype for row in found.rows} == {"float32"}
    assert all(row.error < 1e-5 and row.worst < 1e-5 for row in found.rows)
    assert {"0", "3.conv", "4.1.conv", "5", "7"} <= modules(found)
    assert 0 < found.error < 1e-5
    keys = [(-row.added, -row.error) for row in found.rows]
    assert keys == sorted(keys)
    steps = fast.steps(x)
    assert all(row.op == steps[row.step].op.replace("aten::", "") for row in found.rows)
    [last] = [row for row in found.rows if row.module == "7"]
    with torch.no_grad():
        result = copy.deepcopy(network).double()(x.double())
    assert (last.least, last.most) == pytest.approx((float(result.min()), float(result.max())))
    assert last.error == pytest.approx(found.error)
    first, header, *lines = str(found).splitlines()
    assert first == f"error of the results: {found.error:.1e}"
    assert header.split()[:5] == ["module", "op", "dtype", "error", "added"]
    assert len(lines) == len(found.rows) and "conv2d + batch_norm" in lines[0]


@pytest.mark.usefixtures("in_bfloat16")
def test_bfloat16(network):
    x = image()
    found = tb.compare(blocked(network, x, dtype=torch.bfloat16), network, x)
    assert {row.dtype for row in found.rows} == {NARROW}
    if NARROW == "bfloat16":
        assert all(1e-4 < row.error < 3e-2 for row in found.rows)
        assert 1e-4 < found.error < 3e-2


@pytest.mark.usefixtures("in_bfloat16")
def test_the_layer_that_loses_most_is_first():
    """Large means leave few digits to what the norm keeps."""
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)
    ).eval()
    model[2].bias.data += 300
    x = torch.randn(16, 32)
    found = tb.compare(blocked(model, x, dtype=torch.bfloat16, verify=False), model, x)
    if NARROW == "bfloat16":
        assert found.rows[0].module == "3" and found.rows[0].added > 0.1
    assert all(row.added < 0.05 for row in found.rows[1:])
    in_float32 = tb.compare(blocked(model, x), model, x)
    assert all(row.error < 1e-3 for row in in_float32.rows)


@pytest.mark.parametrize("dims", [(2, 16, 12, 10), (1, 16, 16, 16)])
def test_tokens_that_are_an_image_in_the_plan(dims):
    model, x = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), Tokens(16)).eval(), torch.randn(dims)
    found = tb.compare(blocked(model, x), model, x)
    assert {"0", "1.norm", "1.linear"} <= modules(found)
    assert all(row.error < 1e-5 for row in found.rows)


def quantized(model, x):
    return tb.quantize(model, [torch.randn_like(x) for _ in range(4)])


def test_bytes(network):
    x = image()
    in_bytes = quantized(network, x)
    fast = blocked(in_bytes, x)
    found = tb.compare(fast, network, x)
    paths = {path for path, _ in network.named_modules()}
    assert modules(found) <= paths
    assert {"0", "3.conv", "4.1.conv", "7"} <= modules(found)
    layers = [row for row in found.rows if "conv2d" in row.op or "linear" in row.op]
    assert {row.dtype for row in layers} == {"int8"}
    assert all(1e-3 < row.error < 0.2 for row in layers)
    assert 1e-3 < found.error < 0.2
    # Beside the graph of bytes itself only float32's rounding is left.
    same = tb.compare(fast, in_bytes, x)
    assert modules(same) == modules(found) and same.error < 1e-2
    assert min(row.error for row in same.rows) < 1e-5


def test_layers_that_stay_in_float32_beside_bytes(network):
    x = image()
    kept = tb.quantize(network, [image() for _ in range(4)], keep=["3"])
    found = tb.compare(blocked(kept, x), network, x)
    types = {row.module: row.dtype for row in found.rows if "conv2d" in row.op}
    assert types == {"0": "int8", "3.conv": "float32", "4.1.conv": "int8"}


class Sized(nn.Module):
    """Asks for sizes, so its graph of bytes is traced again, without the modules' names."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.linear = nn.Linear(16, 8)

    def forward(self, x):
        x = self.conv(x)
        return self.linear(x.view(x.shape[0], 16, x.shape[2] * x.shape[3]).transpose(1, 2))


def test_bytes_of_a_model_that_asks_for_sizes():
    model, x = Sized().eval(), image()
    found = tb.compare(blocked(quantized(model, x), x), model, x)
    assert {"conv", "linear"} <= {row.module.partition(".")[0] for row in found.rows}
    assert all(row.error < 0.1 for row in found.rows)


def test_a_wrong_value_is_first(network, monkeypatch):
    x = image()
    fast = blocked(network, x)
    [node] = [each for each in fast._forms[0].captured.nodes if each.name == "aten::max_pool2d"]

    def wrong(captured, inputs, seen, **rounding):
        def told(value, exact):
            seen(value, exact * 1.5 if value == node.outputs[0] else exact)

        return exact.interpreted(captured, inputs, told, **rounding)

    monkeypatch.setattr(sys.modules["torch_blocked.compare"], "interpreted", wrong)
    first, *others = tb.compare(fast, network, x).rows
    assert (first.module, first.error) == ("4.0", pytest.approx(1 / 3, rel=1e-3))
    assert all(row.added < 1e-5 for row in others)


def test_infinities():
    def overflow(x):
        return torch.cumsum(torch.cumsum(x, 1) * 1e30, 1) * 1e30

    model, x = Op(overflow).eval(), torch.rand(2, 4) + 1
    found = tb.compare(blocked(model, x, verify=False), model, x)
    assert (found.error, found.rows[0].error, found.rows[0].added) == (math.inf,) * 3
    assert "infinite or NaN" in str(found).splitlines()[-1]

    def masked(x):
        return torch.cumsum(x, 1).masked_fill(x > 1, -math.inf).cummax(1).values

    found = tb.compare(blocked(Op(masked).eval(), x - 0.5), Op(masked).eval(), x - 0.5)
    assert any(row.least == -math.inf for row in found.rows)
    assert all(row.error < 1e-5 for row in found.rows)
    assert "infinite" not in str(found)


def test_inputs_of_any_kind_and_size(network):
    fast = blocked(network, image())
    for x in (image(48), image().to_blocked(), (image(),)):
        assert tb.compare(fast, network, x).error < 1e-5

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x, *, scale):
            return {"scaled": self.conv(x) * scale, "rank": x.dim(), "first": x.argmax(1)}

    model, x = Scaled().eval(), image()
    fast = blocked(model, x, example_kwargs={"scale": torch.ones(())})
    found = tb.compare(fast, model, x, example_kwargs={"scale": torch.tensor(3.0)})
    assert modules(found) >= {"conv"} and found.error < 1e-5


def test_a_loaded_module(network, tmp_path):
    x = image()
    blocked(network, x).save(tmp_path / "model.pt")
    found = tb.compare(tb.load(tmp_path / "model.pt"), network, x)
    assert len(found.rows) > 5 and all(row.error < 1e-5 for row in found.rows)


def test_the_rest_of_a_long_table(network):
    x = image()
    found = tb.compare(blocked(network, x), network, x)
    more = dataclasses.replace(found, rows=found.rows * 10)
    assert str(more).splitlines()[-1] == f"{len(more.rows) - 30} more steps add no more"


@pytest.mark.parametrize("in_bytes", [False, True])
def test_the_model_is_as_it_was(network, in_bytes):
    x = image()
    fast = blocked(quantized(network, x) if in_bytes else network, x)
    before, given, plan = copy.deepcopy(network.state_dict()), x.clone(), fast(x)
    random = torch.get_rng_state()
    tb.compare(fast, network, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given) and torch.equal(fast(x), plan)
    after = network.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert not network.training


def refused(kind, words, *args, **kwargs):
    with pytest.raises(kind, match=f"^torch_blocked::compare: expected {words}") as raised:
        tb.compare(*args, **kwargs)
    assert "\n" not in str(raised.value) and "; " in str(raised.value)


def test_what_is_refused(network):
    x = image()
    fast = blocked(network, x)
    refused(TypeError, "fast from optimize.., got Sequential; give compare", network, network, x)
    refused(TypeError, "a torch.nn.Module, got Tensor", fast, x, x)
    refused(TypeError, "the model that was optimized, got one that optim", fast, fast, x)
    refused(TypeError, "example_inputs as a tensor or a tuple", fast, network, [x])
    other = copy.deepcopy(network).train()
    refused(ValueError, "a model in evaluation mode, got training mode", fast, other, x)
    for choice in ("dense", "model"):
        fast.choice, fast.reason = choice, "faster"
        refused(ValueError, rf"a .* whose choice is '{choice}' \(faster\)", fast, network, x)
    fast.choice = "blocked"
    fast(x)
    fast.release()
    refused(ValueError, "a module with its dense weights, got one after release", fast, network, x)


def test_models_that_cannot_be_compared():
    x = torch.rand(2, 8)
    in_parts = Op(lambda x: x + 1 if float(x.sum()) > 0 else x - 1).eval()
    fast = tb.optimize(in_parts, x, tune=False)
    refused(ValueError, r"a model that is captured whole, got one that runs in", fast, in_parts, x)
    random = Op(lambda x: x + torch.rand_like(x)).eval()
    fast = blocked(random, x)
    refused(NotImplementedError, "a model that gives the same results", fast, random, x)
    bits = Op(lambda x: x.view(torch.int32) + 1).eval()
    fast = blocked(bits, x)
    refused(NotImplementedError, "a model whose ops run in float64", fast, bits, x)


def test_inputs_that_the_model_refuses(network):
    x = image()
    wrong = torch.randn(2, 5, 32, 32)
    with pytest.raises(RuntimeError) as own, torch.no_grad():
        network(wrong)
    other = copy.deepcopy(network)
    for model in (network, other):
        with pytest.raises(RuntimeError) as raised:
            tb.compare(blocked(network, x), model, wrong)
        assert str(raised.value) == str(own.value)


def test_changed_weights(network):
    x = image()
    fast = blocked(network, x)
    with torch.no_grad():
        network[0].weight.mul_(2)
    with pytest.raises(ValueError, match="weights"):
        tb.compare(fast, network, x)


def test_explain_has_the_errors(network):
    x = image()
    fast = blocked(network, x)
    found = tb.explain(fast, x, errors=True)
    rows = {row.step: row for row in tb.compare(fast, network, x).rows}
    for i, layer in enumerate(found.layers):
        told = (rows[i].error, rows[i].added) if i in rows else (None, None)
        assert (layer.error, layer.added) == told
    header = found.optimized.table().splitlines()[1]
    assert header.split() == "module op dims format blocked by ms error added next best why".split()
    assert "error" not in found.eager.table().splitlines()[1]
    assert all("error" in each for each in json.loads(found.to_json())["runs"]["eager"]["layers"])
    assert all(layer.error is None for layer in tb.explain(fast, x).layers)
    with pytest.raises(TypeError, match="explain: expected errors as True or False"):
        tb.explain(fast, x, errors="no")


def test_the_page_has_the_errors(network, tmp_path):
    x, page = image(), tmp_path / "page.html"
    tb.explain(blocked(network, x), x, errors=True).to_html(page)
    told = laid_out(page)
    assert told["overlaps"] == told["outside"] == []
    cells = "[...document.querySelectorAll('th, td')].map(each => each.textContent)"
    shown = told_by(page, f"tell({cells})")
    assert shown[5:10] == ["ms", "error", "added", "next best", "why"]
    assert any(each.endswith("e-7") for each in shown)
    assert "error" not in told_by(page, f"tell({cells})", which="eager")
