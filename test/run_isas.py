"""Runs the suite on every instruction set of the CPU.

    python test/run_isas.py [pytest arguments]
    python test/run_isas.py --stem winograd [pytest arguments]

First all of it on the best one; then, on AVX2, what is not marked `any_isa`, and on each other
lesser one the core. The lesser ones are limits: with AVX-512, once without instructions for bytes
and bfloat16; always the default set, which needs none of these. With a stem only the best one runs,
and only the modules whose name or folder contains the stem. Tests run side by side, one on each
core: most of them use one thread most of the time."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from helpers.isas import LIMITS, lesser

from torch_blocked import environment

TESTS = Path(__file__).parent

# What shows each kernel against ATen.
CORE = [
    "kernels",
    "eager/test_problems.py",
    "eager/test_nan.py",
    "formats/test_reorder.py",
    "graph/test_layer_norm.py",
    "graph/test_attention.py",
    "graph/test_optimize.py",
    "graph/test_recurrent.py",
    "graph/test_squeeze_excite.py",
    "int8/test_int8.py",
    "int8/test_quantized.py",
    "random/test_random_models.py",
    "training/test_network.py",
]

# Threads that wait let the test on the other core go on. Tests start some hundred processes that
# import torch, which takes 6 s without bytecode and 2.5 s with it: a user's own settings may have
# none written.
SETTINGS = {"GOMP_SPINCOUNT": "1000", "PYTHONPYCACHEPREFIX": str(TESTS.parent / "build/bytecode")}


def environment_of(limits: dict[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return inherited | SETTINGS | limits


def modules(stem: str) -> list[str]:
    """Those that have the stem in their name or in that of their folder."""
    found = sorted(TESTS.glob("*/test_*.py"))
    names = [str(path) for path in found if stem and stem in f"{path.parent.name}/{path.stem}"]
    if not names:
        folders = ", ".join(sorted({path.parent.name for path in found}))
        sys.exit(
            "run_isas.py: expected a part of a test module's name or of its folder, "
            f"got {stem!r}; the folders are {folders}"
        )
    return names


def main(stem: str | None, arguments: list[str]) -> int:
    isas = environment.cpu_isas()
    runs = [(isas[0], {}, [] if stem is None else modules(stem))]
    if stem is None:
        core = [str(TESTS / each) for each in CORE]
        runs += [
            (isa, LIMITS[isa], ["-m", "not any_isa", *(core if isa != "avx2" else [])])
            for isa in lesser(isas)
        ]
    failed = []
    for isa, limits, selection in runs:
        settings = " ".join(f"{name}={value}" for name, value in limits.items())
        print(f"--- {isa} {settings}".rstrip(), flush=True)
        side_by_side = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", *side_by_side, *selection, *arguments]
        if subprocess.run(command, cwd=TESTS.parent, env=environment_of(limits)).returncode:
            failed.append(isa)
    print(f"--- instruction sets run: {', '.join(isa for isa, _, _ in runs)}; ", end="")
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stem", help="a part of the names of modules or folders")
    options, rest = parser.parse_known_args()
    sys.exit(main(options.stem, rest))
