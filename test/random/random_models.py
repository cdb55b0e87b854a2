"""Small random models, as programs that can be printed, run at several sizes and cut down.

`RandomModel(seed)` strings pieces (random_pieces.py) together. Each is tried with the dense model
at all six sizes while the model grows, and dropped where that refuses it, so every model runs at
all of them. Values stay near 1, and no output jumps where an input changes by a rounding.
"""

from __future__ import annotations

import collections
import itertools
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import random_branches  # noqa: F401  its pieces
import random_modules  # noqa: F401  its pieces
import random_results
import random_tokens  # noqa: F401  its pieces
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from random_layers import CHANNELS
from random_pieces import PIECES, Skip
from torch import Tensor, nn

import torch_blocked  # noqa: F401  Tensor.to_blocked

OTHER_SIZES = 5  # beside the example's

Pair = collections.namedtuple("Pair", ("first", "second"))


class Halved(torch.autograd.Function):
    """A function of a user's, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


@torch.jit.script
def scripted(x):
    return torch.relu(x) - 0.1 * x


_NAMES = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "Pair": Pair,
    "Halved": Halved,
    "scripted": scripted,
    "TABLE": random_results.TABLE,
    "GRID": random_results.GRID,
}

_LARGEST = 20.0  # a value beyond this is scaled
_MOST_ELEMENTS = 40_000
_VALUE = re.compile(r"\b[vx]\d+\b")
_CUT = re.compile(r"\.data\b|to_blocked\(|\bfloat\(\w+\.|\bint\(|\.nonzero\(|checkpoint\(")


@dataclass(frozen=True)
class Statement:
    """Some lines of the forward, and the modules and constants that they use."""

    code: str
    made: tuple[tuple[str, str], ...] = ()  # attribute, expression

    def names(self) -> set[str]:
        return set(_VALUE.findall(self.code))


@dataclass(frozen=True)
class Program:
    """A model in words: what `source` prints and `build` makes."""

    seed: int
    inputs: tuple[tuple[str, str], ...]  # name, kind
    shapes: tuple[
        tuple[tuple[int, ...], ...], ...
    ]  # of each input, at the example's and other sizes
    statements: tuple[Statement, ...]
    result: str
    single: bool = False  # another dtype within: the reference is float32, too
    coarse: bool = False  # half precision within

    def forward_source(self) -> str:
        lines = [f"def forward(self, {', '.join(name for name, _ in self.inputs)}):"]
        for each in self.statements:
            lines += ["    " + line for line in each.code.splitlines()]
        return "\n".join([*lines, f"    return {self.result}"])

    def source(self) -> str:
        """The model as a person would write it."""
        made = [f"self.{name} = {text}" for each in self.statements for name, text in each.made]
        sizes = [
            f"# {name} ({kind}): {[list(row[i]) for row in self.shapes]}"
            for i, (name, kind) in enumerate(self.inputs)
        ]
        return "\n".join([*sizes, *made, self.forward_source()])

    def build(self) -> nn.Module:
        """The model in evaluation mode; its weights depend on the seed and their names only."""
        model = nn.Module.__new__(type("Random", (nn.Module,), {"forward": self._function()}))
        nn.Module.__init__(model)
        for statement in self.statements:
            for name, text in statement.made:
                attach(model, self.seed, name, text)
        return model.eval()

    def _function(self):
        names = dict(_NAMES)
        exec(compile(self.forward_source(), f"<random model {self.seed}>", "exec"), names)
        return names["forward"]

    def arguments(self, size: int) -> tuple[Tensor, ...]:
        """The inputs at one of the sizes; 0 is the example."""
        generator = torch.Generator().manual_seed(self.seed * 31 + size)
        return tuple(
            _input(kind, dims, generator)
            for (_, kind), dims in zip(self.inputs, self.shapes[size], strict=True)
        )

    def is_cut(self) -> bool:
        """Whether it runs in parts, or is captured by torch.export, for each size anew."""
        return any(_CUT.search(each.code) for each in self.statements)

    def depth(self) -> int:
        return sum(each.code.count("\n") + 1 for each in self.statements)


def _input(kind: str, dims: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "ids":
        return torch.randint(0, 10, dims, generator=generator)
    if kind == "mask":
        return torch.rand(dims, generator=generator) > 0.5
    return torch.randn(dims, generator=generator)


def attach(model: nn.Module, seed: int, name: str, text: str) -> None:
    """Gives the model what `text` makes, with weights that keep the size of values."""
    torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    made = eval(text, dict(_NAMES))
    if isinstance(made, nn.Module):
        for part in made.modules():
            for label, value in (*part._parameters.items(), *part._buffers.items()):
                if value is None or not value.is_floating_point():
                    continue
                with torch.no_grad():
                    if label == "running_var":
                        value.uniform_(0.5, 2)
                    elif value.dim() > 1:
                        value.mul_(1.7)
                    elif isinstance(part, nn.PReLU):
                        value.uniform_(-1.5, 1.5)
                    elif "norm" in type(part).__name__.lower():
                        value.uniform_(-1, 1.5)
        made.eval()
    setattr(model, name, made)


class _Builder:
    """What pieces see: the values so far, at all sizes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.count = itertools.count()
        self.model = nn.Module()
        self.statements: list[Statement] = []
        self.made: list[tuple[str, str]] = []
        self.out = ""
        self.double = self.coarse = False
        self.used: set[str] = set()
        self.exact: set[str] = set()  # inputs: no rounding moves them
        self.mutates_inputs = self.rng.random() < 0.02
        self.inputs, self.shapes = _inputs(self.rng)
        self.program = Program(seed, tuple(self.inputs), self.shapes, (), "None")
        self.restart()

    def restart(self) -> None:
        """All values anew: after a statement that was dropped may have written to them."""
        self.scopes = []
        for size in range(len(self.shapes)):
            arguments = self.program.arguments(size)
            scope = dict(_NAMES, self=self.model)
            scope |= {name: x for (name, _), x in zip(self.inputs, arguments, strict=True)}
            self.scopes.append(scope)
        self.exact = {name for name, kind in self.inputs if kind == "float"}
        for statement in self.statements:
            code = compile(statement.code, "<piece>", "exec")
            for scope in self.scopes:
                exec(code, scope)

    # What pieces ask.

    def values(self, name: str) -> list[Tensor]:
        return [scope[name] for scope in self.scopes]

    def rank(self, name: str) -> int:
        return self.scopes[0][name].dim()

    def dims(self, name: str) -> list[int]:
        """The sizes of a value; -1 where they differ from size to size."""
        shapes = [tuple(each.shape) for each in self.values(name)]
        return [dim[0] if len(set(dim)) == 1 else -1 for dim in zip(*shapes, strict=True)]

    def sizes(self, name: str, d: int) -> list[int]:
        return [each.shape[d] for each in self.values(name)]

    def least(self, name: str, d: int) -> int:
        return min(self.sizes(name, d))

    def middle_numel(self, name: str) -> int:
        return sorted(each.numel() for each in self.values(name))[len(self.scopes) // 2]

    def measured(self, text: str, d: int = 1) -> tuple[int, int]:
        """The rank of an expression and its size along d, which must be the same at all sizes."""
        code = compile(text, "<piece>", "eval")
        results = [eval(code, scope) for scope in self.scopes]
        if results[0].dim() == 0 or d >= results[0].dim():
            raise Skip
        if len({each.shape[d] for each in results}) != 1 or results[0].dtype != torch.float32:
            raise Skip
        return results[0].dim(), results[0].shape[d]

    def _names(self) -> Iterator[str]:
        for name, value in self.scopes[0].items():
            if _VALUE.fullmatch(name) and isinstance(value, Tensor):
                yield name

    def pick(self, rank=None, fixed=(), any_float=False, where=None) -> str:
        """A value; those not used yet and those made last are likelier."""
        low, high = rank if isinstance(rank, tuple) else (rank, rank)
        fitting = []
        for name in self._names():
            value = self.scopes[0][name]
            if not low <= value.dim() <= high or not value.is_floating_point():
                continue
            if value.dtype != torch.float32 and not any_float:
                continue
            if fixed and any(self.dims(name)[d] < 1 for d in fixed):
                continue
            if where is None or where(name):
                fitting.append(name)
        if not fitting:
            raise Skip
        weights = [(i + 1) * (4 if name not in self.used else 1) for i, name in enumerate(fitting)]
        return self.rng.choices(fitting, weights)[0]

    def pick_like(self, x: str) -> str:
        """Another value of the dims of x, or else of its rank."""
        shapes = [each.shape for each in self.values(x)]
        rank = self.rank(x)
        try:
            return self.pick(
                (1, 6),
                any_float=True,
                where=lambda y: y != x and [each.shape for each in self.values(y)] == shapes,
            )
        except Skip:
            return self.pick((rank, rank), any_float=True)

    def pick_exact(self, x: str) -> str:
        names = [name for name in self._names() if name in self.exact]
        if not names:
            raise Skip
        return self.rng.choice(names)

    def pick_input(self, wanted: str) -> str:
        """An input of a kind that is no float."""
        names = [name for name, kind in self.inputs if kind == wanted]
        if not names:
            raise Skip
        return self.rng.choice(names)

    def module(self, text: str) -> str:
        name = f"m{next(self.count)}"
        attach(self.model, self.seed, name, text)
        self.made.append((name, text))
        return f"self.{name}"

    def constant(self, *dims: int) -> str:
        kind = self.rng.choice(("Parameter", "Buffer"))
        scale = "" if len(dims) < 2 else " * 0.3"
        sizes = f"({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"
        return self.module(f"nn.{kind}(torch.randn({sizes}){scale})")

    def another_dtype(self, coarse: bool) -> None:
        if self.rng.random() > 0.3:  # in few models: these lose the float64 reference
            raise Skip
        self.wants = (True, coarse)

    # Growing.

    def try_piece(self) -> None:
        weights = [weight for weight, _ in PIECES]
        _, make = self.rng.choices(PIECES, weights)[0]
        self.out, self.made, self.wants = f"v{next(self.count)}", [], (False, False)
        try:
            code = make(self)
            new = self._accepted(code)
        except Exception:  # what the dense model refuses is no model
            new = None
        if new is None:
            for name, _ in self.made:
                delattr(self.model, name)
            self.restart()
            return
        code = new
        statement = Statement(code, tuple(self.made))
        self.used |= statement.names() - {self.out}
        self.statements.append(statement)
        self.double |= self.wants[0]
        self.coarse |= self.wants[1]

    def _accepted(self, code: str) -> str | None:
        """The code, with its result scaled, if it may stay."""
        compiled = compile(code, "<piece>", "exec")
        for scope in self.scopes:
            exec(compiled, scope)
        if self.out in self.scopes[0]:
            results = self.values(self.out)
            if not all(isinstance(each, Tensor) and each.is_floating_point() for each in results):
                return None
            if len({(each.dim(), each.dtype) for each in results}) != 1:
                return None
            if max(each.numel() for each in results) > _MOST_ELEMENTS or results[0].dim() > 6:
                return None
            if any(each.numel() == 0 for each in results) and self.rng.random() > 0.05:
                return None
            largest = (
                max(float(each.abs().max()) for each in results if each.numel())
                if any(each.numel() for each in results)
                else 1.0
            )
            if not largest < 1e4 or (largest < 1e-3 and self.rng.random() < 0.9):
                return None
            if largest > _LARGEST:
                factor = f"\n{self.out} = {self.out} * {round(5 / largest, 4)}"
                for scope in self.scopes:
                    exec(factor.strip(), scope)
                code += factor
        for name in self._names():  # what was written to in place
            for each in self.values(name):
                if each.numel() and not float(each.float().abs().max()) < 100:
                    return None
        if not self.mutates_inputs and not self._inputs_unchanged():
            return None
        return code

    def _inputs_unchanged(self) -> bool:
        return all(
            torch.equal(scope[name], x)
            for size, scope in enumerate(self.scopes)
            for (name, _), x in zip(self.inputs, self.originals(size), strict=True)
        )

    def originals(self, size: int) -> tuple[Tensor, ...]:
        cache = self.__dict__.setdefault("_originals", {})
        if size not in cache:
            cache[size] = self.program.arguments(size)
        return cache[size]

    def result(self) -> str:
        """Everything that nothing reads, and now and then more (random_results.py)."""
        names = [name for name in self._names() if name.startswith("v")]
        ends = [name for name in names if name not in self.used] or names[-1:]
        if self.rng.random() < 0.25:
            ends += self.rng.sample(names, min(len(names), self.rng.randint(1, 2)))
        return random_results.result(self, ends)

    def holding(self, text: str) -> str:
        """An attribute of the model, which no statement of before reads."""
        self.made = []
        name = self.module(text)
        value = f"v{next(self.count)}"
        self.statements.append(Statement(f"{value} = {name}", tuple(self.made)))
        self.restart()
        return value

    def runs(self, text: str) -> bool:
        """Whether an expression has a value at all sizes."""
        try:
            for scope in self.scopes:
                eval(text, scope)
        except Exception:
            return False
        return True


def _inputs(rng: random.Random):
    """Names, kinds and shapes of the inputs at all sizes."""
    rank = rng.choices((4, 3, 5, 2), (10, 3, 2, 1))[0]
    spatial = max(0, rank - 2)
    low, high = {0: (1, 1), 1: (6, 40), 2: (6, 24), 3: (4, 9)}[spatial]
    multiple = rng.choice((1, 1, 1, 1, 2, 4)) if spatial < 3 else 1
    square = rng.random() < 0.3
    changes = rng.choice(("all", "all", "all", "batch", "space"))
    channels = rng.choice(CHANNELS)
    inputs, kinds = [("x0", "float")], ["same"]
    for i in range(1, 1 + rng.choices((0, 1, 2), (10, 4, 1))[0]):
        kind = rng.choice(
            ("same", "same", "other channels", "half", "vector", "ids", "mask", "scalar")
        )
        inputs.append((f"x{i}", kind if kind in ("ids", "mask") else "float"))
        kinds.append(kind)
    widths = [rng.choice(CHANNELS) for _ in inputs]
    rows, first = [], None
    while len(rows) < 1 + OTHER_SIZES:
        n = rng.randint(1, 4)
        space = [-(-rng.randint(low, high) // multiple) * multiple for _ in range(spatial)]
        if square and spatial:
            space = space[:1] * spatial
        if first and changes == "batch":
            space = first[1]
        if first and changes == "space":
            n = first[0]
        first = first or (n, space)
        shapes = {
            "same": (n, channels, *space),
            "half": (n, channels, *(max(1, s // 2) for s in space)),
            "ids": (n, 5),
            "mask": (n, 1, *space),
            "scalar": (),
        }
        rows.append(
            tuple(
                shapes.get(kind)
                or {"other channels": (n, width, *space), "vector": (n, width), "scalar": ()}[kind]
                for kind, width in zip(kinds, widths, strict=True)
            )
        )
    return inputs, tuple(rows)


def random_program(seed: int) -> Program:
    """The program of a seed, the same on every machine."""
    with torch.no_grad(), torch.random.fork_rng():
        builder = _Builder(seed)
        wanted = builder.rng.randint(2, 12)
        for _ in range(8 * wanted):
            if len(builder.statements) >= wanted:
                break
            builder.try_piece()
        if not any(name.startswith("v") for name in builder._names()):
            builder.statements.append(Statement("v0 = x0 * 2"))
            builder.restart()
        result = builder.result()  # which may hold more
        program = replace(
            builder.program,
            statements=tuple(builder.statements),
            result=result,
            single=builder.double,
            coarse=builder.coarse,
        )
    return program


@dataclass
class RandomModel:
    """A model in evaluation mode, its example inputs, and inputs of five other sizes."""

    seed: int
    program: Program = field(init=False)
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.program = random_program(self.seed)
        self.model = self.program.build()

    @property
    def example(self) -> tuple[Tensor, ...]:
        return self.program.arguments(0)

    @property
    def others(self) -> list[tuple[Tensor, ...]]:
        return [self.program.arguments(1 + i) for i in range(OTHER_SIZES)]


def smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the smallest first: what a failing one is replaced by while it
    still fails."""
    ends = list(dict.fromkeys(_VALUE.findall(program.result)))
    if program.result not in ends:
        yield from (without_unused(replace(program, result=each)) for each in ends)
    for k, statement in enumerate(program.statements[:-1]):
        for name in sorted(statement.names(), reverse=True):
            if name.startswith("v"):
                yield without_unused(
                    replace(program, statements=program.statements[: k + 1], result=name)
                )
    for k in range(len(program.statements)):
        rest = program.statements[:k] + program.statements[k + 1 :]
        yield replace(program, statements=rest)
        made = re.match(r"(?:.*\n)*?(v\d+) = ", program.statements[k].code)
        for name in sorted(program.statements[k].names()) if made else ():
            if name != made[1]:  # one of its operands in its place
                renamed = [
                    replace(each, code=re.sub(rf"\b{made[1]}\b", name, each.code)) for each in rest
                ]
                result = re.sub(rf"\b{made[1]}\b", name, program.result)
                yield replace(program, statements=tuple(renamed), result=result)
        lines = program.statements[k].code.splitlines()
        for i in range(len(lines)) if len(lines) > 1 else ():
            code = "\n".join(lines[:i] + lines[i + 1 :])
            changed = replace(program.statements[k], code=code)
            yield replace(
                program,
                statements=(*program.statements[:k], changed, *program.statements[k + 1 :]),
            )


def without_unused(program: Program) -> Program:
    """Without the statements of which nothing reaches the result. What writes in place stays if it
    names a value that is wanted."""
    wanted, kept = set(_VALUE.findall(program.result)), []
    for statement in reversed(program.statements):
        if statement.names() & wanted:
            wanted |= statement.names()
            kept.append(statement)
    used = " ".join(each.code for each in kept)
    kept = [
        replace(each, made=tuple(m for m in each.made if f"self.{m[0]}" in used))
        for each in reversed(kept)
    ]
    return replace(program, statements=tuple(kept))
