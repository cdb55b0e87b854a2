"""Random calls of torch.ops.torch_blocked.*: none may end the process, hang or write beyond memory.

    python test/random/raw_calls.py --calls 10000 --seed 1
    python test/random/raw_calls.py --seed 1 --only 4711       one call, with its outcome

A call is one of helpers/op_examples.py with one to three arguments changed, or all tensors
changed alike, or garbage throughout. It may compute or raise. Calls run in forked processes, a
batch each; one that dies is reported with the call it died in, which the seed and its number make
again.

Memory errors show as signals: every dense input ends where a page without access begins, new memory
is not zero, and glibc checks each block that is freed."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# What makes errors in memory show: glibc reads these when a process starts. A library that is
# loaded first already is a sanitizer's, which sees more.
MALLOC = {"MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165", "LD_PRELOAD": "libc_malloc_debug.so.0"}
if __name__ == "__main__" and not {"MALLOC_CHECK_", "LD_PRELOAD"} & {*os.environ}:
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  which fake tensors need: once, not in each process
import torch.distributed.tensor  # noqa: E402, F401
from torch.utils import _pytree as pytree  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork: none before it

from helpers.op_examples import EXAMPLES, OPS  # noqa: E402

import torch_blocked  # noqa: E402

BATCH = 250
SECONDS = 20  # that a call may take
BYTES = 512 << 20  # of address space that a process may take beyond what it starts with

SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17)
HUGE_SIZES = (2**20, 2**24 + 1, 2**31, 2**40, 2**58)
INTS = (0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 2**20, -1, -2, -8, 2**31 - 1, 2**31, 2**32, 2**40)
HUGE_INTS = (2**61, 2**62, 2**63 - 1, -(2**62), -(2**63), 2**64)
FLOATS = (0.0, 1.0, -1.0, 1e-5, 1e38, 1e300, float("inf"), float("-inf"), float("nan"))
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.uint32,
)  # fmt: skip

# --- tensors


class Subclass(torch.Tensor):
    """One without a rule of its own."""


mprotect = ctypes.CDLL(None).mprotect


def guarded(values: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose last byte is the last before a page that may not be touched."""
    values = values.detach()
    if values.numel() == 0:
        return values.contiguous()
    used = values.numel() * values.itemsize
    room = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mprotect(ctypes.c_void_p(start + room), mmap.PAGESIZE, 0)
    flat = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=room - used)
    return flat.view(values.shape).copy_(values)


def plain(rng: random.Random, sizes, dtype=torch.float32) -> torch.Tensor:
    """Small values of any dtype, sometimes with a NaN and an infinity."""
    numel = torch.Size(sizes).numel()
    values = torch.arange(numel, dtype=torch.float64) % 7 - (0 if rng.random() < 0.5 else 1)
    if numel and rng.random() < 0.2:
        values[rng.randrange(numel)] = rng.choice((float("nan"), float("inf"), 1e30))
    return guarded(values.reshape(tuple(sizes)).to(dtype))


def garbage_sizes(rng: random.Random) -> list[int]:
    """Of rank 0 to 7; every second time those of a physical tensor."""
    if rng.random() < 0.5:
        spatial = [rng.choice(SIZES) for _ in range(rng.randint(1, 3))]
        return [
            rng.choice((0, 1, 2)),
            rng.choice((0, 1, 2, 3)),
            *spatial,
            rng.choice((4, 8, 16, 32, 7)),
        ]
    sizes = [rng.choice(SIZES) for _ in range(rng.randint(0, 7))]
    while torch.Size(sizes).numel() > 1 << 16:
        sizes[sizes.index(max(sizes))] = 1
    return sizes


def expanded(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """One dim of size 1, or one made so, repeated far beyond the memory it has."""
    if tensor.dim() == 0:
        return tensor
    dim = rng.randrange(tensor.dim())
    sizes = list(tensor.shape)
    sizes[dim] = rng.choice(HUGE_SIZES)
    return tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand(sizes)


def strided(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same rank in another order, or with gaps."""
    dims = list(range(tensor.dim()))
    if rng.random() < 0.5:
        return tensor.contiguous().movedim(0, -1).contiguous().movedim(-1, 0) if dims else tensor
    rng.shuffle(dims)
    return tensor.permute(dims)


def resized(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Another size in one dim, or another rank."""
    sizes = list(tensor.shape)
    if sizes and rng.random() < 0.7:
        sizes[rng.randrange(len(sizes))] = rng.choice(SIZES)
    elif sizes and rng.random() < 0.5:
        sizes.pop(rng.randrange(len(sizes)))
    else:
        sizes.insert(rng.randint(0, len(sizes)), rng.choice((1, 2, 8)))
    return plain(rng, sizes, tensor.dtype)


def converted(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return guarded(tensor.to(rng.choice(DTYPES)))


def empty(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """No elements, and perhaps an enormous size beside that."""
    sizes = list(tensor.shape)
    sizes[rng.randrange(len(sizes))] = rng.choice((3, *HUGE_SIZES))
    sizes[rng.randrange(len(sizes))] = 0
    return tensor.new_empty(sizes)


def empty_batch(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0] if tensor.dim() > 1 else tensor


def other_values(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return plain(rng, tensor.shape, tensor.dtype)


def of_kind(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    result = KINDS[rng.choice(list(KINDS))](tensor)
    result.is_final = True
    return result


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def with_little_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.itemsize)
    return tensor


def in_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with torch._subclasses.FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def as_blocked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(2, -1, 1, 1).to_blocked("nChw8c")


# Kinds of tensor that are not an ordinary strided one with memory of its own.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "requires_grad": lambda t: t.detach().clone().requires_grad_(),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(Subclass),
    "inference": in_inference_mode,
    "sparse": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.reshape(t.shape[0], -1).to_sparse_csr(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "meta": lambda t: t.to("meta"),
    "fake": fake,
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 1, torch.quint8),
    "quantized_by_channel": lambda t: torch.quantize_per_channel(
        t.float(), torch.ones(t.shape[0]), torch.zeros(t.shape[0]), 0, torch.qint8
    ),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "negative": lambda t: t.to(torch.complex64).conj().imag,
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "without_memory": without_memory,
    "with_little_memory": with_little_memory,
    "blocked": as_blocked,
    "view_of_blocked": lambda t: as_blocked(t)[0],
    "channels_last_1d": lambda t: torch_blocked.to_channels_last_1d(t.reshape(1, 2, -1)),
}  # fmt: skip


def tensor_like(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with one thing about it changed."""
    if hasattr(tensor, "is_final"):
        return tensor  # torch itself could not read some of them
    way = rng.choice((resized, converted, strided, expanded, empty, other_values, of_kind))
    try:
        return way(rng, tensor)
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
        return tensor  # there is no such


def garbage_tensor(rng: random.Random) -> torch.Tensor:
    dtype = torch.float32 if rng.random() < 0.5 else rng.choice(DTYPES)
    tensor = plain(rng, garbage_sizes(rng), dtype)
    return tensor if rng.random() < 0.6 else tensor_like(rng, tensor)


# --- arguments


def garbage_int(rng: random.Random) -> int:
    return rng.choice(HUGE_INTS if rng.random() < 0.2 else INTS)


def garbage_ints(rng: random.Random, values=()) -> list[int]:
    """A list, or one with a value changed, or of another length."""
    if values and rng.random() < 0.6:
        changed = list(values)
        changed[rng.randrange(len(changed))] = garbage_int(rng)
        return changed
    return [garbage_int(rng) for _ in range(rng.choice((0, 1, 2, 3, 4, 64)))]


def garbage(rng: random.Random, kind: str, value=None):
    """An argument of the schema's type `kind`, near `value` if there is one."""
    if kind.endswith("?") or kind.startswith("Optional["):
        if rng.random() < 0.2:
            return None
        kind = kind.removesuffix("?").removeprefix("Optional[").removesuffix("]")
    if rng.random() < 0.02:
        return rng.choice(("word", None, [], 1.5, {}, [None]))  # of another type
    if kind == "Tensor":
        near = isinstance(value, torch.Tensor) and rng.random() < 0.8
        return tensor_like(rng, value) if near else garbage_tensor(rng)
    if kind == "List[Tensor]":
        tensors = list(value or ()) + [garbage_tensor(rng) for _ in range(rng.choice((0, 0, 1, 3)))]
        if tensors and rng.random() < 0.8:
            at = rng.randrange(len(tensors))
            tensors[at] = tensor_like(rng, tensors[at])
        return tensors[: rng.choice((0, 1, 2, 9, 9))]
    if kind in ("int", "SymInt"):
        near = isinstance(value, int) and rng.random() < 0.3
        return value + rng.choice((-1, 1)) if near else garbage_int(rng)
    if kind in ("List[int]", "List[SymInt]"):
        return garbage_ints(rng, value or ())
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "List[bool]":
        length = len(value or ()) if rng.random() < 0.8 else rng.randint(0, 4)
        return [rng.random() < 0.5 for _ in range(length)]
    if kind == "float":
        return rng.choice(FLOATS)
    if kind == "List[float]":
        length = len(value or ()) if rng.random() < 0.8 else rng.randint(0, 4)
        return [rng.choice(FLOATS) for _ in range(length)]
    if kind == "ScalarType":
        return rng.choice(DTYPES)
    raise AssertionError(f"no generator for arguments of type {kind}")


@dataclass
class Call:
    op: str
    args: list
    kwargs: dict

    def run(self):
        return getattr(OPS, self.op).default(*self.args, **self.kwargs)

    def __str__(self) -> str:
        words = [words_of(value) for value in self.args]
        words += [f"{name}={words_of(value)}" for name, value in self.kwargs.items()]
        return f"{self.op}({', '.join(words)})"


def words_of(value) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(words_of, value))}]"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    words = [type(value).__name__, str(value.dtype), str(value.layout), str(value.device)]
    if not value.is_nested:
        words.append(str(list(value.shape)))
    if value.layout == torch.strided and not value.is_nested:
        words.append(f"strides {list(value.stride())}")
    return f"<{' '.join(word.removeprefix('torch.') for word in words)}>"


def alike(rng: random.Random, args: list) -> list:
    """The same thing changed about every tensor: they may still fit each other."""
    state, way = rng.random(), rng.choice((converted, strided, of_kind, empty_batch))
    dtype_only = way is converted

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if dtype_only and not tensor.is_floating_point():
            return tensor
        try:
            return way(random.Random(state), tensor)
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return tensor  # there is no such

    return pytree.tree_map_only(torch.Tensor, change, args)


def start(seed: int, index: int) -> tuple[random.Random, str]:
    rng = random.Random(f"{seed} {index}")
    return rng, rng.choice(sorted(EXAMPLES))


def make_call(seed: int, index: int) -> Call:
    """Call number `index` of the seed's."""
    rng, op = start(seed, index)
    arguments = getattr(OPS, op).default._schema.arguments
    args, kwargs = rng.choice(EXAMPLES[op])
    args, kwargs = pytree.tree_map_only(torch.Tensor, guarded, (list(args), dict(kwargs)))
    way = rng.choices(("all alike", "few", "garbage"), (3, 6, 1))[0]
    if way == "all alike":
        args = alike(rng, args)
    wild = way == "garbage"
    changed = list(range(len(arguments)))
    count = {"all alike": rng.randint(0, 1), "few": rng.choice((1, 1, 1, 2, 2, 3))}
    changed = rng.sample(changed, min(len(changed), count.get(way, len(changed))))
    for position in changed:
        argument = arguments[position]
        if argument.kwarg_only:
            kwargs[argument.name] = garbage(rng, str(argument.type), kwargs.get(argument.name))
        else:
            value = None if wild else args[position]
            args[position] = garbage(rng, str(argument.type), value)
    return Call(op, args, kwargs)


# --- processes


@dataclass
class Report:
    computed: Counter
    raised: Counter
    failures: list[str]

    def __str__(self) -> str:
        rows = [
            f"{op:24} {self.computed[op]:6} computed {self.raised[op]:6} raised"
            for op in sorted(EXAMPLES)
        ]
        count = self.computed.total() + self.raised.total()
        return "\n".join([*rows, *self.failures, f"{count} calls, {len(self.failures)} failures"])


COMPUTED, RAISED, STARTED = 1, 2, 3


def run_calls(seed: int, first: int, last: int, outcomes: mmap.mmap) -> None:
    """Runs the calls [first, last) in a process of their own, and notes the outcome of each."""
    torch.set_num_threads(1 + first // BATCH % 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for index in range(first, last):
        signal.alarm(SECONDS)
        outcomes[index] = STARTED
        outcomes[index] = outcome_of(make_call(seed, index))[0]


def outcome_of(call: Call) -> tuple[int, object]:
    try:
        result = call.run()
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                value.clone()  # reads all of it
    except Exception as error:
        return RAISED, error
    return COMPUTED, result


def run(seed: int, calls: int) -> Report:
    """Runs the first `calls` calls of the seed in batches."""
    report = Report(Counter(), Counter(), [])
    outcomes = mmap.mmap(-1, max(1, calls))
    first = 0
    while first < calls:
        last = min(calls, first + BATCH)
        child = os.fork()
        if child == 0:
            run_calls(seed, first, last, outcomes)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        ran = [outcomes[index] for index in range(first, last) if outcomes[index]]
        for index, outcome in enumerate(ran, first):
            op = start(seed, index)[1]
            report.computed[op] += outcome == COMPUTED
            report.raised[op] += outcome == RAISED
        if status != 0:
            died = first + len(ran) - 1
            report.failures.append(failure(seed, died, status))
            print(report.failures[-1], flush=True)
            last = died + 1
        first = last
    return report


def failure(seed: int, index: int, status: int) -> str:
    number = os.WTERMSIG(status)
    what = signal.Signals(number).name if number else f"exit status {os.WEXITSTATUS(status)}"
    if number == signal.SIGALRM:
        what = f"more than {SECONDS} s"
    return f"seed {seed} call {index}: {what} in {make_call(seed, index)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one call")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.only is not None:
        call = make_call(arguments.seed, arguments.only)
        print(call, flush=True)
        print(*outcome_of(call))
        return 0
    report = run(arguments.seed, arguments.calls)
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
