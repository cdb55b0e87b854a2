"""Every op that PyTorch tags pointwise, on blocked tensors, against the same op on dense ones.

The ops are those the installed torch has, so that a new one is tried without a word here. An op
takes each kind of values below that it takes on dense tensors; it must take at least one."""

import pytest
import torch
from helpers.draws import draws
from torch.utils import _pytree as pytree

import torch_blocked
from torch_blocked.tensor import BlockedTensor, tail_is_zero

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]

# (C, tag): a block and a lane of the next.
FORMATS = ((9, "nChw8c"), (17, "nChw16c"))

NOT_EXERCISED = {
    "aten.equal.default": "returns a bool, not a tensor",
}
INTEGER_DIVISIONS = (
    "aten.div.Tensor_mode",
    "aten.div_.Tensor_mode",
    "aten.fmod.Tensor",
    "aten.fmod_.Tensor",
    "aten.remainder.Scalar_Tensor",
    "aten.remainder.Tensor",
    "aten.remainder_.Tensor",
)
# (op, kind of values) that run on a dense copy; all others must not.
FALLBACKS = {
    ("aten.rrelu.default", "any"): "random streams follow the logical order",
    **{(op, "integer"): "fails on the zeros of the tail" for op in INTEGER_DIVISIONS},
}
# (part of the op's name, kind of values) that are left out.
NOT_COMPARED = {
    ("polynomial", "special"): "for NaN, ATen returns a variable that nobody set",
    ("logit_backward", "special"): "for NaN, ATen's vector and scalar code differ",
    ("isfinite", "complex"): "is view_as_real and more, and view_as_real gives a dense tensor",
}

# Arguments by name, where the type alone would not do.
ARGUMENTS = {
    "min": 0.25,
    "max": 0.75,
    "rounding_mode": "floor",
    "decimals": 1,
    "nan": 0.5,
    "lower": 0.1,
    "upper": 0.3,
    "eps": 0.01,
}
BY_TYPE = {"number": 2, "Scalar": 2, "int": 2, "float": 0.5}


def pointwise_overloads():
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or not hasattr(torch.ops.aten, packet):
            continue
        func = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if func is not None and torch.Tag.pointwise in func.tags:
            found.append(func)
    return sorted(found, key=str)


def is_tensor(argument):
    return "Tensor" in str(argument.type)


def takes_and_gives_tensors(func):
    schema = func._schema
    return any(map(is_tensor, schema.arguments)) and all(map(is_tensor, schema.returns))


OVERLOADS = [func for func in pointwise_overloads() if takes_and_gives_tensors(func)]
RETURNING = [func for func in OVERLOADS if not any(a.is_out for a in func._schema.arguments)]
WRITING_OUT = [func for func in OVERLOADS if any(a.is_out for a in func._schema.arguments)]


def special(dims, generator):
    """Zeros, infinities and NaNs among a few ordinary values."""
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 0.5, -1.5, 3.0])
    return values[torch.randint(len(values), dims, generator=generator)]


VALUES = {
    "unit": lambda dims, generator: torch.rand(dims, generator=generator) * 0.8 + 0.1,
    "real": lambda dims, generator: torch.randn(dims, generator=generator) * 2,
    "special": special,
    "integer": lambda dims, generator: torch.randint(1, 8, dims, generator=generator),
    "double": lambda dims, generator: torch.rand(dims, generator=generator).double() + 0.1,
    "complex": lambda dims, generator: torch.randn(dims, generator=generator, dtype=torch.cfloat),
}


def arguments_of(func, kind, dims):
    """(positional, keyword) dense arguments, out= ones left out."""
    generator = torch.Generator().manual_seed(len(str(func)))
    positional, keyword = [], {}
    for argument in func._schema.arguments:
        if argument.is_out:
            continue
        if is_tensor(argument):
            value = VALUES[kind](dims, generator)
            if argument.name in ("mask", "condition"):
                value = value.real > 0.4
        elif argument.name in ARGUMENTS:
            value = ARGUMENTS[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            value = BY_TYPE[str(argument.type)]
        if argument.kwarg_only:
            keyword[argument.name] = value
        else:
            positional.append(value)
    return positional, keyword


def dense_result(func, positional, keyword):
    """What ATen gives, or the type of its refusal."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in positional]
    try:
        return func(*copies, **keyword)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return type(error)


def blocked_in_turn(func, positional):
    """Sets of positions to block: all tensors, then each alone; always what is written."""
    tensors = [i for i, value in enumerate(positional) if isinstance(value, torch.Tensor)]
    yield set(tensors)
    if len(tensors) > 1:
        yield from ({i} for i in tensors if not func._schema.is_mutable or i == 0)


def assert_equal(blocked, dense, tag):
    assert isinstance(blocked, BlockedTensor), "the format was lost"
    assert blocked.format == tag
    assert tail_is_zero(blocked)
    # ATen computes what fills whole vectors and the rest of a row by different code.
    inexact = dense.is_floating_point() or dense.is_complex()
    tolerance = 2e-6 if inexact else 0
    torch.testing.assert_close(
        blocked.to_dense(), dense, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def run(func, kind, dims, tag):
    """Compares; whether ATen took the values and gave any that are finite."""
    positional, keyword = arguments_of(func, kind, dims)
    expected = dense_result(func, positional, keyword)
    for positions in blocked_in_turn(func, positional):
        arguments = [
            a.to_blocked(tag) if i in positions else a.clone() if isinstance(a, torch.Tensor) else a
            for i, a in enumerate(positional)
        ]
        if isinstance(expected, type):
            with pytest.raises(expected):
                func(*arguments, **keyword)
            continue
        with torch_blocked.profile() as p:
            result = func(*arguments, **keyword)
        named = FALLBACKS.keys() & {(str(func), kind), (str(func), "any")}
        assert (p.fallbacks > 0) == bool(named), p.table()
        pytree.tree_map(lambda b, d: assert_equal(b, d, tag), result, expected)
        for position, (given, original) in enumerate(zip(arguments, positional, strict=True)):
            if func._schema.is_mutable and position == 0:
                assert given is result
            elif position in positions:
                assert_equal(given, original, tag)
    if isinstance(expected, type):
        return False
    return any(torch.isfinite(value).any() for value in pytree.tree_leaves(expected))


def test_what_is_not_exercised():
    """A pointwise op that no test below takes is named here, with the reason."""
    assert {str(func) for func in pointwise_overloads()} - {str(f) for f in OVERLOADS} == set(
        NOT_EXERCISED
    )
    assert len(RETURNING) > 300  # an empty list would pass everything
    assert len(WRITING_OUT) > 150


@pytest.mark.parametrize("func", RETURNING, ids=str)
def test_blocked_equals_dense(func):
    left_out = {kind for name, kind in NOT_COMPARED if name in str(func)}
    kinds = [kind for kind in VALUES if kind not in left_out]
    # ATen's kernels run on the physical tensor: they know no blocks.
    some = [kind for kind in kinds if kind in draws(("unit", "integer", "double"), VALUES)]
    for (channels, tag), kinds_of_format in zip(FORMATS, (kinds, some), strict=True):
        taken = [run(func, kind, (2, channels, 3, 5), tag) for kind in kinds_of_format]
        assert any(taken), "no kind of values is in the op's domain"


@pytest.mark.parametrize("func", WRITING_OUT, ids=str)
def test_out_is_written(func):
    """Through a dense copy that is counted, and written back: never a lost value."""
    names = [a.name for a in func._schema.arguments if a.is_out]
    functional = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::"))
    taken = 0
    for channels, tag in FORMATS:
        for kind in ("unit", "integer", "double"):
            positional, keyword = arguments_of(func, kind, (2, channels, 3, 5))
            expected = dense_result(functional, positional, keyword)
            if isinstance(expected, type):
                continue
            expected = pytree.tree_leaves(expected)
            outs = [torch.full_like(value, 1).to_blocked(tag) for value in expected]
            blocked = [a.to_blocked(tag) if isinstance(a, torch.Tensor) else a for a in positional]
            with torch_blocked.profile() as p:
                func(*blocked, **keyword, **dict(zip(names, outs, strict=True)))
            assert p.fallbacks > 0, p.table()
            for out, value in zip(outs, expected, strict=True):
                assert_equal(out, value, tag)
            taken += 1
    assert taken, "no kind of values is in the op's domain"
