"""load(): an optimized module from a file that anybody may have written (saved.py)."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Collection
from typing import IO, Any

from torch_blocked import _C, saved
from torch_blocked.arguments import name_of
from torch_blocked.captured import Capture
from torch_blocked.environment import cpu_name, measured_with
from torch_blocked.optimized_module import OptimizedModule, check_dtype, first_line
from torch_blocked.refusals import is_asked_for, is_out_of_memory


def load(path: str | os.PathLike[str] | IO[bytes], *, ops: Collection[str] = ()) -> OptimizedModule:
    """Loads a file that `OptimizedModule.save` wrote, and plans the model for this CPU. No code
    from the file is executed. It may call only ops that compute their results and do nothing else.

    path: a file's name, or an open binary file.
    ops: names of other ops that the file may call, such as "mylib::op"; whoever wrote the file
    decides on their arguments.
    Raises OSError if the file cannot be read, and MemoryError, or torch's RuntimeError, if memory
    is refused. Raises ValueError if save() did not write it, if it is broken or of another version,
    or if it calls other ops. Raises TypeError for another kind of `path` or `ops`."""
    if not isinstance(path, (str, os.PathLike)) and not hasattr(path, "read"):
        raise TypeError(
            f"torch_blocked::load: expected a path or an open file, got {name_of(path)}; give what "
            "save() was given"
        )
    if isinstance(ops, str) or not all(isinstance(each, str) for each in ops):
        raise TypeError(
            f"torch_blocked::load: expected a list of names as ops, got {ops!r}; give it as "
            'ops=["mylib::op"]'
        )
    return _load(path, set(ops))


def _load(path: str | os.PathLike[str] | IO[bytes], ops: set[str] | None) -> OptimizedModule:
    """ops: allowed in addition to the list of loadable ops; None allows all."""
    try:
        data = saved.read(path)
        forms = [saved.of_data(each) for each in data["forms"]]
        example = saved.example_of(data)
        more = {name for name, _ in saved.ops_of(data)} if ops is None else ops
        refusal = saved.refusal_of(data, more)
        if not refusal:
            for _, captured in forms:
                _C.check_loadable(captured, more)
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        if is_out_of_memory(error):
            raise
        raise _no_file(path, error) from error
    if refusal:
        raise ValueError(refusal)
    check_dtype(data["dtype"])
    try:
        return _planned(data, forms, example)
    except Exception as error:
        if is_asked_for(error) or is_out_of_memory(error):
            raise
        raise _no_file(path, error) from error


def _no_file(path: Any, error: Exception) -> ValueError:
    why = re.sub(r"^torch_blocked::\w+: |; optimize the model again$", "", first_line(error))
    return ValueError(
        f"torch_blocked::load: expected a file written by save(), got {path} ({why}); save the "
        "optimized module again"
    )


def _planned(
    data: dict[str, Any],
    forms: list[tuple[tuple[Any, Any], Capture]],
    example: tuple[tuple[Any, ...], dict[str, Any]],
) -> OptimizedModule:
    same = (data["cpu"], data["measured_with"]) == (cpu_name(), measured_with())
    loaded = OptimizedModule(
        None,
        tune=data["tune"],
        dtype=data["dtype"],
        keep=data["keep"],
        times=data["times"] if same else None,
    )
    for signature, captured in forms:
        loaded._add(signature, captured).compiled.check_unknown()
    if data["choice"] == "blocked":
        loaded._prepare(*example)
        _C.return_idle_memory()
    else:
        loaded._example = example
        loaded._choose(data["choice"], "faster where it was saved")
    return loaded


def of_bytes(content: bytes) -> OptimizedModule:
    return _load(io.BytesIO(content), None)  # all ops: a pickle may call anything anyway


OptimizedModule._of_bytes = staticmethod(of_bytes)
