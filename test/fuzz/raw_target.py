"""Raw ops of the library with arguments of any kind: a result, or an exception.

The bytes of an input are the choices of raw_calls.py, in their order. Every dense argument ends
before a page without access, so what is read beyond it is a signal."""

from __future__ import annotations

import re
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import raw_calls
import torch
from from_bytes import Choices
from torch.utils import _pytree as pytree

OPS = sorted(raw_calls.EXAMPLES)


def made(content: bytes) -> raw_calls.Call:
    choose = Choices(content)
    op = choose.choice(OPS)
    arguments = getattr(raw_calls.OPS, op).default._schema.arguments
    args, kwargs = choose.choice(raw_calls.EXAMPLES[op])
    args, kwargs = pytree.tree_map_only(torch.Tensor, raw_calls.guarded, (list(args), dict(kwargs)))
    if choose.randrange(4) == 3:
        args = raw_calls.alike(choose, args)
    for at in choose.sample(range(len(arguments)), min(choose.randrange(4), len(arguments))):
        kind, name = str(arguments[at].type), arguments[at].name
        if arguments[at].kwarg_only:
            kwargs[name] = raw_calls.garbage(choose, kind, kwargs.get(name))
        else:
            args[at] = raw_calls.garbage(choose, kind, args[at])
    return raw_calls.Call(op, args, kwargs)


def prepare() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


@contextmanager
def limited() -> Iterator[None]:
    """Sizes may be any. Memory that is not there is an exception, and not seconds of copying. The
    fuzzer itself needs more and more, so the limit begins at what is used now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + raw_calls.BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(content: bytes) -> None:
    call = made(content)
    with limited():
        outcome, error = raw_calls.outcome_of(call)
    if outcome != raw_calls.RAISED or not re.match(r"torch_blocked::\w+: ", str(error)):
        return  # torch's own words for arguments of another kind
    said = f"{type(error).__name__}: {error}: {call}"
    assert isinstance(error, (ValueError, TypeError, NotImplementedError, RuntimeError)), said
    assert ": expected " in str(error) and ", got " in str(error), said
