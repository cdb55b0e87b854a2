"""Writes release/requirements.txt: python release/lock.py [TORCH]

It names a wheel of every package that building, testing and releasing takes, by version and hash,
for the Python that runs this. pip chooses them: the newest that pyproject.toml allows. Run it to
take newer versions, then run the suite."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from required import LOCK, PARTS, ranges, target

HEAD = """\
# Made by release/lock.py; release/required.py prints a part of it for pip.
{target}
# torch has two hashes where pip is set up for builds of it for CPUs: that build's, and PyPI's.
"""

# pip's own settings may name other indexes and folders. Without them it sees PyPI alone.
PYPI_ALONE = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}


def new_pip(folder: Path) -> Path:
    """A Python whose pip reads metadata without the wheels, in an environment of its own."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.check_call([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"])
    return python


def chosen(python: Path, *arguments: str, **variables: str) -> dict[str, tuple[str, str]]:
    """Name to version and hash of the wheels that pip would install."""
    pip = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    report = subprocess.run(
        [*pip, "--only-binary=:all:", "--report=-", *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    found = {}
    for each in json.loads(report)["install"]:
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        # Builds of one release differ behind the plus sign; their hashes tell them apart.
        version = each["metadata"]["version"].partition("+")[0]
        found[name] = version, each["download_info"]["archive_info"]["hashes"]["sha256"]
    return found


def parts(python: Path, torch: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Part to its packages: those that no earlier part has brought."""
    asked: list[str] = []
    everything = chosen(python, *(each for part in PARTS for each in ranges(part, torch)))
    pins = [f"{name}=={version}" for name, (version, _) in everything.items()]
    found: dict[str, dict[str, tuple[str, str]]] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        print(*pins, sep="\n", file=constraint, flush=True)
        for part in PARTS:
            asked += ranges(part, torch)
            there = {name for packages in found.values() for name in packages}
            now = chosen(python, "--constraint", constraint.name, *asked)
            found[part] = {name: each for name, each in now.items() if name not in there}
    # Torch is installed alone, from a file; what it needs comes with the next part.
    needs = {name: found["torch"].pop(name) for name in [*found["torch"]] if name != "torch"}
    found["build"] |= needs
    return found


def text(found: dict[str, dict[str, tuple[str, str]]], of_pypi: str, torch: str) -> str:
    """The lock file; `of_pypi` is the hash of PyPI's torch."""
    lines = [HEAD.format(target=target(torch))]
    for part, packages in found.items():
        lines.append(f"## {part}\n")
        for name, (version, digest) in sorted(packages.items()):
            digests = sorted({digest, of_pypi}) if name == "torch" else [digest]
            hashes = " \\\n".join(f"    --hash=sha256:{each}" for each in digests)
            lines.append(f"{name}=={version} \\\n{hashes}\n")
    return "".join(lines)


def main(arguments: list[str]) -> None:
    torch = arguments[0] if arguments else "2.13"
    with tempfile.TemporaryDirectory() as folder:
        python = new_pip(Path(folder))
        found = parts(python, torch)
        exact = f"torch=={found['torch']['torch'][0]}"
        _, of_pypi = chosen(python, "--no-deps", exact, **PYPI_ALONE)["torch"]
    LOCK.write_text(text(found, of_pypi, torch))
    print(f"{LOCK}: {sum(map(len, found.values()))} packages")


if __name__ == "__main__":
    main(sys.argv[1:])
