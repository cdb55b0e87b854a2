"""Saved models from a stranger, changed in their data under a checksum that fits, or in their
bytes.

The bytes of an input are the choices of random_files.py, in their order. Loading such a file gives
a model, or ValueError in load()'s own words."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import random_files
import torch
from from_bytes import Choices

_RIGHT = ("refused", "loaded")


@cache
def world() -> random_files.World:
    """Made in a folder of its own, where no file may appear."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-saved-"))
    files = random_files.write_files(folder)
    made = random_files.World(files)
    for each in files:
        each.unlink()
    os.chdir(folder)
    return made


def changed(content: bytes) -> tuple[bytes, str]:
    """A file, and what was changed in it."""
    choose, files = Choices(content), world()
    which = choose.randrange(len(files.contents))
    return files.changed_by(choose, which, choose.randrange(4) == 3)


def prepare() -> None:
    world()


def run(content: bytes) -> None:
    file, said = changed(content)
    torch.manual_seed(0)
    what = random_files.outcome(file)
    assert what.startswith(_RIGHT), f"{what}\n  {said}"
