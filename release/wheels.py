"""Builds a wheel for each Python: python release/wheels.py [--pythons PYTHON...] [--out dist]

Each wheel holds an extension for every supported version of torch and takes the one that fits when
it is imported. The kernels are compiled once, the rest once for each torch, the bindings once for
each torch and Python. Torch comes from pip, for its headers and libraries alone: which build of it,
and for which Python, does not matter.

Two builds of the same sources, by the same tools, give the same bytes: see release/reproduce.py."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "wheels"
PLATFORM = "manylinux_2_28_x86_64"
NAMES = ("3.11", "3.12", "3.13")
LOCK = ROOT / "release" / "requirements.txt"

# Libraries that the wheel finds at run time: torch's, and those of the wheel onednn-cpu-gomp.
APART = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libdnnl.so.3")
APART += ("libgomp.so.1",)

# What a build needs of torch's wheel.
LIBRARIES = {f"torch/lib/{name}.so" for name in ("libc10", "libtorch_cpu", "libtorch_python")}
OTHERS = {"torch/version.py", "torch/share/cmake/Torch/TorchConfig.cmake"}

sys.path.insert(0, str(ROOT / "src" / "torch_blocked"))
from torch_versions import TESTED  # noqa: E402  without the package, which needs torch


def run(*command: object, **variables: str) -> str:
    print("+", *command, flush=True)
    done = subprocess.run(
        [str(each) for each in command],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        umask=0o022,  # auditwheel packs the bits of the folders that it makes
    )
    if done.returncode:
        sys.exit(
            f"wheels: expected this to succeed, got exit status {done.returncode}:\n{done.stdout}"
        )
    return done.stdout


def pythons(asked: Iterable[str]) -> list[Path]:
    """The interpreters: those that were asked for, or one of each supported version."""
    if asked:
        return [Path(each) for each in asked]
    pyenv = Path.home() / ".pyenv" / "versions"
    found = []
    for name in NAMES:
        places = sorted(pyenv.glob(f"{name}.*/bin/python"))
        there = shutil.which(f"python{name}")
        if not places and not there:
            sys.exit(f"wheels: expected Python {name}, got none; install it, or name --pythons")
        found.append(places[-1] if places else Path(str(there)))
    return found


def headers(python: Path) -> str:
    """SOABI=include folder, as setup.py takes it."""
    code = "import sysconfig as s; print(s.get_config_var('SOABI') + '=' + s.get_path('include'))"
    return run(python, "-c", code).strip()


def torch_folder(minor: str) -> Path:
    """The parts of a torch of this version that a build needs, unpacked."""
    folder = WORK / "torch" / minor
    if (folder / "complete").exists():
        return folder / "torch"
    with_pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder]
    run(*with_pip, f"torch=={minor}.*")
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("torch/include/") or name in LIBRARIES | OTHERS:
                archive.extract(name, folder)
    wheel.unlink()
    (folder / "complete").touch()
    return folder / "torch"


def build(found: list[Path]) -> Path:
    """All modules, in a folder for each torch that TORCH_BLOCKED_TORCH names."""
    prebuilt = WORK / "lib"
    shutil.rmtree(prebuilt, ignore_errors=True)  # it may hold modules that nobody asks for now
    run(
        *(sys.executable, "setup.py", "-q", "build_ext"),
        *("--build-lib", prebuilt, "--build-temp", WORK / "cmake"),
        TORCH_BLOCKED_PYTHONS=os.pathsep.join(map(headers, found)),
    )
    return prebuilt / "torch_blocked"


def epoch() -> str:
    """The time that the files in a wheel get: SOURCE_DATE_EPOCH, or the day of the release. Their
    own times would make each wheel another."""
    citation = (ROOT / "CITATION.cff").read_text()
    day = re.search(r'^date-released: "(.*)"$', citation, re.M)[1]
    released = datetime.fromisoformat(f"{day}T00:00:00+00:00")
    return os.environ.get("SOURCE_DATE_EPOCH", str(int(released.timestamp())))


def tool_versions() -> Path:
    """The lock file's versions as constraints: a wheel names the setuptools that made it. They have
    no hashes, because pip then wants one of the folder that it makes a wheel of."""
    constraints = WORK / "constraints.txt"
    constraints.parent.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join(re.findall(r"^[\w-]+==[\w.]+", LOCK.read_text(), re.M)))
    return constraints


def wheel(python: Path, prebuilt: Path, out: Path) -> Path:
    """The wheel of one Python, checked for what manylinux allows."""
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    pip = [python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", raw]
    run(*pip, ROOT, TORCH_BLOCKED_PREBUILT=str(prebuilt), PIP_CONSTRAINT=str(tool_versions()))
    (made,) = raw.glob("*.whl")
    before = set(out.glob("*.whl"))
    exclude = [word for name in APART for word in ("--exclude", name)]
    tools = Path(sys.executable).parent
    run(
        *(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, *exclude),
        *("--wheel-dir", out, made),
        PATH=os.pathsep.join([str(tools), os.environ["PATH"]]),
    )
    return max(set(out.glob("*.whl")) - before or out.glob("*.whl"), key=os.path.getmtime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="*", default=[], help="interpreters to build for")
    parser.add_argument("--torch", nargs="*", default=list(TESTED), help="minor versions")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    args = parser.parse_args()
    os.chdir(ROOT)
    os.environ["SOURCE_DATE_EPOCH"] = epoch()
    found = pythons(args.pythons)
    os.environ["TORCH_BLOCKED_TORCH"] = os.pathsep.join(map(str, map(torch_folder, args.torch)))
    prebuilt = build(found)
    args.out.mkdir(parents=True, exist_ok=True)
    for python in found:
        made = wheel(python, prebuilt, args.out)
        print(
            f"{made.relative_to(ROOT) if made.is_relative_to(ROOT) else made}: "
            f"{made.stat().st_size / 2**20:.1f} MiB"
        )


if __name__ == "__main__":
    main()
