"""PyTorch's own database of operators over blocked inputs: one check, used by the suite and by
opinfo_report.py.

A sample counts if it has a floating tensor of 3 to 5 dims. Such tensors become blocked in five ways
(MODES); the result must be the dense one, and an input that dense refuses must be refused with the
same kind of exception."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree

import torch_blocked
from torch_blocked.tensor import BlockedTensor, format_name, tail_is_zero

# The database looks for the unittest.TestCase that asks for samples, by reading the whole stack,
# source lines included: in pytest's deep ones most of the time of an op.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

Convert = Callable[[int, Tensor], Tensor]


def blocked(block: int) -> Convert:
    return lambda position, x: x.to_blocked(format_name(x.dim(), block))


def only(wanted: Callable[[int], bool]) -> Convert:
    return lambda position, x: blocked(8)(position, x) if wanted(position) else x


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


# What becomes of the tensor arguments, by their position among those that can be blocked.
MODES: dict[str, Convert] = {
    "all": blocked(8),
    "first": only(lambda position: position == 0),
    "others": only(lambda position: position > 0),
    "mixed blocks": lambda position, x: blocked(16 if position % 2 else 8)(position, x),
    "channels last": lambda position, x: (
        channels_last(x) if position % 2 else blocked(8)(position, x)
    ),
}

# Ops that refuse a blocked tensor where dense gives a result.
REFUSED: dict[str, str] = {}

# Ops whose result is not a function of their input's values.
NOT_COMPARED = {
    "empty_like": "uninitialised values",
    "new_empty": "uninitialised values",
    "new_empty_strided": "uninitialised values",
    "empty_permuted": "uninitialised values",
    "empty_strided": "uninitialised values",
    "empty": "uninitialised values",
}


@dataclass
class Outcome:
    samples: int = 0
    compared: int = 0
    fallbacks: int = 0
    wrong: list[str] = field(default_factory=list)


def can_block(x: object) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dtype.is_floating_point
        and x.layout == torch.strided
        and 3 <= x.dim() <= 5
        and not isinstance(x, BlockedTensor)
    )


def converted(value, convert: Convert):
    """A copy of the arguments with what `convert` makes of those that can be blocked."""
    position = -1

    def leaf(x):
        nonlocal position
        if not isinstance(x, Tensor):
            return x
        if not can_block(x):
            return x.detach().clone().requires_grad_(x.requires_grad)
        position += 1
        with torch.no_grad():
            y = convert(position, x.detach().clone())
        return y.requires_grad_(x.requires_grad)

    return pytree.tree_map(leaf, value)


def samples(op, requires_grad: bool) -> Iterator:
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=requires_grad):
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if any(can_block(leaf) for leaf in leaves):
            yield sample


def run(op, arguments, backward: bool):
    """The results of the op, and the gradients of its arguments if asked for; or the exception."""
    input, args, kwargs = arguments
    torch.manual_seed(0)
    try:
        out = op(input, *args, **kwargs)
        if not backward:
            return pytree.tree_map_only(Tensor, dense, out)
        outputs = [o for o in pytree.tree_leaves(out) if isinstance(o, Tensor) and o.requires_grad]
        inputs = [a for a in pytree.tree_leaves(arguments) if isinstance(a, Tensor)]
        inputs = [a for a in inputs if a.requires_grad]
        if not outputs or not inputs or any(o.is_complex() for o in outputs):
            return None
        ones = [torch.ones_like(dense(o)) for o in outputs]
        grads = torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
        return [None if g is None else dense(g) for g in grads]
    except Exception as error:  # any kind: it is what is compared
        return error


def dense(x: Tensor) -> Tensor:
    if isinstance(x, BlockedTensor):
        assert tail_is_zero(x), "the tail is not zero"
        x = x.to_dense()
    return x.detach()


def disagreement(expected, actual) -> str | None:
    """What differs, in one line; None if nothing."""
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        if type(expected) is type(actual) or isinstance(actual, type(expected)):
            return None
        return f"dense gives {brief(expected)}, blocked {brief(actual)}"
    try:
        torch.testing.assert_close(
            actual, expected, equal_nan=True, rtol=1e-4, atol=1e-4, check_stride=False
        )
    except (AssertionError, ValueError, TypeError) as error:
        return brief(error)
    return None


def brief(value) -> str:
    if not isinstance(value, Exception):
        return "a result"
    return f"{type(value).__name__}: {' '.join(str(value).split())[:160]}"


def check(op, mode: str, backward: bool, most_samples: int | None = None) -> Outcome:
    """Runs the samples of an op in one mode."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, sample in enumerate(samples(op, backward)):
            if most_samples is not None and index >= most_samples:
                break
            arguments = (sample.input, sample.args, sample.kwargs)
            expected = run(op, converted(arguments, lambda _, x: x), backward)
            if backward and (expected is None or isinstance(expected, Exception)):
                continue
            with torch_blocked.profile() as p:
                actual = run(op, converted(copy.copy(arguments), MODES[mode]), backward)
            outcome.samples += 1
            outcome.fallbacks += p.fallbacks > 0
            if op.name in NOT_COMPARED and not isinstance(actual, Exception):
                continue
            if op.name in REFUSED and isinstance(actual, RuntimeError):
                continue
            outcome.compared += 1
            problem = disagreement(expected, actual)
            if problem:
                outcome.wrong.append(f"sample {index}: {problem}")
    return outcome


class Kept:
    """An op whose samples are made once, with gradients and without: making them takes longer than
    running a few."""

    def __init__(self, op):
        self.op, self.name = op, op.name
        self._samples = {}

    def sample_inputs(self, device, dtype, requires_grad=False):
        if requires_grad not in self._samples:
            samples = self.op.sample_inputs(device, dtype, requires_grad=requires_grad)
            self._samples[requires_grad] = list(samples)
        return (copy.copy(sample) for sample in self._samples[requires_grad])

    def inplace_variant(self, *args, **kwargs):
        return self.op.inplace_variant(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        return self.op(*args, **kwargs)


class InPlace:
    """The in-place variant of an op: its result must be the input object itself."""

    def __init__(self, op):
        self.op, self.name = op, op.name

    def sample_inputs(self, *args, **kwargs):
        for sample in self.op.sample_inputs(*args, **kwargs):
            if can_block(sample.input) and not sample.broadcasts_input:
                yield sample

    def __call__(self, input, *args, **kwargs):
        out = self.op.inplace_variant(input, *args, **kwargs)
        assert out is input
        return out


class Out:
    """An op that writes into `out`, which is zeros of the dims of its result, or of others."""

    def __init__(self, op, dims=None):
        self.op, self.name, self.dims = op, op.name, dims

    def sample_inputs(self, *args, **kwargs):
        for sample in self.op.sample_inputs(*args, **kwargs):
            result = self.op(sample.input, *sample.args, **sample.kwargs)
            if isinstance(result, Tensor):
                out = torch.zeros(self.dims or result.shape, dtype=result.dtype)
                if can_block(out):
                    sample.kwargs = {**sample.kwargs, "out": out}
                    yield sample

    def __call__(self, *args, out, **kwargs):
        result = self.op(*args, out=out, **kwargs)
        assert result is out
        return result


class Refused:
    """The arguments with which the database says that an op raises."""

    def __init__(self, op):
        self.op, self.name = op, op.name

    def sample_inputs(self, device, *_args, **_kwargs):
        return (error.sample_input for error in self.op.error_inputs(device))

    def __call__(self, *args, **kwargs):
        return self.op(*args, **kwargs)


# By name, the ops that take float32.
OPS = {
    op.full_name + (f" {op.variant_test_name}" if op.variant_test_name else ""): op
    for op in op_db
    if torch.float32 in op.dtypes
}
