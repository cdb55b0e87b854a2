"""Random models in every form against the dense model.

    python test/random/fuzz_models.py --models 10000 --seed 1 --jobs 2
    python test/random/fuzz_models.py --seed-only 4711

Every model runs dense, in float32 and float64, at two sizes, one in four at six, and then

- eager:     on blocked inputs,
- optimized: by torch_blocked.optimize, called with dense or blocked inputs,
- loaded:    saved after sizes that ran, and loaded: one model in four,
- bfloat16:  by torch_blocked.optimize(dtype=torch.bfloat16), with all that has kernels in
             bfloat16, faster or not; its errors are held against a model that rounds every number,
- compiled:  by torch.compile(backend="torch_blocked"), which tracing makes slow: one model in
             `--compile-every`, at two sizes, one in four of them at all six.

Models that make blocked tensors or take .data are captured in parts or by torch.export for each
size anew, which takes half of the time: one in four of them is optimized, one in sixteen runs at
six sizes. `--compile-every 1` runs every model in every form at every size.

Values, dims, dtypes and structure must agree, and inputs hold afterwards what the dense model
leaves in them. A failure prints the seed, the form, the size and the model's source, cut down.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_BLOCKED_CHECK", "1")
for _library in ("OMP", "MKL"):  # a team of threads made before a fork would be waited for after it
    os.environ[f"{_library}_NUM_THREADS"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # models on two threads beside another job
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  once, before the forks
from helpers import isolated  # noqa: E402
from random_models import OTHER_SIZES, Program, random_program, smaller  # noqa: E402
from rounded import in_bfloat16  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import torch_blocked as tb  # noqa: E402
from torch_blocked.tensor import format_name  # noqa: E402
from torch_blocked.verify import nudged  # noqa: E402

tb.optimized_module.OptimizedModule._computes = "narrow"
FORMS = ("eager", "optimized", "bfloat16", "loaded", "compiled")
# What save() names in its warning: for sizes that a file may hold, ATen's reads beyond memory.
TRUSTED = ("aten::unfold_backward",)
_BLOCKS = (None, None, None, 8, 16, 4, 32)

# Where a result depends on whether a number is above another, rounding may decide.
_DECIDES = re.compile(
    r"logical|sign|round|floor|ceil|trunc|frac|[<>]|where|arg|topk|sort|([gl][te]|eq|ne)_?\(|%"
)

# What a form may refuse although the dense model gives a result: form, words, where that is said.
REFUSALS = (
    ("loaded", r"ValueError: .*expected inputs like earlier ones", "a new size"),
    ("loaded", r"NotImplementedError: .*expected a model that is captured whole", "parts"),
    ("loaded", r"NotImplementedError: .*expected tuples, lists and dicts", "a namedtuple"),
    # Dynamo's own, of backend="eager", too. It leaves recurrent modules out, which read a view of
    # what is blocked then.
    ("compiled", r"InternalTorchDynamoError: SyntaxError: ", "a blocked view of dynamic sizes"),
)


@dataclass
class Failure:
    seed: int
    form: str
    size: int
    kind: str  # equal for failures of one cause, as far as can be told
    text: str

    def alike(self, other: Failure | None) -> bool:
        return other is not None and (self.form, self.kind) == (other.form, other.kind)


class Reference:
    """What the dense model gives at each size."""

    def __init__(self, program: Program, sizes: list[int]) -> None:
        self.program = program
        self.model = program.build()
        exact = None if program.single else program.build().double()
        self.results, self.exact, self.after = {}, {}, {}
        for size in sizes:
            inputs = program.arguments(size)
            self.results[size] = self.model(*inputs)
            self.after[size] = inputs
            self.exact[size] = self._in_float64(exact, size) if exact else self.results[size]

    def _in_float64(self, exact: nn.Module, size: int):
        inputs = (x.double() if x.is_floating_point() else x for x in self.program.arguments(size))
        try:
            return exact(*inputs)
        except (RuntimeError, TypeError):  # the model names float32 somewhere
            return self.results[size]

    def differs(self, size: int, results, inputs, narrow=False) -> tuple[str, str] | None:
        """In what the results, or the inputs afterwards, differ: a short kind and a sentence.
        narrow: they may be off as far as bfloat16 rounds."""
        wanted, spec = pytree.tree_flatten(self.results[size])
        got, got_spec = pytree.tree_flatten(results)
        if got_spec != spec:
            return "structure", f"expected {spec}, got {got_spec}"
        exact = pytree.tree_leaves(self.exact[size])
        coarse = [None] * len(exact)
        if narrow:
            coarse = pytree.tree_leaves(in_bfloat16(self.model, *self.program.arguments(size)))
        for i, (want, have, value, near) in enumerate(zip(wanted, got, exact, coarse, strict=True)):
            found = self._leaf(want, have, value, near)
            if found and not (found[0] == "value" and self._is_of_rounding(size, i, want, have)):
                return found[0], f"result {i}: {found[1]}"
        for i, (want, have) in enumerate(zip(self.after[size], inputs, strict=True)):
            most = 5e-2 if narrow else 1e-3
            if not torch.allclose(want.float(), dense(have).float(), rtol=most, atol=most / 10):
                return "input", f"input {i} holds other values afterwards"
        return None

    def _is_of_rounding(self, size: int, i: int, want, have) -> bool:
        """Whether a nudge of the inputs, as rounding makes it, moves a result about as far: a layer
        norm of two numbers that are all but equal makes 1e-4 of 1e-7."""
        if not want.is_floating_point():
            return False
        nudge = self.model(*nudged(self.program.arguments(size), torch.finfo(torch.float32).eps))
        moved = dense(pytree.tree_leaves(nudge)[i]) - dense(want)
        error = dense(have) - dense(want)
        return bool(error.isfinite().all()) and bool(error.abs().max() <= 50 * moved.abs().max())

    def _leaf(self, want, have, exact, coarse=None) -> tuple[str, str] | None:
        if not isinstance(want, Tensor):
            if type(want) is type(have) and want == have:
                return None
            return "constant", f"expected {want!r}, got {have!r}"
        if not isinstance(have, Tensor):
            return "constant", f"expected a tensor, got {have!r}"
        if isinstance(have, torch._subclasses.FakeTensor):
            return "fake", "a FakeTensor"
        if want.shape != have.shape:
            return "shape", f"expected {tuple(want.shape)}, got {tuple(have.shape)}"
        if want.dtype != have.dtype:
            return "dtype", f"expected {want.dtype}, got {have.dtype}"
        want, have, exact = (_real(dense(each)) for each in (want, have, exact))
        if not want.numel():
            return None
        if coarse is not None:
            return self._narrow_leaf(have, exact, _real(dense(coarse)))
        own = float((want - exact).abs().max())
        scale = float(exact.abs().max())
        steps = self.program.depth() + 4
        tolerance = 50 * own + (4e-2 if self.program.coarse else 4e-6 * steps) * max(scale, 1.0)
        error = (have - exact).abs()
        if bool((error <= tolerance).all()):
            return None
        if bool(have.isfinite().all()):
            worst = float(error.max())
            return (
                "value",
                f"off by {worst:.3g} of {scale:.3g} (dense: {own:.1g}, allowed: {tolerance:.1g})",
            )
        return "value", f"{int((~have.isfinite()).sum())} NaN or infinite values of {have.numel()}"

    def _narrow_leaf(self, have, exact, coarse) -> tuple[str, str] | None:
        scale = max(float(exact.abs().max()), 1.0)
        own = (coarse - exact).abs()
        if not bool(own.isfinite().all()) or float(own.max()) > 0.1 * scale:
            return None  # rounding decides it
        tolerance = 6 * float(own.max()) + 0.05 * scale
        error = (have - exact).abs()
        beyond = float((error > tolerance).double().mean())
        if beyond == 0 or (beyond <= 0.01 and _DECIDES.search(self.program.source())):
            return None
        return (
            "value",
            f"off by {float(error.max()):.3g} of {scale:.3g} (rounded: {float(own.max()):.1g})",
        )


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double()


def dense(x: Tensor) -> Tensor:
    return x.to_dense() if tb.is_blocked(x) else x


def blocked(inputs: tuple[Tensor, ...], choose: random.Random) -> tuple[Tensor, ...]:
    """Each input of 3 to 5 dims in some block."""
    return tuple(
        x.to_blocked(_tag(x, choose.choice(_BLOCKS))) if 3 <= x.dim() <= 5 else x for x in inputs
    )


def _tag(x: Tensor, block: int | None) -> str | None:
    return block and format_name(x.dim(), block)


@dataclass
class Case:
    """A model, or a part of one while it is cut down, in some forms."""

    program: Program
    forms: tuple[str, ...]
    sizes: tuple[int, ...]
    compile_sizes: int = 2


class Forms:
    """Runs a case; the options of a form depend on the seed only."""

    def __init__(self, case: Case, note) -> None:
        self.case, self.program, self.note = case, case.program, note
        self.seed = case.program.seed
        self.reference = Reference(case.program, list(case.sizes))
        self.kept: nn.Module | None = None  # the optimized module, for `loaded`

    def failures(self) -> list[Failure]:
        return [found for form in self.case.forms if (found := self._of(form))]

    def _of(self, form: str) -> Failure | None:
        self.form, self.size = form, 0
        self.note((form, 0))
        try:
            return getattr(self, form)()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            if any(form == each and re.match(words, text) for each, words, _ in REFUSALS):
                return None
            kind = re.sub(r"0x[0-9a-f]+|\d+", "#", text.splitlines()[0])[:100]
            return Failure(self.seed, form, self.size, kind, text[:1500])

    def _call(self, module, size: int, as_blocked: bool, narrow=False) -> Failure | None:
        self.size = size
        self.note((self.form, size))
        inputs = self.program.arguments(size)
        if as_blocked:
            inputs = blocked(inputs, random.Random(self.seed + size))
        found = self.reference.differs(size, module(*inputs), inputs, narrow)
        return found and Failure(self.seed, self.form, size, *found)

    def _calls(self, module, sizes, as_blocked=lambda size: False, narrow=False):
        for size in sizes:
            if failure := self._call(module, size, as_blocked(size), narrow):
                return failure
        return None

    def _optimize(self, **more) -> nn.Module:
        options = more | {"tune": self.seed % 16 == 0, "dynamic": self.seed % 8 != 1}
        if "verify" in inspect.signature(tb.optimize).parameters:
            options["verify"] = False  # it must not be what hides a difference
        example = self.program.arguments(0)
        if self.seed % 5 == 2:
            example = blocked(example, random.Random(self.seed))
        return tb.optimize(self.program.build(), example, **options)

    def eager(self) -> Failure | None:
        return self._calls(self.program.build(), self.case.sizes, lambda size: True)

    def optimized(self) -> Failure | None:
        """Some are called again, at the example's size, by another number of threads."""
        self.kept = self._optimize()
        mixed = self.seed % 3 == 0
        failure = self._calls(self.kept, self.case.sizes, lambda size: mixed and size % 2 == 1)
        if failure is None and self.seed % 7 == 0:
            torch.set_num_threads(3 - torch.get_num_threads())
            failure = self._call(self.kept, 0, False)
        return failure

    def bfloat16(self) -> Failure | None:
        module, mixed = self._optimize(dtype=torch.bfloat16), self.seed % 3 == 0
        return self._calls(module, self.case.sizes, lambda size: mixed and size % 2 == 1, True)

    def loaded(self) -> Failure | None:
        """Saved after all sizes ran, or for odd seeds after the example and the next one."""
        module, must = self.kept, self.case.sizes
        if module is None or self.seed % 2:
            module, must = self._optimize(), self.case.sizes[:2]
        with torch.no_grad():
            for size in must:
                self.note((self.form, size))
                module(*self.program.arguments(size))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model")
            module.save(path)
            again = tb.load(path, ops=TRUSTED)
        failure = self._loaded_calls(again, must)
        return failure or self._calls(again, [each for each in self.case.sizes if each not in must])

    def _loaded_calls(self, module, sizes) -> Failure | None:
        try:
            return self._calls(module, sizes)
        except ValueError as error:  # no refusal counts here: these sizes ran before save()
            return Failure(self.seed, self.form, self.size, "refuses a size that ran", str(error))

    def compiled(self) -> Failure | None:
        torch._dynamo.reset()
        try:
            dynamic = (None, None, False, True)[self.seed // 3 % 4]
            module = torch.compile(self.program.build(), backend="torch_blocked", dynamic=dynamic)
            mixed = self.seed % 3 == 0
            sizes = self.case.sizes[: self.case.compile_sizes]
            return self._calls(module, sizes, lambda size: mixed)
        finally:
            torch._dynamo.reset()


def check(case: Case, note) -> list[Failure]:
    """What fails in the case; a model whose dense form fails is none."""
    torch.set_num_threads(2 if case.program.seed % 6 == 0 else 1)
    with torch.no_grad():
        return Forms(case, note).failures()


def case_of(seed: int, forms: tuple[str, ...], compile_every: int) -> Case:
    program = random_program(seed)
    often, cut = compile_every == 1, program.is_cut()
    wide = seed % 16 == 0 if cut else seed % 8 in (0, 5)
    runs = {
        "compiled": seed % compile_every == 0,
        "loaded": often or wide,
        "optimized": often or not cut or seed % 4 == 0,
        "bfloat16": often or not cut or seed % 4 == 0,
    }
    return Case(
        program,
        tuple(each for each in forms if runs.get(each, True)),
        tuple(range(1 + OTHER_SIZES if often or wide else 2)),
        6 if seed // compile_every % 4 == 0 else 2,
    )


def check_seed(job: tuple, note) -> list[Failure]:
    seed, forms, compile_every = job
    note(("generator", 0))
    torch.set_num_threads(1)
    return check(case_of(seed, forms, compile_every), note)


def _failures(outcome: isolated.Outcome, seed: int) -> list[Failure]:
    if outcome.death:
        form, size = outcome.note or ("generator", 0)
        return [Failure(seed, form, size, outcome.death, f"the process ended: {outcome.death}")]
    if isinstance(outcome.value, str):
        return [Failure(seed, "generator", 0, "the test itself", outcome.value)]
    return outcome.value


def cut_down(failure: Failure, tries: int = 150) -> tuple[Program, Failure]:
    """The smallest program found that still fails in this way, at the example's or this size."""

    def fails(program: Program) -> Failure | None:
        sizes = tuple(dict.fromkeys((0, failure.size)))
        forms = ("optimized", "loaded") if failure.form == "loaded" else (failure.form,)
        case = Case(program, forms, sizes, len(sizes))
        found = _failures(isolated.alone(check, case), failure.seed)
        return next((each for each in found if failure.alike(each)), None)

    program, seen = random_program(failure.seed), set()
    best = failure
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in smaller(program):
            text = candidate.source()
            if text in seen:
                continue
            seen.add(text)
            tries -= 1
            if tries < 0:
                break
            if found := fails(candidate):
                program, best, progress = candidate, found, True
                break
    return program, best


def report(failure: Failure) -> str:
    if failure.form == "generator":  # making the model ends this process, too, or is no model
        return f"seed {failure.seed}, while it was made: {failure.kind}: {failure.text}\n"
    program, failure = cut_down(failure)
    return (
        f"seed {failure.seed}, {failure.form}, size {failure.size}: {failure.kind}: "
        f"{failure.text}\n"
        f"rerun: python test/random/fuzz_models.py --seed-only {failure.seed} "
        f"--forms {failure.form}\n"
        f"{program.source()}\n"
    )


def run_seeds(
    seeds, forms=FORMS, compile_every: int = 16, jobs: int = 1, shrink: int = 3, say=print
):
    """Runs the models of these seeds; the failures, each said when it comes. shrink: how many of a
    kind are cut down."""
    torch.set_num_threads(1)
    failures, kinds, done, start = [], Counter(), 0, time.monotonic()
    cases = [(seed, tuple(forms), compile_every) for seed in seeds]
    for outcome in isolated.run(check_seed, cases, jobs=jobs):
        done += 1
        for failure in _failures(outcome, outcome.case[0]):
            failures.append(failure)
            kind = (failure.form, failure.kind)
            kinds[kind] += 1
            if kinds[kind] <= shrink:
                say(report(failure))
            else:
                say(f"seed {failure.seed}, {failure.form}, size {failure.size}: {failure.kind}")
        if done % 500 == 0:
            say(f"{done} models, {len(failures)} failures, {time.monotonic() - start:.0f} s")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; default: a new one")
    parser.add_argument("--seed-only", type=int, help="this model alone")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--compile-every", type=int, default=16)
    parser.add_argument("--shrink", type=int, default=2, help="failures of a kind to cut down")
    options = parser.parse_args()
    forms = tuple(options.forms.split(","))
    if unknown := set(forms) - set(FORMS):
        parser.error(f"expected forms out of {', '.join(FORMS)}, got {', '.join(unknown)}")
    first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    seeds = range(first, first + options.models)
    if options.seed_only is not None:
        seeds, options.compile_every = [options.seed_only], 1
    print(f"seeds {seeds[0]} to {seeds[-1]}, forms {', '.join(forms)}", flush=True)
    start = time.monotonic()
    failures = run_seeds(
        seeds,
        forms,
        options.compile_every,
        options.jobs,
        options.shrink,
        lambda text: print(text, flush=True),
    )
    for (form, kind), count in Counter((each.form, each.kind) for each in failures).most_common():
        print(f"{count:6} {form}: {kind}")
    print(
        f"{len(seeds)} models, seeds {seeds[0]} to {seeds[-1]}: {len(failures)} failures, "
        f"{time.monotonic() - start:.0f} s"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
