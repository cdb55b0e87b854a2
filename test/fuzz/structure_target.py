"""The structure of a call, as JSON in a saved model: any text is one, or an exception says that it
is none. Only that comes of it: nothing is imported, and nothing is called."""

from __future__ import annotations

import sys

from torch_blocked import structure


def prepare() -> None:
    pass


def run(content: bytes) -> None:
    text = content.decode(errors="replace")
    before = set(sys.modules)
    try:
        spec = structure.loads(text)
    except Exception:  # load() makes one sentence of any
        spec = None
    assert set(sys.modules) == before, f"{set(sys.modules) - before} was imported"
    if spec is not None:
        again = structure.loads(structure.dumps(spec))
        assert again == spec, "a structure has a text that gives it again"
