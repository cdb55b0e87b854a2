"""The file of comparisons that have been made: any content is a set of lines, and what is noted is
there for the next process, however the file ends."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from torch_blocked import environment, remembered

NOTED = "0123456789abcdef"


@cache
def file() -> Path:
    """It names this machine, which takes longer than the rest."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fuzz-compared-")
    path = remembered.compared_file()
    assert path is not None
    environment.make_folder(path)
    remembered.compared_file = lambda: path
    return path


def prepare() -> None:
    file()


def run(content: bytes) -> None:
    file().unlink(missing_ok=True)
    file().write_bytes(content)
    lines = content.decode(errors="replace").split("\n")[:-1]
    assert environment.read_lines(file()) == lines
    compared = remembered.Compared()
    for each in lines:
        assert (each in compared) == bool(each), "every line counts, but for an empty one"
    compared.note(NOTED, "")
    assert NOTED in compared and NOTED in remembered.Compared(), "what is noted is known"
    assert file().read_bytes().startswith(content), "what was there stays"
