"""Works of collectives that write into blocked tensors after the call has returned."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_blocked.foreign import WAITING, Writes

Work: Any = getattr(torch.distributed, "Work", object)  # torch may be built without collectives
_NAME = "__torch__.torch.classes.c10d.Work"

# C++ keeps the work of a collective alive, but not the Python object that holds the writes.
_unfinished: list[_WorkOnCopies] = []


class _WorkOnCopies(Work):  # type: ignore[misc]
    """Wraps a work. Results are copied back before it reports that the collective is done."""

    def __init__(self, work: Work, writes: Writes) -> None:
        super().__init__()
        self._work, self._writes = work, writes

    def wait(self, *timeout: Any) -> bool:
        done = self._work.wait(*timeout)
        self._finish()
        return done

    def synchronize(self) -> None:
        self._work.synchronize()
        self._finish()

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._finish()
        return done

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work._source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def result(self) -> Any:
        found = self._work.result()
        self._finish()
        return self._writes.restored(found)

    def get_future(self) -> Any:
        def restored(future: Any) -> Any:
            value = future.value()
            self._finish()
            return self._writes.restored(value)

        return self._work.get_future().then(restored)

    def _finish(self) -> None:
        self._writes.finish()
        if self in _unfinished:
            _unfinished.remove(self)


def waiting(out: Any, writes: Writes) -> Any:
    """`out` of a collective, with works that copy the writes back. Without works, writes are
    complete and copied now."""
    for each in list(_unfinished):
        each.is_completed()  # copies back at once if done, since nobody may wait for it
    is_work = [
        isinstance(each, torch.ScriptObject) and each._type().qualified_name() == _NAME
        for each in pytree.tree_leaves(out)
    ]
    if not any(is_work):
        writes.finish()
        return out

    def on_copies(value: torch.ScriptObject) -> Any:
        if value._type().qualified_name() != _NAME:
            return value
        work = _WorkOnCopies(Work.unbox(value), writes)
        _unfinished.append(work)
        return work.boxed()

    return pytree.tree_map_only(torch.ScriptObject, on_copies, out)


WAITING.append(waiting)
