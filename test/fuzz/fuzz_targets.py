"""The targets, and how each is run: by a fuzzer for some time, or over files."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fuzz_builds import FOLDER, FUZZER, REPLAYER, ROOT, Source, built

CORPUS = FOLDER / "corpus"
FOUND = FOLDER / "found"
GROWN = ROOT / "build" / "fuzz" / "corpus"

SECONDS = 5  # that an input may take
MEBIBYTES = 4096

# What both fuzzers take. A machine that is busy with other work is slow, too.
_LIMITS = (f"-timeout={SECONDS}", f"-rss_limit_mb={MEBIBYTES}", "-print_final_stats=1")


@dataclass(frozen=True)
class Target:
    """most_bytes: of an input. words: what the fuzzer may put into one."""

    name: str
    most_bytes: int
    words: tuple[str, ...] = ()

    @property
    def corpus(self) -> Path:
        return CORPUS / self.name

    def files(self) -> list[Path]:
        return sorted(self.corpus.iterdir())

    def fuzz(self, options: list[str]) -> list[str]:
        """The command that fuzzes, with options of libFuzzer."""
        raise NotImplementedError

    def replay(self, files: list[Path]) -> list[str]:
        """The command that runs the target over files, and prints the name of each before it."""
        raise NotImplementedError

    def options(self) -> list[str]:
        options = [
            *_LIMITS,
            f"-max_len={self.most_bytes}",
            f"-artifact_prefix={FOUND}/{self.name}-",
        ]
        if self.words:
            dictionary = GROWN / f"{self.name}.dict"
            dictionary.write_text("".join(f'"{word}"\n' for word in self.words))
            options.append(f"-dict={dictionary}")
        return options


@dataclass(frozen=True)
class InCpp(Target):
    library: tuple[str, ...] = ()
    needs_torch: bool = False

    def source(self) -> Source:
        return Source(self.name, self.library, self.needs_torch)

    def fuzz(self, options: list[str]) -> list[str]:
        return [str(built(self.source(), FUZZER)), *self.options(), *options]

    def replay(self, files: list[Path]) -> list[str]:
        return [str(built(self.source(), REPLAYER)), *map(str, files)]


@dataclass(frozen=True)
class InPython(Target):
    """<name>_target.py with prepare() and run(content)."""

    def fuzz(self, options: list[str]) -> list[str]:
        script = str(FOLDER / "fuzz_python.py")
        return [sys.executable, script, self.name, *self.options(), *options]

    def replay(self, files: list[Path]) -> list[str]:
        return [sys.executable, str(FOLDER / "replay.py"), self.name, *map(str, files)]


_FORMAT = ("format/tag.cpp", "format/activation.cpp", "format/descriptor.cpp")
_FILES = ("runtime/own_file.cpp", "runtime/fork.cpp", "runtime/interrupts.cpp")

TARGETS: tuple[Target, ...] = (
    InCpp("tag", 128, ("nChw16c", "OIhw16i16o", "goidhw", "ldigo", "any", "undef"), _FORMAT),
    InCpp("descriptor", 512, (), _FORMAT),
    InCpp("own_file", 1024, (), _FILES[:1]),
    InCpp("times", 1024, (r"\x09", r"\x0a", r"\x01", r"\x02", "1.5", "nan", "1e400"), _FILES, True),
    InPython("structure", 1024, ("[1, ", '"type"', '"context"', '"children_spec"', "null")),
    InPython("compared", 1024),
    InPython("saved", 256),
    InPython("raw", 256),
    InPython("eager", 512),
)
BY_NAME = {each.name: each for each in TARGETS}


def environment() -> dict[str, str]:
    """For every process of a target: it looks for memory errors, and needs one thread."""
    paths = [str(ROOT / "test"), str(ROOT / "test/random"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "TORCH_BLOCKED_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "ASAN_OPTIONS": "allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def module_of(name: str):
    return importlib.import_module(f"{name}_target")


def run_command(command: list[str], limit: float | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, errors="replace", timeout=limit
    )
