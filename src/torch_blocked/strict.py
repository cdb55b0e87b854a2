"""`torch_blocked.strict()`: raises for slow paths instead of taking them silently."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch_blocked import _C, module_paths


class Refused(NotImplementedError):
    """Strict mode refuses an op. The message says which, where, and the way out."""


@dataclass
class _Rules:
    fallbacks: bool = True  # whether they are allowed
    reorders: int | None = None  # how many more are allowed; None: any number
    views: bool = True


class _Local(threading.local):
    rules = _Rules()


_local = _Local()


@contextmanager
def strict(*, reorders: bool | int = True, views: bool = True) -> Iterator[None]:
    """Inside it, an op without a blocked kernel raises NotImplementedError instead of running on a
    dense copy. The message names the op, the formats, the module, the user's line and the way out.
    It counts for this thread. Inside another strict(), both count.

    reorders: False refuses all copies of activations from one format into another, including
        `to_blocked`, `to_dense` and reorders inside an optimized model. A number allows that many.
    views: False refuses views that cannot share the memory of a blocked tensor and so are copies,
        such as views by permute() and of channels that are not whole blocks.
    Raises ValueError for a negative number, TypeError for another type."""
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
    """Raises Refused if strict mode does not allow views that are copies."""
    if not _local.rules.views:
        raise Refused(
            f"torch_blocked::{op}: expected views in the memory of {formats}, got one that must be "
            f"a copy{module_paths.here()}; call .to_dense() first, or pass views=True"
        )
