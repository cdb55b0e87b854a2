"""Blocked tensors inside torch.export, which traces above autograd.

There an op asks the tracing modes before the tensor, and takes a mode's NotImplemented for the
answer. So a blocked tensor bypasses the modes, and lets them see the ops of its handler on the
physical tensor. The exported program holds ops on plain tensors only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEY = torch._C.DispatchKey.PreDispatch


@contextmanager
def modes_seen(seen: bool) -> Iterator[None]:
    """Lets the modes of torch.export see ops before the tensor does, or hides ops from them."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, seen)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not seen)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)
