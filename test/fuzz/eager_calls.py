"""Eager calls on blocked tensors, drawn by hypothesis, and what must hold of them.

The ops are the library's own list: the table of handlers, and what its rules add to it, so a new op
is drawn without a change here. An example of an op comes from the table of problems: what a row
calls on a dense tensor of the drawn N and C. Then one or two arguments change. An op that no row
calls gets arguments by the types in its schema.

A call runs on dense tensors and on the drawn mixture of formats. Both give the same values, dims
and dtypes, or raise the same type of error."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from helpers.problems import PROBLEMS, Problem, dims_of, make_tensors
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_blocked.dispatch import OPS_TABLE, RULES
from torch_blocked.tensor import BlockedTensor, format_name, tail_is_zero

CHANNELS = (1, 3, 7, 8, 9, 15, 16, 17, 33)
BATCHES = (0, 1, 3)
BLOCKS = (4, 8, 16, 32)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int64)
NUMBERS = (0, 1, 2, 3, 8, -1, -2, 17)
FRACTIONS = (0.0, 0.5, 1.0, -1.5, 1e-5, 3.0)

# What one op may be off, relative to the largest value: roundings of sums in another order.
ROUNDING = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-4, torch.float64: 1e-9}

# Times as far from float64 as ATen's own result, where ATen's is further off than that.
AS_EXACT = 4

# Results that are no function of the arguments.
_UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided", "resize_", "resize_as_"}
# set_() gives a tensor other memory than its own, which a copy of it does not notice.
# rrelu_with_noise writes beyond an `out` without values.
_NOT_DRAWN = {"set_", "rrelu_with_noise.out"}


def has_handler(op: OpOverload) -> bool:
    return op in OPS_TABLE or any(rule(op) is not None for rule in RULES)


def name_of(op: OpOverload) -> str:
    return op._schema.name.partition("::")[2]


@cache
def ops() -> list[OpOverload]:
    """Every op with a handler, and the variants of these ops that write into an argument."""
    found = []
    for each in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = each.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten" or {name, rest} & _NOT_DRAWN:
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default", None)
        if op is None or not (has_handler(op) or _writes_for_one(op)):
            continue
        if not is_internal(op) or _rows_of(op):
            found.append(op)
    return found


def is_internal(op: OpOverload) -> bool:
    """Other ops call it with arguments that they have checked, and ATen may read beyond memory for
    others. It is drawn with the arguments of a row only."""
    name = name_of(op)
    return name.startswith(("_", "grid_sampler", "native_batch_norm")) or "_backward" in name


def _writes_for_one(op: OpOverload) -> bool:
    """Whether it has `out`, and its functional twin has a handler."""
    if not any(each.is_out for each in op._schema.arguments):
        return False
    twin = op._overloadname.removesuffix("_out").removesuffix("out") or "default"
    return has_handler(getattr(op._overloadpacket, twin, op))


# ---- examples ------------------------------------------------------------------------------------


class _Noted(TorchDispatchMode):
    """The calls that a row makes on dense tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.calls.append((func, *copy.copy((args, kwargs))))
        return func(*args, **kwargs)


@cache
def calls_of(problem: Problem, batch: int, channels: int) -> list[tuple[OpOverload, tuple, dict]]:
    """Forward and backward; none if the row does not take such a tensor."""
    tensors = make_tensors(problem, dims_of(problem, batch, channels))
    tensors = [each.requires_grad_() for each in tensors]
    noted = _Noted()
    try:
        with noted:
            result = problem.run(*tensors)
            if result.requires_grad:
                torch.autograd.grad(result.sum(), tensors, allow_unused=True)
    except (RuntimeError, ValueError, IndexError):
        pass  # what it called before counts
    return noted.calls


@cache
def _rows_by_name() -> dict[str, list[Problem]]:
    """Which rows call an op of a name."""
    rows: dict[str, list[Problem]] = {}
    for problem in PROBLEMS:
        for name in sorted({name_of(op) for op, _, _ in calls_of(problem, 3, 9)}):
            rows.setdefault(name, []).append(problem)
    return rows


def follows_memory(op: OpOverload) -> bool:
    """Random numbers come in the order of memory, and as_strided() names places in it. Of a blocked
    tensor the logical order counts."""
    return torch.Tag.nondeterministic_seeded in op.tags or "as_strided" in name_of(op)


def _rows_of(op: OpOverload) -> list[Problem]:
    """Rows that call this op, or for one that writes in place its twin."""
    rows, name = _rows_by_name(), name_of(op)
    return rows.get(name) or rows.get(name.removesuffix("_")) or []


def _fits(op: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether the op has arguments as these are, and no other that must be given."""
    arguments = op._schema.arguments
    taken = {each.name for each in arguments[: len(args)]} | kwargs.keys()
    needed = {each.name for each in arguments if not (each.has_default_value() or each.is_out)}
    return len(args) <= len(arguments) and needed <= taken <= {each.name for each in arguments}


def _example(draw, op: OpOverload, batch: int, channels: int) -> tuple[list, dict] | None:
    """Arguments of a call that a row makes of this op, or of its variant that writes elsewhere."""
    name, found = name_of(op), _rows_of(op)
    if not found:
        return None
    calls = calls_of(draw(st.sampled_from(found)), batch, channels)
    same = [each for each in calls if name_of(each[0]) in (name, name.removesuffix("_"))]
    same = [(args, kwargs) for func, args, kwargs in same if _fits(op, args, kwargs)]
    if not same:
        return None
    args, kwargs = draw(st.sampled_from(same))
    return list(args), dict(kwargs)


# ---- arguments by their types --------------------------------------------------------------------


def _tensor(draw, dims: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    values = torch.randn(dims, generator=generator) * 2
    return values.to(dtype)


def _dims(draw, batch: int, channels: int) -> tuple[int, ...]:
    spatial = draw(st.sampled_from(((6,), (5, 4), (3, 2, 4))))
    return (batch, channels, *spatial)


def _by_type(draw, kind: str, name: str, dims: tuple[int, ...]) -> Any:
    if kind.startswith("Optional["):
        if draw(st.booleans()) or "Generator" in kind:
            return None
        kind = kind[len("Optional[") : -1]
    if kind.startswith("List["):
        count = draw(st.sampled_from((1, 2, len(dims) - 2, len(dims))))
        values = [_by_type(draw, kind[len("List[") : -1], name, dims) for _ in range(count)]
        if all(isinstance(each, int) for each in values):
            assume(math.prod(max(each, 1) for each in values) < 5000)  # repeat() makes gigabytes
        return values
    if kind == "Tensor":
        return _tensor(draw, draw(st.sampled_from((dims, dims, dims, dims[1:], (dims[1], 1, 1)))))
    kind = kind.replace("SymInt", "int")
    if kind == "int" and "dim" in name:
        return draw(st.integers(-len(dims) - 1, len(dims)))
    if name == "reduction":  # torch.nn.functional checks it, and ATen does not
        return draw(st.integers(0, 2))
    simple = {
        "int": st.sampled_from(NUMBERS),
        "number": st.sampled_from((*NUMBERS, *FRACTIONS)),
        "float": st.sampled_from(FRACTIONS),
        "bool": st.booleans(),
        "str": st.sampled_from(("floor", "trunc", "none", "tanh", "mean")),
        "ScalarType": st.sampled_from(DTYPES),
        "Layout": st.just(torch.strided),
        "MemoryFormat": st.sampled_from((torch.preserve_format, torch.contiguous_format)),
        "Device": st.just(torch.device("cpu")),
    }
    assert kind in simple, f"no arguments of type {kind} are drawn: add them"
    return draw(simple[kind])


def _made(draw, op: OpOverload, dims: tuple[int, ...]) -> tuple[list, dict]:
    args, kwargs = [], {}
    for position, each in enumerate(op._schema.arguments):
        if each.has_default_value() and draw(st.booleans()):
            if not each.kwarg_only:
                args.append(each.default_value)
            continue
        if each.is_out:
            continue
        is_first = position == 0 and str(each.real_type) == "Tensor"
        value = (
            _tensor(draw, dims)
            if is_first
            else _by_type(draw, str(each.real_type), each.name, dims)
        )
        if each.kwarg_only:
            kwargs[each.name] = value
        else:
            args.append(value)
    return args, kwargs


def _changed(draw, op: OpOverload, args: list, dims: tuple[int, ...]) -> None:
    """One argument anew, by its type."""
    if args:
        at = draw(st.integers(0, len(args) - 1))
        each = op._schema.arguments[at]
        if not (str(each.real_type) == "Tensor" and at == 0):
            args[at] = _by_type(draw, str(each.real_type), each.name, dims)


# ---- tensors in a format -------------------------------------------------------------------------


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _sliced(x: Tensor) -> Tensor:
    """The same values with gaps."""
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1] + 1))
    wide[..., 1::2] = x
    return wide[..., 1::2]


STRIDES = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": _channels_last,
    "sliced": _sliced,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape) if x.shape[0] else x,
}


def _can_block(x: Tensor) -> bool:
    return 3 <= x.dim() <= 5 and x.layout == torch.strided


# What becomes of a drawn tensor, given its block.
Place = Callable[[Tensor, int], Tensor]


def blocked(x: Tensor, block: int) -> Tensor:
    return x.to_blocked(format_name(x.dim(), block)) if block and _can_block(x) else x


def dense(x: Tensor, block: int) -> Tensor:
    return x


def contiguous(x: Tensor, block: int) -> Tensor:
    return x.contiguous()


def in_float64(x: Tensor, block: int) -> Tensor:
    return x.contiguous().double() if x.is_floating_point() else x


@dataclass
class Call:
    """args and kwargs are dense. forms: for each tensor in them its strides and its block, 0 for a
    dense one."""

    op: OpOverload
    args: list
    kwargs: dict
    forms: list[tuple[str, int]] | None  # None: as they are

    def __str__(self) -> str:
        def words(x: Any) -> Any:
            return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else x

        args, kwargs = pytree.tree_map(words, (self.args, self.kwargs))
        return f"{self.op}(*{args}, **{kwargs}) with tensors {self.forms}"

    def arguments(self, place: Place) -> tuple[list, dict]:
        """New tensors of the same values and strides, each where `place` puts it."""
        forms = iter(self.forms or ())

        def placed(x: Tensor) -> Tensor:
            strides, block = next(forms, ("contiguous", 0))
            x = x.detach().clone()
            if _can_block(x):
                x = STRIDES[strides](x)
            return place(x, block)

        return pytree.tree_map_only(Tensor, placed, (self.args, self.kwargs))


@st.composite
def calls(draw) -> Call:
    op = draw(st.sampled_from(ops()))
    batch, channels = draw(st.sampled_from(BATCHES)), draw(st.sampled_from(CHANNELS))
    dims = _dims(draw, batch, channels)
    example = _example(draw, op, batch, channels)
    if example is None:
        # A row that takes no such tensor makes no call: then the op's own check is not reached.
        assume(not is_internal(op))
        example = _made(draw, op, dims)
    args, kwargs = example
    if not is_internal(op):
        for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
            _changed(draw, op, args, dims)
    dtype = draw(st.sampled_from(DTYPES))
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.dtype == torch.float32 else x, (args, kwargs)
    )
    _add_out(draw, op, args, kwargs, dims)
    return Call(op, args, kwargs, _forms(draw, op, args, kwargs))


def _add_out(draw, op: OpOverload, args: list, kwargs: dict, dims: tuple[int, ...]) -> None:
    """Tensors to write into, of the dims and dtypes of the results; rarely others."""
    names = [each.name for each in op._schema.arguments if each.is_out]
    if not names:
        return
    found = [torch.empty(0) for _ in names]
    if draw(st.integers(0, 9)):
        came = _ran(Call(op, args, kwargs | dict(zip(names, found, strict=True)), None), dense)
        found = found if came.error else came.results
    else:
        found = [_tensor(draw, dims) for _ in names]
    kwargs |= {name: each.clone() for name, each in zip(names, found, strict=True)}


def _forms(draw, op: OpOverload, args: list, kwargs: dict) -> list[tuple[str, int]]:
    """Strides and a block for each tensor; most have the same block. ATen refuses to write into an
    expanded tensor, and a blocked one has no element twice."""
    one = draw(st.sampled_from(BLOCKS))
    block = st.sampled_from((one, one, one, 0, *BLOCKS))
    written = {
        each.name for each in op._schema.arguments if each.alias_info and each.alias_info.is_write
    }
    named = dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
    forms = []
    # ATen's values are wrong where an `out` is not contiguous, or where what it calls itself gets a
    # tensor that is not.
    is_contiguous = is_internal(op) or follows_memory(op)
    outs = {each.name for each in op._schema.arguments if each.is_out}
    for name, value in named.items():
        strides = sorted(set(STRIDES) - ({"expanded"} if name in written else set()))
        strides = ["contiguous"] if is_contiguous or name in outs else strides
        for each in pytree.tree_leaves(value):
            if isinstance(each, Tensor):
                forms.append(draw(st.tuples(st.sampled_from(strides), block)))
    return forms


# ---- what must hold ------------------------------------------------------------------------------


@dataclass
class Came:
    """Of a call: its results or its error, and its arguments afterwards."""

    results: list
    error: Exception | None
    arguments: list


def _ran(call: Call, place: Place) -> Came:
    args, kwargs = call.arguments(place)
    torch.manual_seed(0)
    error, results = None, []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            results = pytree.tree_leaves(call.op(*args, **kwargs))
        except Exception as raised:  # any: its type is compared
            error = raised
    return Came(results, error, pytree.tree_leaves((args, kwargs)))


def _is_kind_of(error: Exception | None, other: Exception | None) -> bool:
    """Of two wrong arguments either may be refused first: for a type, say, with
    NotImplementedError, or for a size with RuntimeError, which is its base."""
    return other is not None and isinstance(error, type(other))


def check(call: Call) -> bool:
    """Raises AssertionError if something does not hold. Whether there is a result to compare.

    What ATen refuses and computes may depend on strides, and a blocked tensor has none: then it
    must be as for contiguous tensors. Where ATen itself is off by more than roundings, as of a root
    of a large degree, it must be as near to float64."""
    ours, theirs = _ran(call, blocked), _ran(call, dense)
    try:
        return _check_same(theirs, ours, theirs, call)
    except AssertionError:
        theirs = _ran(call, contiguous)
        exact = theirs if follows_memory(call.op) else _ran(call, in_float64)
        return _check_same(theirs, ours, theirs if exact.error else exact, call)


def _check_same(theirs: Came, ours: Came, exact: Came, call: Call) -> bool:
    if theirs.error or ours.error:
        same = _is_kind_of(ours.error, theirs.error) or _is_kind_of(theirs.error, ours.error)
        assert same, f"dense gives {theirs.error!r}, blocked {ours.error!r}: {call}"
        return False
    assert len(theirs.results) == len(ours.results), str(call)
    for each in zip(theirs.results, ours.results, exact.results, strict=True):
        _check_alike(*each, call)
    for each in zip(theirs.arguments, ours.arguments, exact.arguments, strict=True):
        _check_alike(*each, call)
    return True


def _check_alike(expected: Any, actual: Any, exact: Any, call: Call) -> None:
    if not isinstance(expected, Tensor):
        assert type(expected) is type(actual), f"{expected!r} and {actual!r}: {call}"
        return
    assert isinstance(actual, Tensor), f"a tensor and {actual!r}: {call}"
    if isinstance(actual, BlockedTensor):
        assert tail_is_zero(actual), f"the tail is not zero: {call}"
        assert actual.format == format_name(actual.dim(), actual.block), str(call)
        actual = actual.to_dense()
    assert expected.shape == actual.shape, f"dims {expected.shape}, {actual.shape}: {call}"
    assert expected.dtype == actual.dtype, f"{expected.dtype}, {actual.dtype}: {call}"
    # as_strided_() takes a negative size, and then most ops refuse its result.
    has_values = name_of(call.op) not in _UNINITIALISED and not expected.is_meta
    if has_values and expected.numel() > 0:
        limit = max(_rounding(expected, call), AS_EXACT * _off(exact, expected))
        wrong = difference(expected, actual, limit)
        assert not wrong, f"{wrong}: {call}"


def _rounding(result: Tensor, call: Call) -> float:
    """Of the result's type; with `out=`, whose type may be a finer one, of the arguments', too."""
    given = pytree.tree_leaves((call.args, call.kwargs)) if "out" in call.kwargs else []
    types = {each.dtype.to_real() for each in (result, *given) if isinstance(each, Tensor)}
    return max(ROUNDING.get(each, 0.0) for each in types)


def _off(expected: Tensor, actual: Tensor) -> float:
    """How far finite values are apart, relative to the largest."""
    if not expected.is_floating_point() or expected.shape != actual.shape:
        return 0.0
    expected, actual = expected.double(), actual.double()
    finite = expected.isfinite() & actual.isfinite()
    expected, actual = expected[finite], actual[finite]
    if not len(expected):
        return 0.0
    return (expected - actual).abs().max().item() / max(expected.abs().max().item(), 1.0)


def difference(expected: Tensor, actual: Tensor, limit: float) -> str:
    """ "" for the same values up to rounding."""
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    if not expected.is_floating_point():
        return "" if torch.equal(expected, actual) else "other numbers"
    if not torch.equal(expected.isfinite(), actual.isfinite()):
        return "other infinities or NaN"
    off = _off(expected, actual)
    return "" if off <= limit else f"off by {off:.3g} of the largest value"
