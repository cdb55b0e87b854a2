"""Builds the wheels twice and compares them: python release/reproduce.py [options of wheels.py]

It takes the last commit, not the working tree. The two folders differ in their names and the
lengths of these, the two runs in the bits that new files get and in the time zone. One build takes
as long as make wheel; --pythons and --torch make it shorter."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The folder, the permissions that new files lack, and the time zone.
RUNS = [("a", 0o022, "UTC"), ("another-folder", 0o077, "Pacific/Auckland")]


def build(folder: Path, umask: int, zone: str, options: list[str]) -> dict[str, Path]:
    """Name to wheel, built from the last commit in this folder."""
    archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
    with tarfile.open(fileobj=BytesIO(archive)) as sources:
        sources.extractall(folder, filter="fully_trusted")
    command = [sys.executable, "release/wheels.py", *options, "--out", str(folder / "dist")]
    variables = os.environ | {"TZ": zone}
    subprocess.run(command, cwd=folder, env=variables, umask=umask, check=True)
    return {wheel.name: wheel for wheel in (folder / "dist").glob("*.whl")}


def members(wheel: Path) -> dict[str, tuple]:
    """What a wheel says of each file in it: place, time, permissions, content."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            each.filename: (
                place,
                each.date_time,
                each.external_attr,
                hashlib.sha256(archive.read(each)).hexdigest(),
            )
            for place, each in enumerate(archive.infolist())
        }


def differences(first: Path, second: Path) -> list[str]:
    """The names of the files in which two wheels differ, or that of the wheel where only the
    archive itself does."""
    if first.read_bytes() == second.read_bytes():
        return []
    one, other = members(first), members(second)
    names = sorted(name for name in one | other if one.get(name) != other.get(name))
    return names or [first.name]


def main(options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        runs = [build(Path(place) / name, umask, zone, options) for name, umask, zone in RUNS]
        first, second = runs
        if not first or first.keys() != second.keys():
            sys.exit(f"reproduce: expected the same wheels twice, got {[*first]} and {[*second]}")
        found = {name: differences(first[name], second[name]) for name in sorted(first)}
        for name, wrong in found.items():
            digest = hashlib.sha256(first[name].read_bytes()).hexdigest()
            print(f"{digest}  {name}" if not wrong else f"{name} differs in {', '.join(wrong)}")
    if any(found.values()):
        sys.exit("reproduce: expected two builds of the same bytes, got others")


if __name__ == "__main__":
    main(sys.argv[1:])
