"""Eager ops on blocked tensors give what dense ones give: values, dims, dtypes, types of errors and
a zero tail. The calls are drawn by eager_calls.py from the library's own list of ops."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import eager_calls
import pytest
import torch
from eager_calls import Call, blocked, calls, check
from helpers.draws import draws
from helpers.problems import threads
from hypothesis import HealthCheck, given, settings

import torch_blocked
from torch_blocked.dispatch import OPS_TABLE

TESTS = Path(__file__).parents[1]

SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=draws(300, 5000),
    suppress_health_check=list(HealthCheck),
)


def draw():
    """Compares calls with the dense ones."""
    came: Counter = Counter()

    @SETTINGS
    @given(calls())
    def run(call):
        came[check(call)] += 1

    with threads(1):  # tiny tensors: a team of threads would mostly wait
        run()
    assert came[True] > came.total() / 3, "most calls are refused: that finds little"


def test_calls_give_what_dense_ones_give():
    """In a process of its own: ops that other tests load would be drawn as well."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS / "fuzz", TESTS / "random")))
    code = "import test_eager_hypothesis; test_eager_hypothesis.draw()"
    environment = os.environ | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_library_s_ops_are_drawn():
    """All but those that only other ops call and that no row of the table of problems reaches."""
    drawn = set(eager_calls.ops())
    left = {op for op in OPS_TABLE if op not in drawn and not eager_calls.is_internal(op)}
    of_aten = {eager_calls.name_of(op) for op in left if op.namespace == "aten"}
    assert of_aten <= {"set_"}
    assert len(drawn) > 500


WRONG = {
    "values": (lambda x: (x + 1).to_blocked("nChw8c"), "off by"),
    "dims": (lambda x: x[:, :1].to_blocked("nChw8c"), "dims"),
    "dtype": (lambda x: x.double().to_blocked("nChw8c"), "float32, torch.float64"),
    "infinities": (lambda x: (x / 0).to_blocked("nChw8c"), "infinities or NaN"),
    "no error": (lambda x: (_ for _ in ()).throw(KeyError("own")), "blocked KeyError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_handler_is_noticed(name, monkeypatch):
    result, said = WRONG[name]
    relu = torch.ops.aten.relu.default
    monkeypatch.setitem(OPS_TABLE, relu, lambda func, x: result(x.to_dense().relu()))
    monkeypatch.setattr("torch_blocked.dispatch.DIRECT", {})
    call = Call(relu, [torch.randn(2, 9, 4, 4)], {}, [("contiguous", 8)])
    with pytest.raises(AssertionError, match=said):
        check(call)


def test_a_written_argument_is_compared(monkeypatch):
    """The result alone would not show that an in-place op has not written."""
    op = torch.ops.aten.relu_.default
    monkeypatch.setitem(OPS_TABLE, op, lambda func, x: x.relu())
    call = Call(op, [torch.randn(2, 9, 4, 4)], {}, [("contiguous", 8)])
    with pytest.raises(AssertionError, match="off by"):
        check(call)


def test_formats_and_strides_are_as_drawn():
    x = torch.randn(3, 9, 5, 4)
    call = Call(torch.ops.aten.add.Tensor, [x, x], {}, [("transposed", 16), ("sliced", 0)])
    (first, second), _ = call.arguments(blocked)
    assert torch_blocked.format_of(first) == "nChw16c"
    assert torch.equal(first.to_dense(), x) and torch.equal(second, x)
    assert second.stride() == (9 * 5 * 9, 5 * 9, 9, 2)
