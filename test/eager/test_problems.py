"""Every row of the table of problems, over channels, batches and blocks."""

import pytest
import torch
from helpers.draws import draws
from helpers.problems import BATCHES, CHANNELS_AROUND, PROBLEMS, assert_matches_dense, dims_of

import torch_blocked

CASES = [(block, count) for block, counts in CHANNELS_AROUND.items() for count in counts]
# The batch and the channels are counted by other loops: a number of channels meets one batch that
# is not empty, and an empty one where a block begins.
SOME_BATCHES = {
    case: (1 + 2 * (i % 2), 0) if case in ((8, 9), (16, 17)) else (1 + 2 * (i % 2),)
    for i, case in enumerate(CASES)
}


def refused_by_aten(problem, dims):
    """ATen takes no empty batch in some ops: so must we not."""
    x = torch.zeros(dims)
    operands = [torch.zeros(shape) for shape in problem.operand_dims(dims)]
    try:
        problem.run(x, *operands)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error)
    return None


@pytest.mark.parametrize(("block", "channels"), CASES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.id)
def test_problem(problem, block, channels):
    for batch in draws(SOME_BATCHES[block, channels], BATCHES):
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
