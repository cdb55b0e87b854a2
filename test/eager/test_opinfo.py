"""Every operator of PyTorch's database takes blocked tensors and gives the dense result.

A few samples of each op, all arguments blocked; opinfo_report.py runs all samples in all modes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.opinfo import OPS, InPlace, Kept, Out, Refused, check

pytestmark = pytest.mark.any_isa

# Enough for each kind of argument that the database gives an op, in a minute or two for all ops.
MOST_SAMPLES = 2


def ways(op: Kept) -> Iterator[tuple[str, Any, bool, int]]:
    """The ways in which an op is called: what each is, the op, whether backward, of how many
    samples."""
    yield "forward", op, False, MOST_SAMPLES
    if op.op.supports_autograd:
        yield "backward", op, True, MOST_SAMPLES
    if op.op.inplace_variant:
        yield "in place", InPlace(op), False, MOST_SAMPLES
    if op.op.supports_out:
        yield "out", Out(op), False, 1
        yield "out of other dims", Out(op, (1, 3, 2, 2)), False, 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OPS)
def test_every_way(name):
    op = Kept(OPS[name])
    wrong = {
        way: check(each, "all", backward=backward, most_samples=most).wrong
        for way, each, backward, most in ways(op)
    }
    with torch.inference_mode():  # composite ops come whole there
        wrong["inference mode"] = check(op, "all", backward=False, most_samples=1).wrong
    assert not any(wrong.values()), wrong


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
