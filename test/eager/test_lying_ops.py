"""Ops that write what their schemas do not say (lying_ops.py), on blocked tensors and in models."""

import warnings

import pytest
import torch
from helpers.lying_ops import FAKES, OPS, call
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_blocked as tb

pytestmark = [
    pytest.mark.any_isa,
    pytest.mark.filterwarnings("ignore:torch_blocked. .*runs on a dense copy"),
]


def pair() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x, y = torch.randn(2, 17, 3, 4), torch.randn(2, 17, 3, 4)
    x[0, 0, 0, 0] = y[0, 0, 0, 0] = 0.0
    return x, y


GIVEN = {
    "blocked": lambda x, y: (x, y),
    "channels": lambda x, y: (x[:, 3:12], y[:, 3:12]),
    "whole blocks": lambda x, y: (x[:, 8:16], y[:, 8:16]),
    "images": lambda x, y: (x[1:], y[:1]),
    "views": lambda x, y: (x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)),
    "a view and its base": lambda x, y: (x[:1], y[1:]),
    "two images of one": lambda x, y: (x[0], x[1]),
    "two channels of one": lambda x, y: (x[:, 0], x[:, 1]),
    "two parts of one": lambda x, y: (x[:, :3], x[:, 3:6]),
    "two rows of a view": lambda x, y: x.permute(0, 2, 3, 1)[0, :2].unbind(0),
    "detached": lambda x, y: (x.detach(), y.detach()),
}


def bits(value):
    value = value.to_dense() if isinstance(value, Tensor) else torch.tensor(float(value or 0))
    return value.contiguous().view(torch.int32)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("op", OPS)
def test_writes_reach_blocked_tensors(op, given):
    dense = pair()
    blocked = [each.to_blocked("nChw8c") for each in dense]
    seen = [(x[0, 2], x.permute(1, 0, 2, 3), x[:, 1:9]) for x in (dense[0], blocked[0])]
    expected = call(op, *GIVEN[given](*dense))
    got = call(op, *GIVEN[given](*blocked))
    pytree.tree_map(lambda a, b: torch.testing.assert_close(bits(a), bits(b)), expected, got)
    for ours, theirs in zip((*blocked, *seen[1]), (*dense, *seen[0]), strict=True):
        assert bits(ours).equal(bits(theirs))
    assert all(each._physical[:, -1, ..., 1:].eq(0).all() for each in blocked)


def test_results_that_are_memory_of_an_argument_stay_that():
    dense = pair()[0]
    blocked = dense.to_blocked("nChw8c")
    there, here = torch.ops.lying.shows(dense), torch.ops.lying.shows(blocked)
    for write in (lambda shown, x: shown.add_(1), lambda shown, x: x.mul_(2)):
        write(there, dense)
        write(here, blocked)
        assert here.to_dense().equal(there) and blocked.to_dense().equal(dense)
    assert torch.ops.lying.same(blocked) is blocked


def test_an_op_that_writes_nothing_counts_no_write():
    x, y = (each.to_blocked() for each in pair())
    before = x._version, y._version
    torch.ops.lying.honest(x, y)
    assert (x._version, y._version) == before
    torch.ops.lying.second_numpy(x, y)
    assert x._version == before[0] and y._version > before[1]


def test_a_write_that_backward_would_miss_is_an_error():
    x = pair()[0].to_blocked().requires_grad_()
    y = x.sigmoid()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ops.lying.none_numpy(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inference_tensors_take_them_too():
    with torch.inference_mode():
        dense, other = pair()
        x, y = dense.to_blocked(), other.to_blocked()
        torch.ops.lying.first_address(dense, other)
        torch.ops.lying.first_address(x, y)
        assert x.to_dense().equal(dense)


class Calls(nn.Module):
    """An op on what a layer has made, whose arguments are read again after it."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.layer = op, nn.Conv2d(17, 17, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.layer(x).relu()
        y = x * 0.5
        out = pytree.tree_leaves(call(self.op, x, y))
        return (*(each for each in out if isinstance(each, Tensor)), x + 1, y * 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("op", OPS)
def test_models_that_call_them(op):
    model, x = Calls(op).eval(), pair()[0]
    with torch.no_grad():
        expected = model(x)
    optimized = tb.optimize(model, x, tune=False)
    for _ in range(2):
        torch.testing.assert_close(tuple(optimized(x)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", FAKES)
def test_compiled_models_that_call_them(form):
    """In the graph that Dynamo hands over, since they have kernels for sizes."""
    model, x = Calls(f"{form}_address").eval(), pair()[0]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="torch_blocked", fullgraph=True)
    with torch.no_grad():
        expected = model(x)
        for given in (x, x, x.to_blocked()):
            results = [each.to_dense() for each in compiled(given)]
            torch.testing.assert_close(tuple(results), expected, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()
