"""`torch_blocked.strict()`: what is to be seen rather than to happen in silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch_blocked import _C, module_paths


class Refused(NotImplementedError):
    """Strict mode does not allow it; the message says what, where, and the way out."""


@dataclass
class _Rules:
    fallbacks: bool = True  # whether they are allowed, as by the next two
    reorders: int | None = None  # how many more; None: any number
    views: bool = True


class _Local(threading.local):
    rules = _Rules()


_local = _Local()


@contextmanager
def strict(*, reorders: bool | int = True, views: bool = True) -> Iterator[None]:
    """Inside it, an op without a blocked kernel raises NotImplementedError instead of running on a
    dense copy. The sentence names the op, the formats, the module, the user's line and the way out.
    Per thread; inside of another, both hold.

    reorders: False refuses all copies of activations from one format into another, `to_blocked` and
        `to_dense` and what an optimized model does inside included; a number allows so many.
    views: False refuses views that cannot share the memory of a blocked tensor and are copies,
        such as those of permute() and of channels that are no whole blocks.
    Raises ValueError for a negative number, TypeError for what is no number."""
    allowed = _checked(reorders)
    before = _local.rules
    left = [each for each in (allowed, before.reorders) if each is not None]
    _local.rules = _Rules(False, min(left, default=None), views and before.views)
    with _watching_reorders():
        try:
            yield
        finally:
            used = (min(left, default=0)) - (_local.rules.reorders or 0)
            rest = None if before.reorders is None else before.reorders - used
            _local.rules = replace(before, reorders=rest)


def _checked(reorders: bool | int) -> int | None:
    if not isinstance(reorders, int):
        raise TypeError(
            "torch_blocked::strict: expected reorders as True, False or a number, got "
            f"{type(reorders).__name__}; pass how many are allowed"
        )
    if isinstance(reorders, bool):
        return None if reorders else 0
    if reorders < 0:
        raise ValueError(
            f"torch_blocked::strict: expected a number of reorders, got {reorders}; pass 0 or more"
        )
    return reorders


@contextmanager
def _watching_reorders() -> Iterator[None]:
    before = _C.watch_reorders(None if _local.rules.reorders is None else _on_reorder)
    try:
        yield
    finally:
        _C.watch_reorders(before)


def _on_reorder(op: str, formats: str) -> None:
    rules = _local.rules
    if rules.reorders is None:
        return
    if rules.reorders == 0:
        raise Refused(
            f"torch_blocked::{op}: expected no more reorders in torch_blocked.strict(), got "
            f"{formats}{module_paths.here()}; keep the tensor in one format, or allow more"
        )
    rules.reorders -= 1


def is_strict() -> bool:
    return not _local.rules.fallbacks


def check_view(op: str, formats: str) -> None:
    """Raises Refused where strict mode does not allow views that are copies."""
    if not _local.rules.views:
        raise Refused(
            f"torch_blocked::{op}: expected views in the memory of {formats}, got one that must be "
            f"a copy{module_paths.here()}; call .to_dense() first, or pass views=True"
        )
