"""Random models given inputs of other kinds than the example's: dtypes, layouts, subclasses, ranks,
empty and huge sizes, other numbers of arguments, and callers that hand in tensors of their own.

    python test/random/random_inputs.py --models 200 --seed 1

The rule: a call gives what the dense model gives, in values, dims and dtype, or it raises; what the
dense model refuses is refused, except for view() of strides that it cannot view, which gives what
it gives of contiguous inputs, if it takes these; no call ends the process. Each call is in a
process of its own, forked from one in which the module is ready."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("TORCH_BLOCKED_CHECK", "1")
# Winograd convolutions take NaN and infinities to further pixels than ATen's do.
os.environ.setdefault("TORCH_BLOCKED_WINOGRAD", "0")
for _library in ("OMP", "MKL"):  # a team of threads made before a fork would be waited for after it
    os.environ[f"{_library}_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  once, before the forks
from helpers import isolated  # noqa: E402
from random_models import Program, random_program  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import torch_blocked as tb  # noqa: E402

FORMS = ("optimized", "loaded", "compiled")
_MORE_MEMORY = 3 << 30  # bytes that a call may take: what asks for huge results is refused


class Labelled(Tensor):
    """A user's subclass, which travels through every op."""

    @staticmethod
    def __new__(cls, data):
        return data.as_subclass(cls)


class Wrapped(Tensor):
    """A user's wrapper: no memory of its own, all ops on the tensor within."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.inner if isinstance(value, cls) else value

        out = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs or {}))
        return pytree.tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, out)


def _inference(x):
    with torch.inference_mode():
        return x.clone()


def _huge(x, d):
    """2**31 elements, all of them the same few in memory."""
    if x.dim() <= d:
        raise ValueError
    dims = list(x.shape)
    dims[d] = 2**31 // max(1, x.numel() // max(1, dims[d])) + 1
    return x.narrow(d, 0, 1).expand(dims)


def _spread(x):
    """The same values in every second place of memory, from the third on."""
    memory = torch.full((2 * x.numel() + 3,), 9e9).to(x.dtype)
    memory[3::2] = x.flatten()
    strides = [2 * each for each in x.contiguous().stride()]
    return memory.as_strided(x.shape, strides, 3)


def _of_size(x, d, size):
    dims = list(x.shape)
    dims[d] = size
    return torch.ones(dims, dtype=x.dtype)


def _tag(x, block):
    return f"nC{ {3: 'w', 4: 'hw', 5: 'dhw'}[x.dim()] }{block}c"


# One tensor for another. A change raises where it cannot be made: channels-last of a vector.
DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
]
CHANGES = {
    **{f"dtype {str(each)[6:]}": lambda x, each=each: x.to(each) for each in DTYPES},
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels last 3d": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "transposed memory": lambda x: x.mT.contiguous().mT,
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "spread memory": _spread,
    "expanded batch": lambda x: x[:1].expand_as(x),
    "expanded space": lambda x: x[..., :1].expand_as(x),
    "a slice": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "offset": lambda x: torch.cat((x, x))[x.shape[0] :],
    "flipped twice": lambda x: x.flip(0).flip(0),
    "sparse": lambda x: x.to_sparse(),
    "sparse csr": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "meta": lambda x: x.to("meta"),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "a result with grad": lambda x: x.clone().requires_grad_() * 1,
    "inference": _inference,
    "parameter": lambda x: nn.Parameter(x.clone()),
    "conj": lambda x: torch.complex(x, x).conj(),
    "imag of conj": lambda x: torch.complex(x, -x).conj().imag,
    "real of complex": lambda x: torch.complex(x, x).real,
    "subclass": Labelled,
    "wrapper": Wrapped,
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "functional": lambda x: torch._to_functional_tensor(x),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "shared": lambda x: x.clone().share_memory_(),
    "freed": lambda x: (x.clone(), x)[0].untyped_storage().resize_(0) and x,
    **{f"block {b}": lambda x, b=b: x.to_blocked(_tag(x, b)) for b in (4, 8, 16, 32)},
    "blocked float64": lambda x: x.double().to_blocked(),
    "blocked half": lambda x: x.half().to_blocked(),
    "blocked with grad": lambda x: x.clone().requires_grad_().to_blocked(),
    "blocked, empty batch": lambda x: x[:0].to_blocked(),
    "blocked view": lambda x: torch.cat((x, x)).to_blocked()[: x.shape[0]],
    **{f"rank {r}": lambda x, r=r: torch.ones([2] * r, dtype=x.dtype) for r in range(7)},
    "a dim more": lambda x: x[None],
    "a dim less": lambda x: x[0],
    **{
        f"dim {d} of {n}": lambda x, d=d, n=n: _of_size(x, d, n)
        for d in (0, 1, 2, -1)
        for n in (0, 1, 7)
    },
    "all dims 0": lambda x: torch.ones([0] * x.dim(), dtype=x.dtype),
    **{f"huge dim {d}": lambda x, d=d: _huge(x, d) for d in range(4)},
    "none": lambda x: None,
    "a number": lambda x: 2.0,
    "an integer": lambda x: 3,
    "true": lambda x: True,
    "a list": lambda x: [x],
    "nested lists of numbers": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "a string": lambda x: "x",
    "a dict": lambda x: {"x": x},
    "infinite": lambda x: torch.full_like(x, float("inf")),
    "NaN": lambda x: torch.full_like(x, float("nan")),
}


# All arguments for others; gives positional and keyword ones.
ARGUMENTS = {
    "none at all": lambda args, names: ((), {}),
    "one more": lambda args, names: ((*args, args[0]), {}),
    "one less": lambda args, names: (args[:-1], {}),
    "twice": lambda args, names: (args * 2, {}),
    "by keyword": lambda args, names: ((), dict(zip(names, args, strict=True))),
    "last by keyword": lambda args, names: (args[:-1], {names[-1]: args[-1]}),
    "twice given": lambda args, names: (args, {names[0]: args[0]}),
    "unknown keyword": lambda args, names: (args, {"nobody": args[0]}),
    "in a tuple": lambda args, names: ((args,), {}),
    "reversed": lambda args, names: (args[::-1], {}),
    "the same for all": lambda args, names: ((args[0],) * len(args), {}),
}

# Who calls: each gives what module(*args) gives, or something like it, from the same tensors.
CALLERS = {
    "vmap": lambda module, args: torch.func.vmap(module)(*(x[None] for x in args)),
    "functionalize": lambda module, args: torch.func.functionalize(module)(*args),
    "jvp": lambda module, args: torch.func.jvp(module, args, args)[0],
    "grad": lambda module, args: torch.func.grad(
        lambda *a: sum(x.sum() for x in pytree.tree_leaves(module(*a)) if isinstance(x, Tensor))
    )(*args),
    "export": lambda module, args: torch.export.export(module, args).module()(*args),
    "trace": lambda module, args: torch.jit.trace(module, args, check_trace=False)(*args),
    "make_fx": lambda module, args: make_fx(lambda *a: module(*a))(*args)(*args),
    "make_fx symbolic": lambda module, args: make_fx(lambda *a: module(*a), "symbolic")(*args)(
        *args
    ),
    "checkpoint": lambda module, args: torch.utils.checkpoint.checkpoint(
        module, *args, use_reentrant=False
    ),
    "fake mode": lambda module, args: _under_fake_mode(module, args),
    "autocast": lambda module, args: _under_autocast(module, args),
    "inference mode": lambda module, args: torch.inference_mode()(lambda: module(*args))(),
    "grad mode": lambda module, args: torch.enable_grad()(lambda: module(*args))(),
    "two threads": lambda module, args: _on_threads(module, args, 2),
}


def _under_fake_mode(module, args):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return module(*(mode.from_tensor(x) for x in args))


def _under_autocast(module, args):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(*args)


def _on_threads(module, args, count):
    torch.set_num_threads(count)
    return module(*args)


# autocast may compute in float32 instead: the error of bfloat16 is what it allows, not what it asks
# for, and behind a norm of small numbers it is larger than any tolerance.
COARSE = {"autocast"}


def cases_of(program: Program) -> list[tuple[str, str]]:
    names = [("caller", each) for each in CALLERS]
    names += [("arguments", each) for each in ARGUMENTS]
    return names + [("change", each) for each in CHANGES]


def call(kind: str, name: str, module, program: Program):
    """What the module gives for the case; raises what it raises."""
    args = program.arguments(0)
    if kind == "caller":
        return CALLERS[name](module, args)
    if kind == "arguments":
        args, kwargs = ARGUMENTS[name](args, [each for each, _ in program.inputs])
        return module(*args, **kwargs)
    which = random.Random(f"{program.seed} {name}").randrange(len(args))
    changed = [CHANGES[name](x) if i == which else x for i, x in enumerate(args)]
    return module(*changed)


def _possible(kind: str, name: str, program: Program) -> bool:
    """Whether a change can be made of the model's inputs. It runs in the parent of all cases, so
    callers, which set what holds for a process, are not tried."""
    try:
        return kind != "change" or call(kind, name, lambda *args: True, program)
    except Exception:
        return False


def _plain(x: Tensor) -> Tensor | None:
    """The values, or None where there are none to read."""
    if isinstance(x, Wrapped):
        x = x.inner
    if x.is_meta or isinstance(x, torch._subclasses.FakeTensor):
        return None
    if torch._is_functional_tensor(x):
        torch._sync(x)
        x = torch._from_functional_tensor(x)
    if x.is_quantized:
        return x.dequantize()
    if x.is_nested:
        x = x.to_padded_tensor(0.0)
    x = x.detach().as_subclass(Tensor) if isinstance(x, Labelled) else x.detach()
    return x.to_dense() if tb.is_blocked(x) or x.layout != torch.strided else x


def _tensors_of(results):
    """Tensors for arrays: what a model makes of an array may be one."""
    return pytree.tree_map_only(numpy.ndarray, torch.from_numpy, results)


_WRONG_VALUES = "wrong values"


def differs(wanted, got, coarse: bool) -> str:
    """In what a call's result differs from the dense model's; nothing if it does not."""
    wanted, got = (pytree.tree_leaves(_tensors_of(each)) for each in (wanted, got))
    if len(wanted) != len(got):
        return f"expected {len(wanted)} results, got {len(got)}"
    for want, have in zip(wanted, got, strict=True):
        if isinstance(want, Tensor) != isinstance(have, Tensor):
            return f"expected {type(want).__name__}, got {type(have).__name__}"
        if not isinstance(want, Tensor):
            if want != have:
                return f"expected {want}, got {have}"
            continue
        if want.is_nested:
            return "" if have.is_nested else "expected a nested tensor"
        if (want.shape, want.dtype) != (have.shape, have.dtype) and not coarse:
            return f"expected {list(want.shape)} {want.dtype}, got {list(have.shape)} {have.dtype}"
        values, own = _plain(want), _plain(have)
        if (values is None) != (own is None):
            return f"expected {type(want).__name__} on {want.device}, got {have.device}"
        if values is not None and not _close(values, own, want.dtype, coarse):
            return f"{_WRONG_VALUES}, {want.dtype}"
    return ""


def _with_one_infinity(x: Tensor) -> Tensor:
    """The same for all that is not finite. Convolutions that are added become one, which is
    infinite where the model subtracts infinities."""
    return torch.where(x.isfinite(), x, math.inf) if x.is_floating_point() else x


def _close(want: Tensor, have: Tensor, dtype: torch.dtype, coarse: bool) -> bool:
    if torch.equal(want, have):  # a huge view of few elements needs no memory for this
        return True
    accuracy = {torch.float64: 2e-5, torch.float32: 2e-4}.get(dtype, 4e-2)
    accuracy = 0.3 if coarse else accuracy
    if not want.is_complex():
        want, have = want.double(), have.double()
    finite = want[want.isfinite()]
    scale = max(1e-2, float(finite.abs().max())) if finite.numel() else 1.0
    return torch.allclose(have, want, rtol=accuracy, atol=accuracy * scale, equal_nan=True)


def _is_as_exact(job: tuple, wanted, got) -> bool:
    """Whether the form is as near to the model in float64 as the model itself is, within a factor
    of 4. A norm of equal values divides what is only rounding by next to nothing."""
    program, _, kind, name = job
    model = program.build().double()

    def in_float64(*args, **kwargs):
        args, kwargs = pytree.tree_map_only(Tensor, _in_float64, (args, kwargs))
        return model(*args, **kwargs)

    try:
        exact = call(kind, name, in_float64, program)
    except Exception:
        return False
    leaves = (pytree.tree_leaves(_tensors_of(each)) for each in (wanted, got, exact))
    for want, have, true in zip(*leaves, strict=True):
        if isinstance(true, Tensor) and true.is_floating_point():
            far, near = (float((_plain(x).double() - true).abs().max()) for x in (have, want))
            if not far <= 4 * near:  # not for NaN
                return False
    return True


def _in_float64(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() or x.dtype == torch.bool else x


def _is_of_torch(form: str, case: str) -> bool:
    """What torch.compile does with every backend, "eager" among them: it ends the process for a
    nested tensor, takes arrays for tensors, and unrolls a loop over a huge dim step by step."""
    return form == "compiled" and (case in ("nested", "numpy") or case.startswith("huge"))


def ready(program: Program, form: str):
    """The module of a form, called once."""
    model, example = program.build(), program.arguments(0)
    if form == "compiled":
        module = torch.compile(model, backend="torch_blocked")
    else:
        options = {"tune": False}
        if "verify" in inspect.signature(tb.optimize).parameters:
            options["verify"] = False
        module = tb.optimize(model, example, **options)
    if form == "loaded":
        with tempfile.TemporaryDirectory() as folder:
            module.save(os.path.join(folder, "model"))
            module = tb.load(os.path.join(folder, "model"))
    module(*example)
    return module


def _of_contiguous(model):
    def contiguous(value):
        return value.contiguous() if isinstance(value, Tensor) else value

    return lambda *args, **kwargs: model(*pytree.tree_map(contiguous, args), **kwargs)


def check_case(job: tuple, note) -> str:
    """What is wrong with a case, in words; nothing if all is well."""
    program, module, kind, name = job
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        taken = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MORE_MEMORY, hard))
    torch.manual_seed(0)
    note("dense")
    try:
        wanted, refusal = call(kind, name, program.build(), program), None
    except Exception as error:
        wanted, refusal = None, error
    note("form")
    try:
        got = call(kind, name, module, program)
    except Exception:
        return ""
    note("comparison")
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    if "view size is not compatible" in str(refusal):
        try:
            wanted, refusal = call(kind, name, _of_contiguous(program.build()), program), None
        except RuntimeError as error:  # views of the model's own, of a tensor of a subclass
            return "" if "view size is not compatible" in str(error) else str(error)
    if refusal is not None and name not in COARSE:
        return f"took what the dense model refuses ({type(refusal).__name__}: {str(refusal)[:100]})"
    if name == "infinite":
        wanted, got = pytree.tree_map_only(Tensor, _with_one_infinity, (wanted, got))
    wrong = "" if refusal else differs(wanted, got, name in COARSE)
    if wrong.startswith(_WRONG_VALUES) and _is_as_exact(job, wanted, got):
        wrong = ""
    if refusal or (wrong and name in COARSE):
        wrong = differs(program.build()(*program.arguments(0)), got, coarse=True)
    return wrong


def check_model(job: tuple, note) -> list[tuple[str, str, str]]:
    """All cases of one model in one form: kind, name and what is wrong."""
    seed, form, cases = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    program = random_program(seed)
    with torch.no_grad():
        note("capture")
        try:
            module = ready(program, form)
        except NotImplementedError:  # a model in parts is not saved
            return []
        wanted = [
            each
            for each in cases or cases_of(program)
            if _possible(*each, program) and not _is_of_torch(form, each[1])
        ]
        note("cases")
        jobs = [(program, module, *each) for each in wanted]
        wrong = []
        for outcome in isolated.run(check_case, jobs, at_once=1, limit=90):
            _, _, kind, name = outcome.case
            note(name)
            if outcome.death and outcome.note != "dense":
                wrong.append((kind, name, outcome.death))
            elif outcome.value:
                wrong.append((kind, name, outcome.value))
        return wrong


def run_models(seeds, forms=FORMS, jobs: int = 1, cases=None, say=print) -> list[str]:
    """A sentence for each case that breaks the rule, said when it comes."""
    torch.set_num_threads(1)
    work = [(seed, form, cases) for seed in seeds for form in forms]
    failures = []
    for outcome in isolated.run(check_model, work, jobs=jobs, limit=200):
        seed, form, _ = outcome.case
        found = outcome.value
        if outcome.death:
            found = [("model", outcome.note, outcome.death)]
        elif isinstance(found, str):
            found = [("model", "the example", found.strip().splitlines()[-1][:200])]
        for kind, name, text in found:
            failures.append(f"{form}, {kind} {name!r}: {text}")
            say(f"seed {seed}, {failures[-1]}")
        if found:
            say(random_program(seed).source() + "\n")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; default: a new one")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--case", help="the name of one case")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    seeds = range(first, first + options.models)
    cases = None
    if options.case:
        cases = [each for each in cases_of(random_program(first)) if each[1] == options.case]
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    start = time.monotonic()
    failures = run_models(
        seeds, options.forms.split(","), options.jobs, cases, lambda text: print(text, flush=True)
    )
    for text, count in Counter(failures).most_common():
        print(f"{count:6} {text}")
    print(f"{len(seeds)} models: {len(failures)} failures, {time.monotonic() - start:.0f} s")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
