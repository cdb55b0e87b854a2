"""The same network in other words is the same plan: the generator of benchmarks/spellings.py."""

from dataclasses import replace

import pytest
import spellings
import torch
from helpers.draws import draws

import torch_blocked as tb


def steps(optimized):
    """How many steps compute something, and how many reorders there are. Reshapes, and the copy of
    a view of the last mean, are left out."""
    others = ("aten::flatten", "aten::view", "aten::reshape", "aten::squeeze", "aten::unsqueeze")
    rows = optimized.plan().splitlines()[2:]
    computing = [row for row in rows if not row.startswith((*others, "contiguous"))]
    return len(computing), sum(row.startswith("reorder") for row in computing)


@pytest.mark.any_isa
@pytest.mark.parametrize("seed", range(draws(4, 8)))
def test_spellings_have_one_plan(seed):
    network = replace(spellings.draw_network(seed), size=48)
    x = torch.randn(1, 3, 48, 48)
    plans = {}
    for spelling in range(8):
        model = spellings.Spelling(network, spelling).eval()
        optimized = tb.optimize(model, x, tune=False)
        assert optimized.choice == "blocked"
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-4)
        plans[spelling] = steps(optimized)
    assert set(plans.values()) == {plans[0]}, plans
