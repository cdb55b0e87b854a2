"""torch.library.opcheck on every op of the library: schema, fake kernels, autograd registration and
tracing with symbolic sizes. An op without examples (helpers/op_examples.py) fails."""

import pytest
import torch
from helpers.draws import draws
from helpers.op_examples import EXAMPLES, OPS
from torch.utils._pytree import tree_leaves, tree_map_only

pytestmark = pytest.mark.any_isa


ALL_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# A bool that depends on values, not sizes: no fake kernel can give it.
DATA_DEPENDENT = {"tail_is_zero"}
# No two runs give the same values.
UNINITIALISED = {"empty_like"}


CASES = [(op, index) for op, rows in EXAMPLES.items() for index in range(len(rows))]


def test_every_op_has_examples():
    """Three or more; and no examples are of an op that there is no more."""
    assert {op for op, rows in EXAMPLES.items() if len(rows) < 3} == set()
    assert all(hasattr(OPS, op) for op in EXAMPLES)


@pytest.mark.parametrize(("op", "index"), CASES)
def test_opcheck(op, index):
    args, kwargs = EXAMPLES[op][index]
    # Tracing with symbolic sizes takes most of the time, so it is done for one example of each op.
    untraced = op in UNINITIALISED or index >= draws(1, len(CASES))
    tests = ALL_TESTS[:2] if op in DATA_DEPENDENT else ALL_TESTS[:3] if untraced else ALL_TESTS
    torch.library.opcheck(getattr(OPS, op).default, args, kwargs, test_utils=tests)


RETURNING = [case for case in CASES if case[0] not in {"clear_tail_", *DATA_DEPENDENT}]


@pytest.mark.parametrize(("op", "index"), RETURNING)
def test_fake_result_is_the_real_one(op, index):
    """Sizes, strides and dtypes: opcheck compares them too, but not the strides of every kernel."""
    args, kwargs = EXAMPLES[op][index]
    function = getattr(OPS, op).default
    args = tree_map_only(torch.Tensor, torch.clone, args)
    real = function(*args, **kwargs)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args = tree_map_only(torch.Tensor, mode.from_tensor, args)
        fake = function(*fake_args, **kwargs)
    results = zip(*map(tree_leaves, (fake, real)), strict=True)
    for fake_result, real_result in results:
        assert fake_result.shape == real_result.shape
        assert fake_result.dtype == real_result.dtype
        assert real_result.numel() == 0 or fake_result.stride() == real_result.stride()
