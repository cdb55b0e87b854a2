"""Tensors that are not in the memory of the CPU: models and inputs are refused in one sentence."""

import pytest
import torch
from torch import nn

import torch_blocked as tb
from torch_blocked import _C, saved
from torch_blocked.captured import VALUE, Capture, Node
from torch_blocked.loading import load

pytestmark = pytest.mark.any_isa


def on_meta(*dims):
    return torch.empty(dims, device="meta")


def elsewhere(*dims):
    """On a device of another kind, whose memory nobody here can read."""
    return torch._C._acc.create_empty_tensor(dims, torch.float32)


PLACES = {"meta": on_meta, "privateuseone": elsewhere}


class Scaled(nn.Module):
    """A convolution of an image and what `scale` is: an attribute, or one of several in it."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.conv = scale, nn.Conv2d(3, 8, 3)

    def forward(self, x):
        scale = self.scale
        while not isinstance(scale, torch.Tensor):
            scale = next(iter(scale.values())) if isinstance(scale, dict) else scale[0]
        return self.conv(x * scale)


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


def with_weight(make):
    model = network()
    model[0].weight = nn.Parameter(make(8, 3, 3, 3))
    return model


def with_buffer(make):
    model = network()
    model[1].running_mean = make(8)
    return model


# What makes a model with a tensor that make(*dims) gives, and the name that the sentence has.
MODELS = {
    "parameter": (with_weight, "0.weight"),
    "buffer": (with_buffer, "1.running_mean"),
    "attribute": (lambda make: Scaled(make(3, 1, 1)), "scale"),
    "list": (lambda make: Scaled([make(3, 1, 1)]), "scale"),
    "dict of tuples": (lambda make: Scaled({"a": (make(3, 1, 1),)}), "scale"),
    "in a module": (lambda make: nn.Sequential(Scaled(make(3, 1, 1))), "0.scale"),
    "script": (lambda make: torch.jit.script(with_weight(make).eval()), "0.weight"),
}
CALLS = {
    "optimize": lambda model, x: tb.optimize(model, x, tune=False),
    "explain": lambda model, x: tb.explain(model, x, tune=False),
    "quantize": lambda model, x: tb.quantize(model, [x]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("call", CALLS)
def test_models_elsewhere_are_refused(place, kind, call):
    make, name = MODELS[kind]
    model = make(PLACES[place]).eval()
    with pytest.raises(TypeError, match=f"in the memory of the CPU, got {name} on {place}"):
        CALLS[call](model, torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize("place", PLACES)
def test_inputs_elsewhere_are_refused(place):
    x = torch.randn(1, 3, 8, 8)
    fast = tb.optimize(network().eval(), x, tune=False)
    for call in (fast, lambda input: tb.optimize(network().eval(), input, tune=False)):
        with pytest.raises(TypeError, match="expected dense or blocked CPU tensors as inputs"):
            call(PLACES[place](1, 3, 8, 8))


def test_a_model_that_has_moved_is_refused_for_other_sizes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4)).eval()
    x = torch.randn(1, 3, 8, 8)
    model(x)
    fast = tb.optimize(model, x, tune=False)
    expected = model(x)
    model.to("meta")
    torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="got 0.weight on meta"):
        fast(torch.randn(1, 3, 8, 8), None)


@pytest.mark.parametrize("place", PLACES)
def test_constants_of_a_graph_elsewhere_are_refused(place):
    """Those that no module has, as a global or what a file brings."""
    x = [VALUE, 0]
    capture = Capture(
        nodes=[Node("aten::mul", "Tensor", [x, [VALUE, 1]], [2])],
        inputs=[0],
        outputs=[[VALUE, 2]],
        constants={1: PLACES[place](3, 1, 1)},
        input_metas=[([1, 3, 8, 8], torch.float32)],
    )
    with pytest.raises(TypeError, match=rf"expected constants .* one of \[3, 1, 1\] on {place}"):
        _C.Compiled(capture, False, "", {}, _C.Weights(), None, "captured", [])


def test_a_file_with_constants_elsewhere_is_refused(tmp_path):
    fast = tb.optimize(network().eval(), torch.randn(1, 3, 8, 8), tune=False)
    fast.save(tmp_path / "model.pt")
    data = torch.load(tmp_path / "model.pt")
    constants = data["forms"][0]["capture"]["constants"]
    data["forms"][0]["capture"]["constants"] = {i: t.to("meta") for i, t in constants.items()}
    saved.save(data, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="tensors that are not of the CPU"):
        load(tmp_path / "other.pt")


def test_a_tensor_elsewhere_has_no_blocks():
    with pytest.raises((TypeError, NotImplementedError), match="elsewhere|CPU|privateuseone"):
        tb.to_blocked(elsewhere(1, 3, 8, 8))
