"""Random models of bytes, op by op; test/random/random_int8.py runs many more, of new seeds."""

import pytest
import torch
from helpers.draws import draws
from random_int8 import RandomModel, check, run_seeds

from torch_blocked import _C

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore"),
]
MODELS = draws(5, 24)


def test_models():
    """Others on each instruction set (24 seeds apart)."""
    first = 1 + 24 * ("amx", "avx512", "avx2", "default").index(_C.isa())
    said = []
    total, failed = run_seeds(range(first, first + MODELS), said.append)
    assert not failed, "\n".join(said)
    assert total["steps of bytes"] > MODELS and total["one"] < total["all"] / 1000, total


@pytest.mark.any_isa
def test_what_differs_is_seen(monkeypatch):
    """The plan of a graph with another weight is no plan of the graph."""
    case = RandomModel(9)
    check(case)
    weight = next(each for _, each in case.converted.named_buffers() if each.dtype == torch.int8)
    inputs = case.inputs
    changed = weight.clone()
    changed.flatten()[::2] += 3

    class Other(list):  # the weights change as the inputs are gone through, after optimize()
        def __iter__(self):
            weight.copy_(changed)
            return iter(inputs)

    case.inputs = Other(inputs)
    with pytest.raises(AssertionError):
        check(case)
