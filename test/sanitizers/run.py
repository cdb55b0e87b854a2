"""Builds the extension with a sanitizer and runs what that one is for.

    python test/sanitizers/run.py address [pytest arguments]
    python test/sanitizers/run.py thread [pytest arguments]

Needs the build of `make extension`, whose torch, Python and oneDNN it takes. Its own build lies in
build/asan or build/tsan, with kernels for this CPU alone. With pytest arguments, those tests run in
place of the list. Ends with 1 if a test fails or the sanitizer reports anything."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "test"

# What the release build was configured with, and this one takes over.
TAKEN_OVER = (
    "CMAKE_BUILD_RPATH",
    "CMAKE_MAKE_PROGRAM",
    "TORCH_BLOCKED_PYTHONS",
    "TORCH_BLOCKED_TORCH",
    "dnnl_DIR",
)

PARTS = 8  # all of these tests take two hours under AddressSanitizer
CALLS_OURS = "capture eager formats graph int8 kernels random runtime training".split()


@dataclass(frozen=True)
class Sanitizer:
    build_type: str  # CMakeLists.txt has its flags
    libraries: tuple[str, ...]  # loaded before Python
    options: dict[str, str]  # of the variable <build type>_OPTIONS
    environment: dict[str, str]
    tests: tuple[str, ...]  # arguments of pytest
    commands: tuple[tuple[str, ...], ...]  # run after the tests


SANITIZERS = {
    "address": Sanitizer(
        build_type="Asan",
        libraries=("libasan.so", "libstdc++.so.6"),
        options={
            # Python and torch keep much until the process ends; leaks.py looks for ours.
            "detect_leaks": "0",
            # Tests ask for more memory than there is, and expect an exception.
            "allocator_may_return_null": "1",
            # Freed memory that is kept to see later uses: 256 MB, for each of some processes.
            "quarantine_size_mb": "64",
            # torch's libraries and ours have the same inline variables.
            "detect_odr_violation": "0",
        },
        environment={
            # The pool's blocks are its own, and have no borders that AddressSanitizer knows.
            "TORCH_BLOCKED_POOL": "0",
        },
        # All that calls C++, in turn: a part a day.
        tests=(
            *(f"test/{folder}" for folder in CALLS_OURS),
            *("--part", f"{date.today().toordinal() % PARTS}/{PARTS}"),
            # Which kernel is the fastest is another one in this build.
            *("--deselect", "test/graph/test_planes.py"),
            # On a lesser CPU, for which this build has no kernels.
            *("--deselect", "test/capture/test_moved.py"),
            # It reads an address that is none, which the sanitizer reports before the test can.
            *("--deselect", "test/random/test_raw_calls.py::test_a_signal_and_a_hang_are_reported"),
        ),
        commands=(("test/sanitizers/leaks.py",),),
    ),
    "thread": Sanitizer(
        build_type="Tsan",
        libraries=("libtsan.so", "libstdc++.so.6"),
        options={
            "suppressions": str(Path(__file__).with_name("thread_suppressions.txt")),
            # Python and torch are not compiled with it: it sees neither their locks of atomics nor
            # their reads, only what they free and copy.
            "ignore_noninstrumented_modules": "1",
            "history_size": "4",
            "die_after_fork": "0",  # a child has one thread at first, and makes others
            "second_deadlock_stack": "1",
        },
        environment={},
        # Teams of threads, caches, pools, planning, callers at a time.
        tests=(
            "test/runtime/test_threads.py",
            "test/runtime/test_memory_pool.py",
            "test/runtime/test_packed_weights.py",
            "test/runtime/test_trace.py",
            "test/capture/test_optimized_module.py",
        ),
        commands=(("test/sanitizers/callers.py",),),
    ),
}


def cached(build: Path) -> dict[str, str]:
    """The entries of a build's CMakeCache.txt."""
    cache = build / "CMakeCache.txt"
    if not cache.exists():
        sys.exit(f"run.py: expected a build in {build}, got none; run make extension")
    entries = re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE)
    return dict(entries)


def sets() -> str:
    """With AVX-512, blocks of 8 channels run AVX2's kernels."""
    flags = Path("/proc/cpuinfo").read_text()
    return "AVX2;AVX512" if "avx512bw" in flags else "AVX2" if "avx2" in flags else "DEFAULT"


def build(sanitizer: Sanitizer, folder: Path) -> None:
    taken = cached(Path(os.environ.get("TORCH_BLOCKED_BUILD_DIR", ROOT / "build")))
    options = {name: taken[name] for name in TAKEN_OVER} | {
        "CMAKE_BUILD_TYPE": sanitizer.build_type,
        "TORCH_BLOCKED_OUTPUT_DIR": str(folder / "package/torch_blocked"),
        "TORCH_BLOCKED_SETS": sets(),
    }
    cmake = Path(sys.executable).with_name("cmake")
    defines = [f"-D{name}={value}" for name, value in options.items()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "build.log", "w") as log:  # warnings that only these flags give
        for command in (
            ["-G", "Ninja", "-S", ROOT, "-B", folder, *defines],
            ["--build", folder],
        ):
            if subprocess.call([cmake, *command], stdout=log, stderr=log):
                sys.exit(f"run.py: expected a build, got errors; see {log.name}")


def link_sources(package: Path) -> None:
    """Links all of the package but its modules, which are the release build's."""
    sources = ROOT / "src/torch_blocked"
    for source in sources.rglob("*"):
        link = package / source.relative_to(sources)
        if source.is_dir() or source.suffix in (".so", ".pyc") or link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source)


def library(name: str) -> str:
    found = subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
    return str(Path(found).resolve(strict=True))


def environment(sanitizer: Sanitizer, folder: Path, reports: Path) -> dict[str, str]:
    options = sanitizer.options | {"log_path": str(reports / "report")}
    return {
        **os.environ,
        **sanitizer.environment,
        f"{sanitizer.build_type.upper()}_OPTIONS": ":".join(f"{k}={v}" for k, v in options.items()),
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports / 'undefined'}",
        "LD_PRELOAD": " ".join(map(library, sanitizer.libraries)),
        "PYTHONPATH": str(folder / "package"),
        "PYTHONPYCACHEPREFIX": str(ROOT / "build/bytecode"),
        "GOMP_SPINCOUNT": "1000",
    }


def reported(text: str) -> bool:
    """Whether a report says more than that memory was refused, for which tests ask."""
    return any(line and "failed to allocate" not in line for line in text.splitlines())


def main(name: str, given: list[str]) -> int:
    sanitizer, folder = SANITIZERS[name], ROOT / "build" / SANITIZERS[name].build_type.lower()
    build(sanitizer, folder)
    link_sources(folder / "package/torch_blocked")
    reports = folder / "reports"
    reports.mkdir(exist_ok=True)
    for old in reports.iterdir():
        old.unlink()
    within = environment(sanitizer, folder, reports)
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    failed = subprocess.call([*pytest, *(given or sanitizer.tests)], cwd=ROOT, env=within)
    for command in () if given else sanitizer.commands:
        failed |= subprocess.call([sys.executable, *command], cwd=ROOT, env=within)
    found = [each for each in sorted(reports.iterdir()) if reported(each.read_text())]
    for each in found:
        print(f"--- {each.name}\n{each.read_text()}")
    print(f"--- {name}: tests {'failed' if failed else 'passed'}, {len(found)} reports")
    return bool(failed or found)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SANITIZERS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
