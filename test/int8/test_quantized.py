"""Torch's own quantized tensors: in a forward ATen computes on them, and nothing blocks them."""

import io

import pytest
import torch
from helpers.nets import Op
from torch import nn
from torch.ao.nn import quantized as nnq

import torch_blocked
from torch_blocked.optimize import _verify
from torch_blocked.verify import nudged

pytestmark = pytest.mark.any_isa

SCALE, ZERO = 0.05, 3


def per_tensor(x, dtype=torch.qint8):
    return torch.quantize_per_tensor(x, SCALE, ZERO, dtype)


def per_channel(x):
    scales = torch.full(x.shape[1:2], SCALE)
    zeros = torch.zeros(x.shape[1:2], dtype=torch.long)
    return torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8)


THROUGH = {
    "per tensor": lambda x: per_tensor(x).dequantize(),
    "unsigned": lambda x: per_tensor(x, torch.quint8).dequantize(),
    "32 bits": lambda x: per_tensor(x, torch.qint32).dequantize(),
    "scale as a tensor": lambda x: torch.quantize_per_tensor(
        x, torch.tensor(SCALE), torch.tensor(ZERO), torch.qint8
    ).dequantize(),
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize(),
    "per channel": lambda x: per_channel(x).dequantize(),
    "relu": lambda x: torch.relu(per_tensor(x)).dequantize(),
    "pooled": lambda x: nn.functional.max_pool2d(per_tensor(x), 2).dequantize(),
    "integers": lambda x: (per_tensor(x).int_repr().float() - ZERO) * SCALE,
}


def by_its_scale(x):
    """Asks for a number, so that no single graph says what it computes."""
    return per_tensor(x).int_repr().float() * per_tensor(x).q_scale()


def image(n=2, size=12):
    return torch.randn(n, 16, size, size)


def model_of(function):
    """What is quantized is the input, which is the same in all forms of the model."""
    return nn.Sequential(Op(function), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU()).eval()


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", THROUGH)
def test_a_forward_may_quantize(name, recwarn):
    model, x = model_of(THROUGH[name]), image()
    with torch.no_grad():
        fast = torch_blocked.optimize(model, x, tune=False)
        assert not recwarn
        assert "quantize_per" in fast.plan() and "conv2d" in fast.plan()
        for each in (x, image(3), image(2, 18)):
            close(fast(each), model(each))
        close(model(x.to_blocked()).to_dense(), model(x))
        close(torch.compile(model, backend="torch_blocked")(x), model(x))


def test_a_forward_may_ask_for_the_scale():
    model, x = model_of(by_its_scale), image()
    with torch.no_grad():
        fast = torch_blocked.optimize(model, x, tune=False)
        close(fast(x), model(x))
    assert "because" in fast.plan()


def test_a_quantized_result():
    x = image()
    model = Op(per_tensor).eval()
    fast = torch_blocked.optimize(model, x, tune=False)
    file = io.BytesIO()
    fast.save(file)
    file.seek(0)
    for each in (fast, torch_blocked.load(file)):
        result = each(x)
        assert result.dtype == torch.qint8 and result.q_scale() == SCALE
        assert torch.equal(result.int_repr(), model(x).int_repr())


@pytest.mark.parametrize(("function", "rounds"), [(THROUGH["relu"], True), (torch.relu, False)])
def test_a_step_is_no_defect_in_a_model_that_rounds(function, rounds, monkeypatch):
    """A value that lies between two steps may go the other way in the optimized model."""
    x = image()
    off = SCALE * (torch.arange(x.numel()).view(x.shape) == 0)
    fast = torch_blocked.optimize(Op(function).eval(), x, tune=False, verify=False)
    monkeypatch.setattr(fast, "_model", Op(lambda x: function(x) + off))
    if not rounds:
        with pytest.warns(UserWarning, match="differed from the model"):
            _verify(fast)
    else:
        _verify(fast)
    assert fast.choice == ("blocked" if rounds else "model")


def chaotic(x):
    """What a nudge of x changes beyond recognition."""
    return per_tensor(torch.sin(1e6 * x)).dequantize()


@pytest.mark.parametrize(("function", "amplifies"), [(chaotic, True), (THROUGH["relu"], False)])
def test_a_model_that_rounds_may_amplify(function, amplifies, monkeypatch):
    """Two fifths of the largest value are a defect, but where a nudge of inputs makes as much."""
    x = image()
    fast = torch_blocked.optimize(Op(function).eval(), x, tune=False, verify=False)
    most = function(x).abs().max()
    monkeypatch.setattr(fast, "_model", Op(lambda x: function(x) + 0.4 * most))
    if amplifies:
        _verify(fast)
    else:
        with pytest.warns(UserWarning, match="differed from the model"):
            _verify(fast)
    assert fast.choice == ("blocked" if amplifies else "model")


def test_nudged_inputs_are_of_the_same_kinds():
    x = image()
    case = ((x, x.to_blocked(), torch.arange(3), "name"), {"mask": x > 0, "none": x[:0]})
    args, kwargs = nudged(case, 1e-5)
    assert 0 < (args[0] - x).abs().max() < 1.1e-5 * x.abs().max()
    assert args[1].format == case[0][1].format
    assert 0 < (args[1].to_dense() - x).abs().max() < 1.1e-5 * x.abs().max()
    assert torch.equal(args[2], case[0][2]) and args[3] == "name"
    assert torch.equal(kwargs["mask"], x > 0) and kwargs["none"].shape == x[:0].shape


class Prepacked(nn.Module):
    """A convolution on quantized tensors, whose weights no tensor of the model shows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nnq.Quantize(SCALE, ZERO, torch.quint8),
            nnq.Conv2d(16, 16, 3, padding=1),
            nnq.ReLU6(),
            nnq.DeQuantize(),
        )
        self.after = nn.Conv2d(16, 8, 3)
        self.eval()

    def forward(self, x):
        return self.after(self.layers(x))


def test_prepacked_modules_run_as_they_are():
    model, x = Prepacked(), image()
    with torch.no_grad():
        fast = torch_blocked.optimize(model, x, tune=False)
        close(fast(x), model(x))
        close(model(x.to_blocked()), model(x))
    assert "because" in fast.plan()
    assert torch_blocked.explain(model, x, tune=False).optimized.note


def test_quantized_tensors_are_not_blocked():
    x = per_tensor(image())
    expected = r"^torch_blocked::to_blocked: expected .*, got torch.qint8 .*; call .dequantize\(\)"
    for convert in (torch.Tensor.to_blocked, lambda x: torch_blocked.to_format(x, "nChw8c")):
        with pytest.raises(TypeError, match=expected):
            convert(x)
    with pytest.raises(TypeError, match="got a quantized tensor; convert it"):
        torch_blocked.optimize(Op(torch.dequantize).eval(), x)
