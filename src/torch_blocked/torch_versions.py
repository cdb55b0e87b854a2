"""Supported versions of torch, and the private names of torch that this package uses.

No other module asks for the version. Differences between versions are decided here, with their
reasons. The C++ sources are the same for all.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType

# The minor versions that we build for, oldest first. docs/install.md says what ran on each.
TESTED = ("2.13", "2.14", "2.15")

_PRIVATE = Path(__file__).with_name("torch_private.txt")


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


def private_names() -> list[str]:
    """The names in torch_private.txt, such as "torch._ops.OpOverload"."""
    lines = _PRIVATE.read_text().splitlines()
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def check(torch: ModuleType) -> None:
    """Warns of a torch that is newer than the tested ones.

    Raises ImportError if torch lacks a private name that this package uses, because it is too old
    or too new. Modules that `import torch` does not load are only looked up: importing them all
    would take a second."""
    absent = [name for name in private_names() if not _is_there(torch, name)]
    if absent:
        raise ImportError(
            f"torch_blocked: expected torch {TESTED[0]} to {TESTED[-1]}, got torch "
            f"{torch.__version__} without {', '.join(absent)}; "
            f'pip install "torch=={TESTED[-1]}.*"'
        )
    if minor(torch.__version__) > minor(TESTED[-1]):
        warnings.warn(
            f"torch_blocked: torch {torch.__version__} is newer than torch {TESTED[-1]}, the "
            "newest that this release was tested with; please report what does not work",
            stacklevel=3,
        )


def _is_there(torch: ModuleType, name: str) -> bool:
    parts = name.split(".")
    length = max(i for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in sys.modules)
    found: object = sys.modules[".".join(parts[:length])]
    rest = parts[length:]
    if rest and rest[0] not in vars(found) and hasattr(found, "__path__"):
        file = Path(found.__path__[0], rest[0])  # to ask for the attribute would load the module
        if file.is_dir() or file.with_suffix(".py").is_file():
            return True
    for part in rest:
        if not hasattr(found, part) and part not in _given_to_objects(found):
            return False
        found = getattr(found, part, None)
    return True


def _given_to_objects(found: object) -> tuple[str, ...]:
    """Names that a class lacks but its objects may have: annotations, and attributes that the
    constructor sets."""
    constructor = getattr(getattr(found, "__init__", None), "__code__", None)
    annotated = tuple(getattr(found, "__annotations__", {}))
    return annotated + (constructor.co_names if constructor else ())
