"""Models that meddle with types, with bfloat16 wherever there is a kernel for it: results are what
the model's own are, and as near to exact ones as under autocast."""

import copy

import pytest
import torch
from helpers.typed_models import TYPED
from torch.utils import _pytree as pytree

import torch_blocked

pytestmark = pytest.mark.usefixtures("cache_folder", "in_bfloat16")

# Errors relative to the norm of a result: always right, times that of autocast, and never right.
LEAST, TIMES, MOST = 0.05, 3, 0.25


def has_fractions(value):
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def exactly(model, args, own):
    """The results in float64, or the model's own if it does not run in that."""
    args = pytree.tree_map_only(
        torch.Tensor, lambda each: each.double() if each.is_floating_point() else each, args
    )
    try:
        return copy.deepcopy(model).double()(*args)
    except Exception:
        return own


def by_autocast(model, args, own):
    """The results under autocast, or the model's own if it does not run in that."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*args)
    except Exception:
        return own


def error(result, exact):
    """Relative to the norm."""
    wide = torch.complex128 if exact.is_complex() else torch.float64
    result, exact = result.to(wide), exact.to(wide)
    return ((result - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def assert_right(model, args, results):
    """The structure, types and sizes of the model's own results, and values as near as expected."""
    own = model(*args)
    exact, cast = exactly(model, args, own), by_autocast(model, args, own)
    (ours, ours_spec), (owns, own_spec) = pytree.tree_flatten(results), pytree.tree_flatten(own)
    assert ours_spec == own_spec
    others = pytree.tree_leaves(exact), pytree.tree_leaves(cast)
    for i, (a, b, right, near) in enumerate(zip(ours, owns, *others, strict=True)):
        assert type(a) is type(b) or isinstance(b, torch.nn.Parameter)
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if not has_fractions(b):
            assert torch.equal(a, b)
            continue
        apart = error(near, right)
        bound = min(max(LEAST, TIMES * apart), MOST) if apart < torch.inf else LEAST
        assert error(a, right) <= bound, f"result {i}: {error(a, right):.3g} > {bound:.3g}"


def assert_same_bits(first, second):
    for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", TYPED)
@torch.no_grad()
def test_in_bfloat16(name):
    model, args = TYPED[name]()
    optimized = torch_blocked.optimize(model, args, dtype=torch.bfloat16, tune=False)
    results = optimized(*args)
    assert_right(model, args, results)
    assert_same_bits(results, optimized(*args))


@pytest.mark.parametrize("name", list(TYPED)[::6])
@torch.no_grad()
def test_compile_backend(name):
    model, args = TYPED[name]()
    torch._dynamo.reset()
    options = {"dtype": torch.bfloat16, "tune": False}
    assert_right(model, args, torch.compile(model, backend="torch_blocked", options=options)(*args))
