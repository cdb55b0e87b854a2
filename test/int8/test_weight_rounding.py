"""int8 weights rounded for what the inputs of a layer are."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import threads
from torch import nn

import torch_blocked
from torch_blocked import weight_rounding
from torch_blocked.weight_rounding import _rounded_part, _seen

pytestmark = pytest.mark.filterwarnings("ignore")

CONVOLUTIONS = [
    (F.conv1d, (6, 4, 3), {"padding": 1}),
    (F.conv2d, (6, 4, 3, 3), {"stride": 2, "padding": (1, 0)}),
    (F.conv2d, (6, 2, 1, 3), {"groups": 2, "dilation": (1, 2)}),
    (F.conv2d, (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    (F.conv2d, (6, 4, 2, 5), {"padding": "same", "dilation": 2}),
    (F.conv2d, (6, 4, 1, 1), {"padding": "valid", "stride": 3}),
    (F.conv3d, (6, 4, 2, 3, 1), {"padding": (1, 1, 0)}),
]


@pytest.mark.parametrize(("op", "shape", "geometry"), CONVOLUTIONS)
def test_what_weights_see(op, shape, geometry):
    """Weights times what they see are the convolution."""
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.double)
    x = torch.randn(3, 4, 11, *[8, 5][: len(shape) - 3], dtype=torch.double)
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **geometry}
    layer = SimpleNamespace(target=op, args=(x, weight, None, *given.values()))
    expected = op(x, weight, **given)
    groups = given["groups"]
    seen = _seen(x, layer, torch.Size(shape))
    result = (weight.reshape(groups, shape[0] // groups, -1) @ seen).reshape(shape[0], 3, -1)
    torch.testing.assert_close(result.transpose(0, 1).reshape(expected.shape), expected)


TRANSPOSED = [
    (F.conv_transpose1d, (4, 6, 3), {"padding": 1}),
    (F.conv_transpose2d, (4, 6, 4, 4), {"stride": 2, "padding": 1}),
    (F.conv_transpose2d, (4, 3, 3, 2), {"stride": (3, 1), "output_padding": (2, 0), "groups": 2}),
    (F.conv_transpose2d, (4, 6, 2, 3), {"padding": 2, "stride": 2, "dilation": 3}),
    (F.conv_transpose3d, (4, 6, 2, 3, 1), {"stride": 2, "padding": (1, 1, 0)}),
]


@pytest.mark.parametrize(("op", "shape", "geometry"), TRANSPOSED)
def test_what_transposed_weights_see(op, shape, geometry):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.double)
    x = torch.randn(3, 4, 6, *[8, 5][: len(shape) - 3], dtype=torch.double)
    given = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1, **geometry}
    layer = SimpleNamespace(target=op, args=(x, weight, None, *given.values()))
    expected = op(x, weight, **given)
    groups = given["groups"]
    seen = _seen(x, layer, torch.Size(shape))
    rows = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
    result = (rows @ seen).reshape(groups * shape[1], 3, -1)
    torch.testing.assert_close(result.transpose(0, 1).reshape(expected.shape), expected)


@pytest.mark.parametrize("inputs", [1, 20, 150])
def test_errors_are_taken_back_by_least_squares(inputs):
    """Each column leaves the others where they make the least error with those that are rounded."""
    torch.manual_seed(inputs)
    x = torch.randn(2, inputs, inputs, dtype=torch.double).cumsum(1)
    moments = x @ x.transpose(1, 2)
    rows = 40 * torch.randn(2, 7, inputs, dtype=torch.double)
    rounded = _rounded_part(rows, moments, -60, 60)
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)
    damped = moments + 0.01 * mean[:, None, None] * torch.eye(inputs, dtype=torch.double)
    left, expected = rows.clone(), torch.empty_like(rows)
    for i in range(inputs):
        expected[:, :, i] = left[:, :, i].round().clamp(-60, 60)
        apart = left[:, :, i] - expected[:, :, i]
        rest = damped[:, i + 1 :, i + 1 :]
        back = torch.linalg.solve(rest, damped[:, i + 1 :, i, None])  # [groups, rest, 1]
        left[:, :, i + 1 :] += apart[:, :, None] * back.transpose(1, 2)
    same = (rounded == expected).double().mean()  # a number close to a half may go either way
    assert same > 0.97 and (rounded - expected).abs().max() <= 2
    assert rounded.abs().max() <= 60 and torch.equal(rounded, rounded.round())


def layers():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16, padding=1),
        nn.ReLU(), nn.Conv2d(16, 24, 1), nn.Flatten(), nn.Linear(24 * 64, 10),
    ).eval()  # fmt: skip


def smooth(count):
    """Images whose neighbours are alike, as those of photos are."""
    return [F.interpolate(torch.randn(1, 3, 3, 3), (8, 8), mode="bicubic") for _ in range(count)]


def relative(model, other, inputs):
    off = torch.cat([other(x) - model(x) for x in inputs])
    return float(off.norm() / torch.cat([model(x) for x in inputs]).norm())


def with_weights_of(model, quantized):
    """The float model with the weights that the bytes stand for."""
    model, made = copy.deepcopy(model), quantized.state_dict()
    weighted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for i, module in enumerate(weighted):
        numbers, scale = made[f"_frozen_param{i}"], made[f"_scale_{i}"]
        module.weight.copy_(numbers * scale.view(-1, *[1] * (numbers.dim() - 1)))
    return model


@torch.no_grad()
def test_results_are_closer(monkeypatch):
    torch.manual_seed(3)
    model, calibration, others = layers(), smooth(32), smooth(40)
    rounded = torch_blocked.quantize(model, calibration)
    again = torch_blocked.quantize(model, calibration)
    monkeypatch.setattr(weight_rounding, "round_weights", lambda *_: None)
    nearest = torch_blocked.quantize(model, calibration)
    off, off_nearest = (
        relative(model, with_weights_of(model, each), others) for each in (rounded, nearest)
    )
    assert off < 0.7 * off_nearest
    for name, weight in nearest.state_dict().items():
        if weight.dtype != torch.int8:
            continue
        other = rounded.state_dict()[name]
        assert torch.equal(other, again.state_dict()[name])
        assert other.dtype == torch.int8 and int(other.abs().max()) <= 127
        assert not torch.equal(other, weight)
        assert int((other.int() - weight.int()).abs().max()) < 20


@torch.no_grad()
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_inputs_that_say_nothing(value):
    """All zeros, or no numbers: then weights are rounded to the nearest."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    layer = SimpleNamespace(target=F.linear, args=(None, None))
    seen = _seen(torch.full((1, 4, 6, 6), value), layer, model[0].weight.shape)
    rows = 30 * torch.randn(1, 8, 36, dtype=torch.double)
    rounded = _rounded_part(rows, (seen @ seen.transpose(1, 2)).double(), -127, 127)
    assert torch.equal(rounded, rows.round())


@torch.no_grad()
def test_weights_that_two_layers_share():
    """They are rounded once, for the inputs of both."""
    shared = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    inputs = [torch.randn(2, 8, 9, 9) for _ in range(4)]
    with threads(1):
        assert relative(model, torch_blocked.quantize(model, inputs), inputs) < 0.05
