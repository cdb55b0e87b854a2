"""Every operator of PyTorch's database takes blocked tensors and gives the dense result.

A few samples of each op, all arguments blocked; opinfo_report.py runs all samples in all modes."""

import pytest
import torch
from opinfo import OPS, InPlace, Out, Refused, check

pytestmark = pytest.mark.any_isa

# Enough for each kind of argument that the database gives an op, in a minute or two for all ops.
MOST_SAMPLES = 2


@pytest.mark.parametrize("name", OPS)
def test_forward(name):
    assert not check(OPS[name], "all", backward=False, most_samples=MOST_SAMPLES).wrong


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.supports_autograd])
def test_backward(name):
    assert not check(OPS[name], "all", backward=True, most_samples=MOST_SAMPLES).wrong


@pytest.mark.parametrize("name", OPS)
def test_inference_mode(name):
    """Composite ops come whole there."""
    with torch.inference_mode():
        assert not check(OPS[name], "all", backward=False, most_samples=1).wrong


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.inplace_variant])
def test_in_place(name):
    assert not check(InPlace(OPS[name]), "all", backward=False, most_samples=MOST_SAMPLES).wrong


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("dims", (None, (1, 3, 2, 2)), ids=("", "other dims"))
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.supports_out])
def test_out(name, dims):
    assert not check(Out(OPS[name], dims), "all", backward=False, most_samples=1).wrong


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.error_inputs_func])
def test_refused(name):
    assert not check(Refused(OPS[name]), "all", backward=False).wrong


@pytest.mark.parametrize("mode", ("first", "others", "mixed blocks", "channels last"))
@pytest.mark.parametrize(
    "name", ("add", "where", "cat", "addcmul", "nn.functional.conv2d", "nn.functional.batch_norm")
)
def test_mixed_arguments(name, mode):
    outcome = check(OPS[name], mode, backward=False)
    assert outcome.compared
    assert not outcome.wrong
