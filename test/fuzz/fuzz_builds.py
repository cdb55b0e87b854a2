"""Compiles the targets in C++: each is one source with the few of the library's that it tries."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
BUILT = ROOT / "build" / "fuzz"

# Its import takes seconds, and only its files are needed.
_TORCH = Path(importlib.util.find_spec("torch").origin).parent
_INCLUDES = [
    *("-I", ROOT / "csrc", "-I", ROOT / "src/torch_blocked/include", "-I", FOLDER),
    *("-isystem", _TORCH / "include"),
    *("-isystem", _TORCH / "include/torch/csrc/api/include"),
    *("-isystem", Path(sys.prefix) / "include"),  # oneDNN's
]
_LINKED = [f"-L{_TORCH}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{_TORCH}/lib"]


@dataclass(frozen=True)
class Source:
    """name: fuzz_<name>.cpp is the target. library: sources beside it, relative to csrc."""

    name: str
    library: tuple[str, ...]
    needs_torch: bool = False

    @property
    def path(self) -> Path:
        return FOLDER / f"fuzz_{self.name}.cpp"


@dataclass(frozen=True)
class Compiler:
    """What a target is compiled with, and what runs it. runner: its sources."""

    name: str
    flags: tuple[str, ...]
    runner: tuple[Path, ...]
    needed_for: str

    def command(self) -> str:
        found = shutil.which(self.name)
        if found is None:
            raise FileNotFoundError(
                f"fuzz: expected {self.name} {self.needed_for}, got none; install it, on Debian "
                "and Ubuntu by: apt-get install -y clang"
            )
        return found


# In g++'s programs the checks of numbers are the same. Without -O it compiles in half the time.
FUZZER = Compiler("clang++", ("-O1", "-fsanitize=fuzzer,address,undefined"), (), "to fuzz C++")
REPLAYER = Compiler(
    "g++", ("-O0", "-fsanitize=address,undefined"), (FOLDER / "replay.cpp",), "to build anything"
)


def built(source: Source, compiler: Compiler) -> Path:
    """The program, compiled anew if a source or a header has changed."""
    program = BUILT / compiler.name / source.name
    sources = [source.path, *compiler.runner, *(ROOT / "csrc" / each for each in source.library)]
    if program.exists() and program.stat().st_mtime > _newest([*sources, *_included(source.path)]):
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    # -w: what one compiler warns of, the other does not know.
    flags = ("-std=c++20", "-g", "-w", "-fno-sanitize-recover=all", *compiler.flags)
    linked = _LINKED if source.needs_torch else []
    command = [compiler.command(), *flags, *_INCLUDES, *sources, *linked, "-o", program]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"fuzz: {source.path.name} does not compile:\n{done.stderr[-4000:]}")
    return program


def _included(source: Path) -> list[Path]:
    """The sources of ours that a target includes, to call what they do not export."""
    names = re.findall(r'^#include "(.+\.cpp)"', source.read_text(), re.MULTILINE)
    return [ROOT / "csrc" / name for name in names]


def _newest(sources: list[Path]) -> float:
    headers = [*(ROOT / "csrc").rglob("*.h"), *FOLDER.glob("*.h"), Path(__file__)]
    headers += [*(ROOT / "src/torch_blocked/include").rglob("*.h")]
    return max(each.stat().st_mtime for each in (*sources, *headers))
