"""A model as one graph of torch.export that serves as many sizes as the model does, and refuses
others.

torch.export records what the model asks of sizes during the trace. The resulting conditions stand
at the start of the graph (SizeCheck), so the graph never gives other values than the model."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_blocked.recurrent_layers import WholeLayers, name_whole_layers
from torch_blocked.state import unchanged
from torch_blocked.verify import difference, others_like
from torch_blocked.watched import at_least

_Arguments = tuple[Any, ...]
# How many different sizes of the calibration inputs are tried as the example of an export.
_TRIED = 4
# Tolerance of float32 results of the same ops, relative to the largest value.
_SAME_OPS = 1e-4
# Sizes about which a trace for other sizes says nothing.
_SMALL = (1, 0)


_Place = tuple[int, int]  # a leaf of the arguments, and a dim of it


class _Sizes:
    """Stands for a tensor in guards, which read `leaf[0].size()[2]`. It asks for that size only, so
    a capture of the graph still serves inputs whose other sizes change."""

    def __init__(self, at: int, size: Callable[[_Place], int]) -> None:
        self.at, self.asked = at, size

    def size(self) -> _Sizes:
        return self

    def __getitem__(self, dim: int) -> int:
        return self.asked((self.at, dim))


@dataclass
class _Input:
    """The requirement on one leaf of the arguments. dims: the dims of a tensor, None where guards
    decide; value: the value of a leaf that is no tensor."""

    name: str
    dims: list[int | None] | None = None
    value: Any = None

    def broken(self, given: Any) -> str:
        if self.dims is None:
            same = type(given) is type(self.value) and (given == self.value or given is self.value)
            return "" if same else f"{self.name} is {self.value!r}"
        if not isinstance(given, Tensor) or given.dim() != len(self.dims):
            return f"{self.name} is a tensor of {len(self.dims)} dims"
        for dim, size in enumerate(self.dims):
            if size is not None and given.size(dim) != size:
                return f"{self.name}.size({dim}) == {size}"
        return ""


class _Guard:
    """A condition of sizes."""

    def __init__(self, code: str, words: str) -> None:
        """code: Python of the list `leaf`; words: the same with the inputs' names."""
        self.words = words
        namespace = {**SYMPY_INTERP, "math": math, "torch": torch, "inf": math.inf}
        exec(f"def holds(leaf):\n  return {code}\n", namespace)
        self._holds: Callable[[Sequence[Any]], bool] = namespace["holds"]  # type: ignore[assignment]
        self.enough = _enough(code, self.of_sizes)

    def of_sizes(self, sizes: dict[_Place, int]) -> bool:
        return self._of([_Sizes(at, sizes.__getitem__) for at in range(1 + max(sizes)[0])])

    def refuses_only(self, places: Sequence[_Place], size: int) -> bool:
        """Whether the condition is of the size at these places alone, and holds for all larger than
        `size`, but not for that."""
        if not self.enough or not set(self.enough).issubset(places):
            return False
        holds_beyond = max(self.enough.values()) <= size + 1
        return holds_beyond and not self.of_sizes(dict.fromkeys(self.enough, size))

    def holds(self, leaves: Sequence[Any], may_be_none: set[_Place]) -> bool:
        """may_be_none: dims that were compared at size 0; this size counts as 1 in guards."""
        if self.enough and all(
            (length <= 1 and place in may_be_none) or at_least(leaves[place[0]], place[1], length)
            for place, length in self.enough.items()
        ):
            return True

        def size(place: _Place) -> int:
            length: int = leaves[place[0]].size(place[1])
            return max(length, 1) if self.enough and place in may_be_none else length

        return self._of(
            [
                _Sizes(at, size) if isinstance(each, Tensor) else each
                for at, each in enumerate(leaves)
            ]
        )

    def _of(self, leaves: Sequence[Any]) -> bool:
        try:
            return bool(self._holds(leaves))
        except ZeroDivisionError:  # a division by a size of 0
            return False


_LONG = 1 << 14


def _enough(code: str, holds: Callable[[dict[_Place, int]], bool]) -> dict[_Place, int]:
    """Sizes from which on a guard holds, whatever the other sizes; empty if unknown.

    They are known for guards that say that a number is less than an expression that grows with all
    sizes."""
    compared = ast.parse(code.strip(), mode="eval").body
    if not isinstance(compared, ast.Compare) or len(compared.ops) > 1:
        return {}
    op, sides = compared.ops[0], (compared.left, compared.comparators[0])
    more, less = sides if isinstance(op, ast.Gt | ast.GtE | ast.NotEq) else reversed(sides)
    if isinstance(op, ast.NotEq) and _is_number(more):
        more, less = less, more
    known = isinstance(op, ast.Gt | ast.GtE | ast.Lt | ast.LtE | ast.NotEq)
    if not known or not _is_number(less) or not _grows(more):
        return {}
    places = [_place_of(each) for each in ast.walk(more) if _is_size(each)]
    if isinstance(op, ast.NotEq):  # the expression grows beyond the number
        beyond = _Guard(f"({ast.unparse(more)}) > ({ast.unparse(less)})", "")
        return beyond.enough
    lengths = dict.fromkeys(places, _LONG)
    if not places or not holds(lengths):
        return {}
    for place in places:
        least, most = 0, _LONG
        while least < most:
            middle = (least + most) // 2
            if holds({**dict.fromkeys(places, _LONG), place: middle}):
                most = middle
            else:
                least = middle + 1
        lengths[place] = least
    while not holds(lengths):
        lengths = {place: 2 * length + 1 for place, length in lengths.items()}
    return lengths


def _is_number(node: ast.expr) -> bool:
    return not any(_is_size(each) for each in ast.walk(node))


def _is_size(node: ast.AST) -> bool:
    """leaf[0].size()[2]"""
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call)


def _place_of(node: Any) -> _Place:
    return node.value.func.value.slice.value, node.slice.value


def _grows(node: ast.expr) -> bool:
    """Whether an expression is never less for larger sizes, and never below 0."""
    if _is_size(node):
        return True
    match node:
        case ast.Constant(value=int() | float() as number):
            return number >= 0
        case ast.BinOp(op=ast.Add() | ast.Mult()):
            return _grows(node.left) and _grows(node.right)
        case ast.BinOp(op=ast.FloorDiv(), right=ast.Constant(value=int() as by)):
            return by > 0 and _grows(node.left)
        case ast.Call(func=ast.Name(id="max" | "Max")):
            return all(map(_grows, node.args))
    return False


class SizeCheck(nn.Module):
    """Raises ValueError for leaves of arguments that a graph does not serve."""

    def __init__(self, inputs: list[_Input], guards: list[_Guard]) -> None:
        super().__init__()
        self.inputs, self.guards = inputs, guards
        self.may_be_none: set[_Place] = set()
        self._is_impure = True  # so that dead code elimination keeps the check

    def broken(self, leaves: Sequence[Any]) -> str:
        """The first rule that does not hold; empty if all hold."""
        if len(leaves) != len(self.inputs):
            return f"there are {len(self.inputs)}"
        for rule, leaf in zip(self.inputs, leaves, strict=True):
            if what := rule.broken(leaf):
                return what
        for guard in self.guards:
            if not guard.holds(leaves, self.may_be_none):
                return guard.words
        return ""

    def guard(self, place: _Place, holds: str) -> _Guard:
        """holds: of the size at a place, as in "> 1"."""
        (at, dim), name = place, self.inputs[place[0]].name
        return _Guard(f"leaf[{at}].size()[{dim}] {holds}", f"{name}.size()[{dim}] {holds}")

    def lift(self, places: Sequence[_Place], size: int) -> list[_Guard]:
        """Takes away, and returns, the guards that say only that the size at these places is
        larger, or another one."""
        taken = [each for each in self.guards if each.refuses_only(places, size)]
        self.guards = [each for each in self.guards if each not in taken]
        return taken

    def forward(self, *leaves: Any) -> None:
        if what := self.broken(leaves):
            got = ", ".join(map(_named, leaves))
            raise ValueError(
                f"torch_blocked::quantize: expected inputs for which {what}, as in calibration, "
                f"got {got}; quantize the model with inputs of these sizes"
            )


def _named(leaf: Any) -> str:
    return str([*leaf.shape]) if isinstance(leaf, Tensor) else repr(leaf)


class _StructureCheck:
    """Sees the arguments before the graph takes them apart; the graph ignores additional items.
    Those that stay away in a call by name, and were None in calibration, are None again."""

    def __init__(self, spec: pytree.TreeSpec, absent: Collection[str]) -> None:
        self.spec, self.absent = spec, absent

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        signature = inspect.signature(module.forward)
        given = signature.bind_partial(*args, **kwargs).arguments
        absent = {name: None for name in self.absent if kwargs and name not in given}
        bound = signature.bind(*args, **kwargs, **absent)
        spec = pytree.tree_structure((bound.args, {}))
        if spec != self.spec:
            raise ValueError(
                f"torch_blocked::quantize: expected arguments as those of calibration, {self.spec},"
                f" got {spec}; call it with the same number and types of arguments"
            )
        return bound.args, {}


@dataclass
class SizedGraph:
    """A float graph, and the check of its inputs."""

    module: fx.GraphModule
    check: SizeCheck
    spec: pytree.TreeSpec
    absent: tuple[str, ...]  # names of arguments that are None
    free: list[list[_Place]]  # sizes that may change; places in one list always have the same size

    def put_check_into(self, graph: fx.GraphModule) -> None:
        """Puts the check at the start of a graph with the same inputs."""
        graph.add_submodule("_guards_fn", self.check)  # as torch.export calls its own
        leaves = graph.graph.find_nodes(op="placeholder")
        with graph.graph.inserting_after(leaves[-1]):
            graph.graph.call_module("_guards_fn", tuple(leaves))
        graph.recompile()
        graph._forward_pre_hooks.clear()
        graph._forward_pre_hooks_with_kwargs.clear()
        graph.register_forward_pre_hook(_StructureCheck(self.spec, self.absent), with_kwargs=True)


def sized_export(model: nn.Module, cases: Sequence[_Arguments]) -> SizedGraph:
    """The model for the sizes of all cases, and for other sizes that its own code allows. Raises
    ValueError if one graph does not serve all cases, or torch.export cannot trace the model; and
    what the model itself raises."""
    for is_free in (_every_dim, _first_dim):
        for example in _examples(cases):
            try:
                found = _exported(model, example, is_free)
            except Exception:  # of many kinds: the model cannot be traced with sizes that change
                continue
            if _holds_for(model, found, cases):
                return found
    static = _static(model, cases[0])
    for case in cases:
        static.check(*pytree.tree_leaves(case))
    return static


def _static(model: nn.Module, case: _Arguments) -> SizedGraph:
    try:
        return _exported(model, case, _no_dim)
    except Exception as error:
        result = _results(model, case, model)
        if isinstance(result, Exception):
            raise result from None
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            "torch_blocked::quantize: expected a model that torch.export can trace, got "
            f"{type(model).__name__}: {type(error).__name__}: {reason}; quantize the parts that it "
            "traces"
        ) from error


def _examples(cases: Sequence[_Arguments]) -> Iterator[_Arguments]:
    """Cases of different sizes. Each comes first with a batch of two in place of one, because some
    ops take a size of one for fixed."""
    seen: list[Any] = []
    for case in cases:
        sizes = [each.shape for each in pytree.tree_leaves(case) if isinstance(each, Tensor)]
        if sizes in seen or len(seen) == _TRIED:
            continue
        seen.append(sizes)
        if any(len(each) > 1 and each[0] == 1 for each in sizes):
            yield pytree.tree_map_only(Tensor, _of_two, case)
        yield case


def _of_two(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() > 1 and len(tensor) == 1 else tensor


def _every_dim(dim: int) -> bool:
    return True


def _first_dim(dim: int) -> bool:
    return dim == 0


def _no_dim(dim: int) -> bool:
    return False


# Most operations in the formula of a size. In a network that computes its padding from each size,
# formulas grow four times after each layer that halves it, and the trace takes minutes.
_MOST_OPS = 100


class _ShortSizes(TorchFunctionMode):
    """Raises RuntimeError if sizes become long formulas of the input's sizes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = out.shape if isinstance(out, Tensor) else ()
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.count_ops() > _MOST_OPS:
                raise RuntimeError(f"a size of more than {_MOST_OPS} operations")
        return out


def _exported(model: nn.Module, example: _Arguments, is_free: Callable[[int], bool]) -> SizedGraph:
    """is_free: says of a dim whether its size may change."""

    def dims(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        kinds = torch.export.Dim
        return tuple(kinds.AUTO if is_free(dim) else kinds.STATIC for dim in range(leaf.dim()))

    shapes = pytree.tree_map(dims, example)
    named = dict(inspect.signature(model.forward).bind(*shapes).arguments)
    oblivious = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with (
        torch.no_grad(),
        unchanged(model),
        oblivious,
        _ShortSizes(),
        WholeLayers(),
        warnings.catch_warnings(),
    ):
        # Recurrent layers list their weights anew in each call.
        warnings.filterwarnings("ignore", "The tensor attributes .* were assigned during export")
        program = torch.export.export(model, example, dynamic_shapes=named, strict=False)
    module = program.module(check_guards=False)  # put_check_into() checks them, with messages
    name_whole_layers(module.graph)
    module.recompile()
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs, symbols = _inputs_of(placeholders)
    guards = _guards_of(program, model, example, inputs) if is_free(0) else []
    spec = program.call_spec.in_spec
    assert spec is not None
    given = inspect.signature(model.forward).bind(*example).arguments
    absent = tuple(name for name, value in given.items() if value is None)
    return SizedGraph(module, SizeCheck(inputs, guards), spec, absent, list(symbols.values()))


def _inputs_of(
    placeholders: Iterable[fx.Node],
) -> tuple[list[_Input], dict[str, list[_Place]]]:
    inputs: list[_Input] = []
    symbols: dict[str, list[_Place]] = {}
    for at, node in enumerate(placeholders):
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            inputs.append(_Input(str(node.target), None, value))
            continue
        dims: list[int | None] = [s if isinstance(s, int) else None for s in value.shape]
        for dim, size in enumerate(value.shape):
            if dims[dim] is None:
                symbols.setdefault(str(size), []).append((at, dim))
        inputs.append(_Input(str(node.target), dims))
    return inputs, symbols


def _guards_of(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    example: _Arguments,
    inputs: list[_Input],
) -> list[_Guard]:
    """The conditions that torch.export has recorded for sizes that may change. Raises RuntimeError
    for a condition that does not concern the inputs."""
    given = inspect.signature(model.forward).bind(*example).arguments
    paths = ["L" + pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(given)]
    guards = []
    for code in itertools.chain(*map(_conditions, program._guards_code)):
        words = code
        for at, (path, rule) in enumerate(zip(paths, inputs, strict=True)):
            for name in (path, f"L['flat_args'][{at}]"):
                code = _replaced(code, name, f"leaf[{at}]")
                words = _replaced(words, name, rule.name)
        if "L[" in code:
            raise RuntimeError(f"a guard is of no input: {code}")
        guards.append(_Guard(code, words))
    return guards


def _conditions(code: str) -> list[str]:
    """The parts of a condition, all of which must hold."""
    node = ast.parse(code.strip(), mode="eval").body
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return [ast.unparse(each) for each in node.values]
    return [ast.unparse(node)]


def _replaced(code: str, name: str, by: str) -> str:
    """`code` with a path replaced where it does not continue: L['x'] is no part of L['x'][0]."""
    parts = code.split(name)
    text = parts[0]
    for part in parts[1:]:
        text += (name if part.startswith("[") else by) + part
    return text


def _holds_for(model: nn.Module, found: SizedGraph, cases: Sequence[_Arguments]) -> bool:
    """Whether the graph takes all cases, and agrees with the model at other sizes too. The trace
    says nothing about sizes 1 and 0, or that they are others; they are refused where graph and
    model differ."""
    check = found.check
    said = [{size: check.lift(places, size) for size in _SMALL} for places in found.free]
    if any(check.broken(pytree.tree_leaves(case)) for case in cases):
        return False
    if any(not _agree(model, found, case) for case in (cases[0], _other(model, found, cases))):
        return False
    for places, others in zip(found.free, said, strict=True):
        check.may_be_none |= set(places)
        for size in _SMALL:
            if _agree(model, found, _with_size(cases[0], places, size)):
                continue
            check.guards += others[size]
            if not others[size]:
                check.may_be_none -= set(places)
                check.guards.append(check.guard(places[0], f"> {size}"))
                break
    return True


def _other(model: nn.Module, found: SizedGraph, cases: Sequence[_Arguments]) -> _Arguments:
    """Arguments of sizes that no case has, if the model takes any."""
    for case in others_like(cases[0]):
        broken = found.check.broken(pytree.tree_leaves(case))
        if not broken and not isinstance(_results(model, case, model), Exception):
            return case  # type: ignore[no-any-return]
    return cases[0]


def _with_size(case: _Arguments, places: list[_Place], size: int) -> _Arguments:
    leaves, spec = pytree.tree_flatten(case)
    for at, dim in places:
        index = torch.arange(size) % max(leaves[at].shape[dim], 1)
        leaves[at] = leaves[at].index_select(dim, index)
    return pytree.tree_unflatten(leaves, spec)  # type: ignore[no-any-return]


def _agree(model: nn.Module, found: SizedGraph, case: _Arguments) -> bool:
    """Whether model and graph agree on a case, or both refuse it, or the check refuses it."""
    if found.check.broken(pytree.tree_leaves(case)):
        return True
    expected, result = (_results(each, case, model) for each in (model, found.module))
    if isinstance(expected, Exception) or isinstance(result, Exception):
        return isinstance(expected, Exception) and isinstance(result, Exception)
    return not difference(expected, result, _SAME_OPS)


def _results(run: nn.Module, case: _Arguments, model: nn.Module) -> Any:
    """The results of `run`, or its error; the model and the random generator stay as they were."""
    with torch.no_grad(), unchanged(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return run(*pytree.tree_map_only(Tensor, torch.clone, case))
            except Exception as error:
                return error
