"""Which versions of torch are supported, and what is used of them that torch does not promise.

Everything that differs from one version to the next is decided here and in
csrc/runtime/torch_version.h, each with its reason. Other modules do not ask for the version.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType

# The minor versions that the test suite passes on, the oldest first.
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

    Raises ImportError if it lacks a private name that this package uses: a torch that is too old or
    too new. Modules that `import torch` does not load need only be there: importing them all would
    take a second."""
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
        # The attributes that torch's classes give each of their objects are annotations.
        if not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
            return False
        found = getattr(found, part, None)
    return True
