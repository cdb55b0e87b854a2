"""Every row of the table of problems, over channels, batches and blocks."""

import pytest
import torch

import torch_blocked
from torch_blocked.testing import BATCHES, CHANNELS, PROBLEMS, assert_matches_dense, dims_of

# The blocks with fast kernels; 4 and 32 are legal everywhere and tried on a few problems.
BLOCKS = (8, 16)


def refused_by_aten(problem, dims):
    """ATen takes no empty batch in some ops: so must we not."""
    x = torch.zeros(dims)
    operands = [torch.zeros(shape) for shape in problem.operand_dims(dims)]
    try:
        problem.run(x, *operands)
    except (RuntimeError, ValueError) as error:
        return type(error)
    return None


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.id)
def test_problem(problem, channels, block):
    for batch in BATCHES:
        dims = dims_of(problem, batch, channels)
        error = refused_by_aten(problem, dims)
        if error is None:
            assert_matches_dense(problem, dims, block)
        else:
            x = torch.zeros(dims).to_blocked(torch_blocked.tensor.format_name(len(dims), block))
            with pytest.raises(error):
                problem.run(x, *(torch.zeros(shape) for shape in problem.operand_dims(dims)))


@pytest.mark.parametrize("block", (4, 32))
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.id)
def test_unusual_blocks(problem, block):
    assert_matches_dense(problem, dims_of(problem, 2, 17), block)
