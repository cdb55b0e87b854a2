"""Calls of the system that fail: requests for memory, threads and files.

A program runs in a process that has failing.cpp before all other libraries. It says which call
fails, and looks at what becomes of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_blocked import environment

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("failing.cpp")
LIBRARY = ROOT / "build/failing/failing.so"
# A call that fails says one of these, or does only half of its work.
ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO, "denied": errno.EACCES, "short": -1}
ALL_CALLS = 1 << 30


def library() -> Path:
    """The compiled library. Processes that build it at once do not see each other's parts."""
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        part = LIBRARY.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-fno-builtin"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(part)], check=True)
        part.replace(LIBRARY)
    return LIBRARY


def run(program: str, folder: Path, *arguments: str, seconds: float = 600, **variables: str) -> Any:
    """What `python -m helpers.failing.<program>` reports as its last line, in JSON. Fails with its
    output if it ends in any other way. `folder`: for the files that are kept between processes."""
    limits = {*environment.ISA_LIMITS, "ATEN_CPU_CAPABILITY"}
    own = {
        "LD_PRELOAD": str(library()),
        "PYTHONPATH": str(ROOT / "test"),
        "XDG_CACHE_HOME": str(folder),
        "TORCH_BLOCKED_CHECK": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in limits}
    ended = subprocess.run(
        [sys.executable, "-m", f"helpers.failing.{program}", *arguments],
        env=inherited | own | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    said = f"{ended.stdout[-8000:]}\n{ended.stderr[-8000:]}"
    assert ended.returncode == 0, f"{program} {arguments} ended with {ended.returncode}:\n{said}"
    return json.loads(ended.stdout.splitlines()[-1])


def import_once(modules: list[str]) -> None:
    """Imports what a child would import each time. Its collections leave all of that out."""
    for module in modules:
        with contextlib.suppress(Exception):  # some register themselves, and only once
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


class Calls:
    """The library in this process, which was started with it."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(str(LIBRARY))
        for name in ("calls", "live", "held", "mapped"):
            getattr(self._c, f"failing_{name}").restype = ctypes.c_long
        for name in ("caller", "offset", "places"):
            getattr(self._c, f"failing_{name}").restype = ctypes.c_size_t
        for name in ("calls", "live", "caller", "offset"):
            getattr(self._c, f"failing_{name}").argtypes = [ctypes.c_size_t]
        self._c.failing_arm.argtypes = [ctypes.c_size_t, ctypes.c_long]
        self._c.failing_arm_files.argtypes = [
            ctypes.c_char_p,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_int,
        ]
        self._c.failing_log.restype = ctypes.c_char_p

    # ---- memory ----

    def watch(self, module: str) -> None:
        assert self._c.failing_watch(module.encode()) == 2, "the library is not loaded first"

    def count_anew(self) -> None:
        self._c.failing_count_anew()

    def counted(self) -> dict[int, int]:
        """How often each site asked for memory since count_anew()."""
        places = range(self._c.failing_places())
        counts = {self._c.failing_caller(i): self._c.failing_calls(i) for i in places}
        return {caller: count for caller, count in counts.items() if count}

    def live(self) -> dict[int, int]:
        """How many blocks of each site are not freed yet; at 0, the bytes that are mapped."""
        places = range(self._c.failing_places())
        counts = {self._c.failing_caller(i): self._c.failing_live(i) for i in places}
        held = {caller: count for caller, count in counts.items() if count}
        return held | {0: self._c.failing_mapped()}

    def place(self, caller: int) -> tuple[int, int]:
        """The library of a site, 0 for ours, and the address in its file."""
        both = self._c.failing_offset(caller)
        return both >> 48, both & (1 << 48) - 1

    @contextlib.contextmanager
    def memory_fails(self, caller: int, call: int) -> Iterator[None]:
        self._c.failing_arm(caller, call)
        try:
            yield
        finally:
            self.fired = bool(self._c.failing_disarm())

    # ---- files and threads ----

    @contextlib.contextmanager
    def files_fail(self, folder: Path, first: int, times: int, error: int) -> Iterator[None]:
        """`first`: the number of the first call that fails, from 1; 0: none, they are counted."""
        self._c.failing_arm_files(str(folder).encode(), first, times, error)
        try:
            yield
        finally:
            self.fired = bool(self._c.failing_disarm())
            self.names = self._c.failing_log().decode().split()

    @contextlib.contextmanager
    def threads_fail(self, most: int) -> Iterator[None]:
        """Of the threads that are made meanwhile, only `most` may live at once."""
        self._c.failing_arm_threads(most)
        try:
            yield
        finally:
            self.fired = bool(self._c.failing_disarm())
