"""Blocked tensors inside torch.export, which traces above autograd.

There, an op asks the tracing modes before the tensor, and takes a mode's "not mine, ask the tensor"
for the answer. So a blocked tensor steps past the modes, and lets them see what its handler does
with the physical tensor: the exported program holds ops on plain tensors only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEY = torch._C.DispatchKey.PreDispatch


@contextmanager
def modes_seen(seen: bool) -> Iterator[None]:
    """Lets ops reach the modes of torch.export before the tensor they are called on, or keeps them
    from it."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, seen)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not seen)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)
