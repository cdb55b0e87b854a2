"""Models whose tensors have no elements, no dims, or other ranks than what they meet."""

import pytest
import torch
from helpers.draws import draws
from random_edges import OPERANDS, check
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb

MODELS = draws(100, 400)


@pytest.mark.filterwarnings("ignore")
def test_random_edges():
    """test/random/random_edges.py runs many more, of new seeds."""
    said = {seed: check(seed) for seed in range(1, 1 + MODELS)}
    assert not {seed: wrong for seed, wrong in said.items() if wrong}
    assert sum(wrong == "" for wrong in said.values()) > MODELS / 3  # others refuse when dense


class Scaled(nn.Module):
    def __init__(self, operand):
        super().__init__()
        self.operand = operand

    def forward(self, x):
        y = F.avg_pool3d(x, 3, 1, 1)
        return y * self.operand(x, y), y / self.operand(x, y)


@pytest.mark.any_isa
@pytest.mark.parametrize("operand", OPERANDS)
def test_averages_that_meet_any_rank(operand):
    """A product with an average may be a response norm, if what it scales is an image."""
    model, x = Scaled(OPERANDS[operand]).eval(), torch.rand(6, 6, 6, 6, 6) + 0.1
    results = tb.optimize(model, x, tune=False, verify=False)(x)
    torch.testing.assert_close(tuple(results), model(x))
