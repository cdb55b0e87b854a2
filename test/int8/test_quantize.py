"""`quantize` and PyTorch's own flow to bytes, and what both become."""

import pytest
import torch
import torch.nn.functional as F
from helpers.optimized import blocked
from torch import nn

import torch_blocked as tb
from torch_blocked import bias_correction

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.Hardswish(),
        nn.Conv2d(24, 24, 5, padding=2, groups=24),
        nn.ReLU6(),
        nn.MaxPool2d(2),
        Residual(24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    ).eval()


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return F.relu(x + self.conv(x))


def by_x86(model, calibration):
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (calibration[0],)).module(), quantizer)
    for each in calibration:
        prepared(each)
    return convert_pt2e(prepared)


@pytest.mark.parametrize("quantize", [tb.quantize, by_x86])
@torch.no_grad()
def test_the_flow_of_pytorch(network, quantize):
    calibration = [torch.randn(1, 3, 32, 32) for _ in range(4)]
    quantized = quantize(network, calibration)
    fast = tb.optimize(quantized, calibration[0])
    assert fast.choice != "model"
    fast.choice = "blocked"
    for x in calibration:
        torch.testing.assert_close(fast(x), quantized(x), rtol=0, atol=0.02)
        torch.testing.assert_close(fast(x), network(x), rtol=0, atol=0.1)
    done = [step.implementation for step in fast.steps()]
    assert done.count("dots") >= 2 and "maximum" in done, fast.plan()


@torch.no_grad()
def test_quantize_keeps_modules_and_batches(network):
    calibration = [torch.randn(2, 3, 32, 32), (torch.randn(2, 3, 32, 32),)]
    quantized = tb.quantize(network, calibration, keep=["0", "6.conv"])
    ops = [str(node.target) for node in quantized.graph.nodes]
    assert sum("dequantize_per_channel" in op for op in ops) == 2  # the depthwise, and the last
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(tb.optimize(quantized, x)(x), quantized(x), rtol=0, atol=0.02)


class Named(nn.Module):
    """Arguments that callers give by name, of which most stay away."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x=None, scale=None, more=None, unused=None):
        y = self.conv(x)
        y = y if scale is None else y * scale
        return y if more is None else y + more


@pytest.mark.parametrize("names", (("x",), ("x", "more")))
def test_inputs_by_name(names):
    torch.manual_seed(0)
    model = Named().eval()
    calls = [{"x": torch.randn(2, 3, 9, 9), "more": torch.randn(2, 8, 7, 7)} for _ in range(4)]
    calls = [{name: each[name] for name in names} for each in calls]
    quantized = tb.quantize(model, calls)
    fast = tb.optimize(quantized, (), example_kwargs=calls[0], tune=False, verify=False)
    with torch.no_grad():
        expected = quantized(**calls[1])
        assert (expected - model(**calls[1])).abs().max() < 0.1
        torch.testing.assert_close(fast(**calls[1]), expected, rtol=1e-3, atol=1e-3)
    assert any(step.implementation == "dots" for step in fast.steps(**calls[0]))


def test_quantize_says_what_is_wrong(network):
    with pytest.raises(ValueError, match="expected calibration inputs, got none"):
        tb.quantize(network, [])
    with pytest.raises(ValueError, match="evaluation mode"):
        tb.quantize(nn.Sequential(nn.Conv2d(3, 3, 1)), [torch.randn(1, 3, 4, 4)])
    script = torch.jit.trace(network, torch.randn(1, 3, 32, 32))
    with pytest.raises(TypeError, match="got a ScriptModule; quantize the model that was compiled"):
        tb.quantize(script, [torch.randn(1, 3, 32, 32)])


class Gated(nn.Module):
    """What TorchBlockedQuantizer keeps in bytes."""

    def __init__(self, channels=24):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 4, padding="same")
        self.norm = nn.BatchNorm2d(channels)
        self.down, self.up = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)
        self.left = nn.Conv2d(channels, channels, (1, 3), padding="same", groups=channels)
        self.last = nn.Linear(channels, 10)

    def forward(self, x):
        x = F.silu(self.norm(self.first(x)))
        x = x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))
        x = F.relu(F.avg_pool2d(self.left(x), 3, 1, 1) + F.hardswish(F.max_pool2d(x, 3, 1, 1)))
        return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1))


@torch.no_grad()
def test_models_stay_in_bytes():
    torch.manual_seed(0)
    model = Gated().eval()
    model.norm.running_mean.normal_()
    calibration = [torch.randn(1, 3, 20, 20) for _ in range(4)]
    quantized = tb.quantize(model, calibration)
    fast = blocked(quantized, calibration[0], verify=False)
    torch.testing.assert_close(fast(calibration[0]), quantized(calibration[0]), rtol=0, atol=5e-3)
    torch.testing.assert_close(quantized(calibration[0]), model(calibration[0]), rtol=0, atol=0.05)
    steps = fast.steps()
    assert sum("quantize" in step.op for step in steps) == 1, fast.plan()  # of the input
    assert {"sums", "table", "maximum", "dots"} <= {step.implementation for step in steps}


@torch.no_grad()
def test_quantize_reports_what_layers_lose(network):
    calibration = [torch.randn(2, 3, 32, 32) for _ in range(3)]
    with torch.no_grad():  # one channel of a thousand times the others: eight bits are few
        coarse = nn.Sequential(network[0], nn.Conv2d(24, 24, 1), *network[1:]).eval()
        coarse[1].weight[:, 0] *= 3000
        coarse[1].weight /= 30
    reports = []
    quantized = tb.quantize(coarse, calibration, report=reports.append)
    (report,) = reports
    assert report.cases == 3 and 0 <= report.agreement <= 1
    expected, result = (torch.cat([m(x) for x in calibration]) for m in (coarse, quantized))
    assert report.error == pytest.approx(float((result - expected).norm() / expected.norm()), 1e-3)
    assert report.agreement == (result.argmax(1) == expected.argmax(1)).float().mean()
    own = {each.path: each.own for each in report.layers}
    assert list(own.values()) == sorted(own.values(), reverse=True)
    assert set(own) == {"0", "1", "4", "7.conv", "10"}
    first = next(each for each in report.layers if each.path == "0")
    assert first.own == first.in_all > 0  # nothing before it
    assert "own error" in str(report) and "7.conv" in str(report)
    kept = []
    tb.quantize(coarse, calibration, keep=list(own), report=kept.append)
    assert kept[0].error < 1e-6 and kept[0].agreement == 1


def test_reports_are_of_layers_before_ops_in_place():
    """An activation that writes over the result of its layer changes nothing of the report."""
    convolution, calibration = nn.Conv2d(3, 8, 3).eval(), [torch.randn(1, 3, 8, 8)]
    reports = []
    for in_place in (False, True):
        model = nn.Sequential(convolution, nn.Hardtanh(0, 0.1, inplace=in_place), nn.ReLU()).eval()
        tb.quantize(model, calibration, report=reports.append)
    first, second = (report.layers[0] for report in reports)
    assert 0 < first.own < 0.1
    assert first == second


def test_quantize_keep_says_what_is_no_module(network):
    with pytest.raises(ValueError, match="expected keep as paths of modules of the model, got"):
        tb.quantize(network, [torch.randn(1, 3, 32, 32)], keep=["0", "6.con"])


def test_biases_are_corrected(monkeypatch):
    """Means of channels are nearer to the float model's, and its parameters stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    cases = [torch.randn(2 + i, 8, 9, 9) + 0.7 for i in range(3)]
    before = {name: value.clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def apart():
        quantized = tb.quantize(model, cases)
        means = [(quantized(case) - model(case)).mean((0, 2, 3)) for case in cases]
        return float(torch.stack(means).mean(0).abs().max())

    corrected = apart()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    monkeypatch.setattr(bias_correction, "correct", lambda *_: None)
    assert corrected < apart() / 2


def test_layers_of_a_quantized_model_have_their_paths():
    """In the plan, in explain, and where the model is a part of another."""
    inner = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), inner, nn.Conv2d(32, 8, 1))
    x = torch.randn(1, 16, 20, 20)
    quantized = tb.quantize(model.eval(), [x])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = quantized
            self.training = False

        def forward(self, x):
            return self.part(x)

    for around, prefix in ((quantized, ""), (Outer(), "part.")):
        fast = tb.optimize(around, x, tune=False)
        for found in (fast.steps(), tb.explain(fast).optimized.layers):
            paths = [each.module for each in found if "conv2d" in each.op]
            assert paths == [prefix + path for path in ("0", "2.0", "3")]
