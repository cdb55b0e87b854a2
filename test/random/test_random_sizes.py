"""Quantized models at other batches and image sizes than those of their calibration."""

import pytest
import torch
from helpers.draws import draws
from random_sizes import run_seeds
from torch import nn

import torch_blocked as tb

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.any_isa,
]
MODELS = draws(5, 24)


def test_models():
    """test/random/random_sizes.py runs many more, of new seeds."""
    said = []
    counts, failed = run_seeds(range(1, 1 + MODELS), said.append)
    assert not failed, "\n".join(said)
    assert counts["near"] > 4 * MODELS and counts["refused"] > 0, counts


class Reads(nn.Module):
    """Nested arguments and a number."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, images, times=2, *more):
        y = self.conv(images["a"][0]) * times + images["a"][1]
        return {"sum": y.sum((1, 2, 3)) / y.shape[0], "image": sum(more, y)}


@torch.no_grad()
def test_arguments_are_those_of_calibration():
    def case(batch, size):
        image = torch.ones(batch, 3, size, size)
        return {"a": [image, torch.ones(size)]}, 3, torch.ones(batch, 8, size, size)

    model = Reads().eval()
    quantized = tb.quantize(model, [case(2, 8), case(1, 8)])
    fast = tb.optimize(quantized, case(2, 8), verify=False, tune=False)
    for sizes in ((1, 8), (3, 12)):
        images, times, more = case(*sizes)
        expected = model(images, times, more)
        for run in (quantized, fast):
            result = run(images, times, more)
            torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
            with pytest.raises(ValueError, match="for which times is 3"):
                run(images, 4, more)
            with pytest.raises(ValueError, match="arguments as those of calibration"):
                run({"a": [*images["a"], images["a"][1]]}, times, more)
            with pytest.raises((ValueError, TypeError)):
                run(images, times, more, more)


@torch.no_grad()
def test_calibration_of_sizes_that_no_graph_is_for():
    class OfOne(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x):
            return self.conv(x) * (2 if x.shape[0] == 1 else 3)

    model = OfOne().eval()
    with pytest.raises(ValueError, match=r"size.*0.* == 1, as in calibration, got \[2, 3, 8, 8\]"):
        tb.quantize(model, [torch.ones(1, 3, 8, 8), torch.ones(2, 3, 8, 8)])
    quantized = tb.quantize(model, [torch.ones(2, 3, 8, 8), torch.ones(4, 3, 8, 12)])
    assert quantized(torch.ones(3, 3, 9, 9)).shape == (3, 8, 9, 9)
    with pytest.raises(ValueError, match="quantize the model with inputs of these sizes"):
        quantized(torch.ones(1, 3, 8, 8))


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_a_branch_that_changes_nothing_leaves_the_batch_free(batch):
    """Models copy large batches, say, for the sake of speed."""

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x):
            return self.conv(x.contiguous() if x.shape[0] > 1 else x)

    model = Copies().eval()
    quantized = tb.quantize(model, [torch.ones(batch, 3, 8, 8)])
    for other in (1, 2, 5):
        x = torch.ones(other, 3, 8, 8)
        torch.testing.assert_close(quantized(x), model(x), rtol=0.05, atol=0.05)


@torch.no_grad()
def test_a_model_that_no_trace_takes():
    class Chooses(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match="expected a model that torch.export can trace, got Choo"):
        tb.quantize(Chooses().eval(), [torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        tb.quantize(nn.Linear(3, 4).eval(), [torch.ones(2, 5)])


@torch.no_grad()
def test_a_capture_of_bytes_holds_for_other_sizes(tmp_path):
    """What is asked only of small sizes leaves the others free, in a file, too."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Flatten(2)
    ).eval()
    quantized = tb.quantize(model, [torch.randn(1, 3, 32, 32)])
    fast = tb.optimize(quantized, torch.randn(1, 3, 32, 32), verify=False, tune=False)
    fast.choice = "blocked"
    fast.save(tmp_path / "model")
    again = tb.load(tmp_path / "model")
    for sizes in ((2, 3, 48, 40), (5, 3, 20, 64)):
        x = torch.randn(sizes)
        torch.testing.assert_close(again(x), quantized(x), rtol=0, atol=0.05)
    assert len(fast._forms) == 1


class PadsItself(nn.Module):
    """As TensorFlow pads: from each size, which it has four times."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, 2) for i in range(6))

    def forward(self, x):
        for layer in self.layers:
            pads = [max((-(-size // 2) - 1) * 2 + 3 - size, 0) for size in x.shape[2:]]
            (height, width), (top, left) = pads, [pad // 2 for pad in pads]
            x = layer(nn.functional.pad(x, (left, width - left, top, height - top))).relu()
        return x.mean((2, 3))


@torch.no_grad()
def test_sizes_that_are_long_formulas_stay_those_of_calibration():
    """The batch may change; tracing the image's size took minutes."""
    torch.manual_seed(0)
    model = PadsItself().eval()
    quantized = tb.quantize(model, [torch.randn(1, 3, 64, 64) for _ in range(2)])
    x = torch.randn(3, 3, 64, 64)
    assert quantized(x).shape == model(x).shape
    with pytest.raises(ValueError, match="x.size\\(2\\) == 64"):
        quantized(torch.randn(1, 3, 96, 96))
