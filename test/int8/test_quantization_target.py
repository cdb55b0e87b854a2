"""quantize() with a target keeps in floating point what the accuracy needs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.optimized import blocked
from torch import nn
from torchao.quantization.pt2e import HistogramObserver

import torch_blocked as tb
from torch_blocked.calibration import Calibration
from torch_blocked.layer_effects import multiply_adds, squared_effects
from torch_blocked.quantizer import TorchBlockedQuantizer

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def network():
    """The layer "2" reads a channel that is a thousand times the others, and nearly ignores it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    ).eval()  # fmt: skip
    with torch.no_grad():
        model[0].weight[0] *= 1000
        model[0].bias[0] *= 1000
        model[2].weight[:, 0] /= 1000
    return model


@pytest.fixture(scope="module")
def calibration():
    return [torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@torch.no_grad()
def relative(quantized, model, inputs):
    apart, expected = (torch.cat([f(x) for x in inputs]) for f in (quantized, model))
    return float((apart - expected).norm() / expected.norm())


def kept(quantized):
    return quantized.meta["kept"]


@torch.no_grad()
def test_one_layer_is_enough(network, calibration):
    reports = []
    quantized = tb.quantize(network, calibration, target=0.02, report=reports.append)
    error = relative(quantized, network, calibration)
    plain = tb.quantize(network, calibration)
    assert kept(quantized) == ("2",) and kept(plain) == ()
    assert error < 0.005 < 0.03 < relative(plain, network, calibration)
    (report,) = reports
    assert report.error == pytest.approx(error, 1e-3)
    tries = report.tries
    assert [(len(each.kept), each.holds) for each in tries] == [(0, False), (1, True), (2, True)]
    assert tries[1].kept == ("2",) and tries[1].error == pytest.approx(error, 1e-3)
    work = [3 * 8 * 9 * 144, 8 * 8 * 9 * 144, 8 * 8 * 9 * 36, 8 * 10]
    share = pytest.approx(1 - work[1] / sum(work))
    assert [each.on_bytes for each in tries[:2]] == [1, share]


class Tied(nn.Module):
    """Two layers round the same weights for what both of them read."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, dilation=2)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(3 * self.one(x).tanh())


class Joined(nn.Module):
    """Two results share a range, unless one of them is no bytes."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.last = nn.Conv2d(6, 3, 1)
        self.one.weight.data *= 20

    def forward(self, x):
        return self.last(torch.cat([self.one(x), self.other(x)], 1))


def exported(model, cases):
    module = torch.export.export(model, (cases[0],)).module(check_guards=False)
    return Calibration(module, [(x,) for x in cases], lambda node: node.name in names(module))


def names(module):
    nodes = module.graph.nodes
    return [n.name for n in nodes if any(op in str(n.target) for op in (".conv", ".linear"))]


def same(one, other):
    states = one.state_dict(), other.state_dict()
    return one.code == other.code and all(
        torch.equal(each, states[1][name]) for name, each in states[0].items()
    )


def test_the_result_is_that_of_keep(network, calibration):
    chosen = tb.quantize(network, calibration, target=0.02)
    assert same(chosen, tb.quantize(network, calibration, keep=kept(chosen)))


@pytest.mark.parametrize(
    ("model", "path"), [(None, "2"), (Tied().eval(), "one"), (Joined().eval(), "one")]
)
def test_a_second_conversion_is_as_good_as_a_first(network, calibration, model, path):
    """Although it takes ranges, weights and biases from the first, where they do not differ."""
    first, fresh = (exported(model or network, calibration) for _ in range(2))
    before = first.converted(TorchBlockedQuantizer())
    again = [each.converted(TorchBlockedQuantizer([path])) for each in (first, fresh)]
    assert same(*again) and not same(before, again[0])
    assert same(before, first.converted(TorchBlockedQuantizer()))


def test_tries_do_not_calibrate_again(network, calibration, monkeypatch):
    """Except for values that only they observe: here, the first pooling alone."""
    observe, seen, after = HistogramObserver.forward, [], []
    monkeypatch.setattr(
        HistogramObserver, "forward", lambda self, x: [seen.append(x), observe(self, x)][1]
    )

    def holds(graph):
        after.append(len(seen))
        return "2" in kept(graph) and len(after) > 1

    tb.quantize(network, calibration, target=holds)
    assert after == [21, 24, 24]


def test_a_function_may_judge(network, calibration):
    asked = []

    def holds(graph):
        with pytest.raises(ValueError, match="tensor of 4 dims"):
            graph(torch.randn(3, 8))
        asked.append(kept(graph))
        return np.bool_(relative(graph, network, calibration) < 0.02)

    assert kept(tb.quantize(network, calibration, target=holds)) == ("2",)
    assert len(asked) == 3 and asked[0] == () and asked[2] == ("2",)


@torch.no_grad()
def test_other_sizes_run_in_optimized_form(network, calibration):
    quantized = tb.quantize(network, calibration, target=0.02)
    fast = blocked(quantized, calibration[0], verify=False)
    done = [step.implementation for step in fast.steps()]
    assert sum(name in ("dots", "winograd_words") for name in done) == 3, fast.plan()
    for x in (calibration[0], torch.randn(5, 3, 12, 12), torch.randn(1, 3, 20, 9)):
        torch.testing.assert_close(fast(x), quantized(x), rtol=0, atol=0.02)
    again = torch.export.export(quantized, (calibration[0],)).module()
    assert torch.equal(again(calibration[0]), quantized(calibration[0]))


def test_a_target_may_hold_at_once(network, calibration):
    assert kept(tb.quantize(network, calibration, target=0.9)) == ()
    assert kept(tb.quantize(network, calibration, target=0.9, keep=["4"])) == ("4",)
    assert kept(tb.quantize(network, calibration, target=0.02, keep=["4"])) == ("4", "2")


def test_without_layers_on_bytes_there_is_no_error(network, calibration):
    quantized = tb.quantize(network, calibration, target=1e-7)
    assert sorted(kept(quantized)) == ["0", "2", "4", "8"]
    assert not any("quantize" in str(node.target) for node in quantized.graph.nodes)


def test_targets_out_of_reach(network, calibration):
    tries = []
    with pytest.raises(
        ValueError, match="expected a target that holds with all layers in floating"
    ):
        tb.quantize(network, calibration, target=lambda graph: bool(tries.append(kept(graph))))
    assert [len(each) for each in tries] == [0, 2, 3, 4]
    with pytest.raises(
        TypeError, match="return True or False, got float; compare what it measures"
    ):
        tb.quantize(network, calibration, target=lambda _: 0.76)
    classes = nn.Sequential(network, Op(lambda x: x.argmax(1)))
    with pytest.raises(ValueError, match="expected results in floating point for a target that is"):
        tb.quantize(classes.eval(), calibration, target=0.5)


class Op(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return self.op(x)


class Shared(nn.Module):
    """Calls one module twice, and has layers without a module."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))

    def forward(self, x):
        return self.once(torch.conv2d(self.twice(self.twice(x)), self.weight))


def on_bytes(quantized):
    return sum("dequantize_per_channel" in str(node.target) for node in quantized.graph.nodes)


def test_all_calls_of_a_module_are_one_layer(calibration):
    model = Shared().eval()
    assert on_bytes(tb.quantize(model, calibration)) == 4
    assert on_bytes(tb.quantize(model, calibration, keep=["twice"])) == 2
    graphs = []

    def holds(graph):
        graphs.append(graph)
        return "twice" in kept(graph)

    found = kept(tb.quantize(model, calibration, target=holds))
    assert found[-1] == "twice" and set(found) <= {"twice", "once", ""}
    for graph in graphs:
        assert on_bytes(graph) == 4 - sum(1 + (path == "twice") for path in kept(graph))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        return self.left(F.max_pool2d(x, 2)), self.right(F.silu(x))


@pytest.mark.parametrize(("keep", "rounded"), [([], 4), (["left"], 4), (["left", "right"], 1)])
def test_what_only_kept_layers_read_is_not_rounded(calibration, keep, rounded):
    quantized = tb.quantize(Branches().eval(), calibration, keep=keep)
    names = [str(node.target) for node in quantized.graph.nodes]
    assert sum(".quantize_per_tensor" in name for name in names) == rounded, quantized.code


def test_tries_are_a_table(network, calibration):
    reports = []
    tb.quantize(network, calibration, target=0.02, report=reports.append)
    head, *rows = str(reports[0]).split("\n\n")[1].splitlines()
    assert head.split() == "kept error on bytes holds seconds in floating point, too".split()
    cells = [row.split() for row in rows]
    assert [[*row[:1], *row[2:4], *row[5:]] for row in cells] == [
        ["0", "100.0%", "no"],
        ["1", "38.5%", "yes", "2"],
        ["2", "38.4%", "yes", "8"],
    ]
    tb.quantize(network, calibration, report=reports.append)
    assert "\n\n" not in str(reports[1])


def test_effects_are_those_of_each_layer_alone(network, calibration):
    """Results of one number need no random signs, so only what the activations bend is off."""
    model = nn.Sequential(*network[:8], nn.Linear(8, 1)).eval()
    calibrated = exported(model, calibration)
    plain = calibrated.converted(TorchBlockedQuantizer())
    layers, paths = names(calibrated.in_float), ["0", "2", "4", "8"]
    effects = squared_effects(calibrated.in_float, plain, calibrated.cases, layers)
    alone = [
        calibrated.converted(TorchBlockedQuantizer([path for path in paths if path != each]))
        for each in paths
    ]
    expected = torch.tensor([relative(graph, model, calibration) ** 2 for graph in alone])
    found = torch.tensor([effects[layer] for layer in layers])
    torch.testing.assert_close(found / found.sum(), expected / expected.sum(), rtol=0.2, atol=1e-4)


def test_effects_without_gradients_are_own_errors(network, calibration):
    model, reports = nn.Sequential(network, Op(torch.round)).eval(), []
    tb.quantize(model, calibration, report=reports.append)
    calibrated = exported(model, calibration)
    plain = calibrated.converted(TorchBlockedQuantizer())
    layers = names(calibrated.in_float)
    effects = squared_effects(calibrated.in_float, plain, calibrated.cases, layers)
    own = [each.own**2 for each in reports[0].layers]
    assert sorted(effects.values(), reverse=True) == pytest.approx(own, rel=1e-3)


def test_work_is_multiply_adds():
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2),
        nn.Linear(5, 7),
    ).eval()  # fmt: skip
    calibrated = exported(model, [torch.randn(2, 4, 7, 5)])
    work = multiply_adds(calibrated.in_float, calibrated.cases[0], names(calibrated.in_float))
    assert [*work.values()] == [2 * 6 * 3 * 2 * 2 * 9, 2 * 6 * 3 * 2 * 2 * 9, 2 * 4 * 7 * 5 * 7]
