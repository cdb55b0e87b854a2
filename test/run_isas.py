"""Runs the suite on every instruction set of the CPU: python test/run_isas.py [pytest arguments]

First all of it on the best one; then, on each lesser one, what is not marked `any_isa`. Tests run
side by side, one on each core: most of them use one thread most of the time."""

import os
import subprocess
import sys
from pathlib import Path

from torch_blocked import environment

ROOT = Path(__file__).parent.parent

# What makes a better CPU behave as one that has only this instruction set: for our kernels, for
# both copies of oneDNN (ours and torch's) and for ATen.
LIMITS = {
    "avx2": {
        "TORCH_BLOCKED_MAX_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}


# Threads that wait let the test on the other core go on.
WAITING = {"GOMP_SPINCOUNT": "1000"}


def main(arguments: list[str]) -> int:
    best, *lesser = environment.cpu_isas()
    runs = [(best, {}, [])]
    runs += [(isa, LIMITS[isa], ["-m", "not any_isa"]) for isa in lesser if isa in LIMITS]
    failed = []
    for isa, limits, selection in runs:
        settings = " ".join(f"{name}={value}" for name, value in limits.items())
        print(f"--- {isa} {settings}".rstrip(), flush=True)
        side_by_side = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", *side_by_side, *selection, *arguments]
        if subprocess.run(command, cwd=ROOT, env=os.environ | WAITING | limits).returncode:
            failed.append(isa)
    print(f"--- instruction sets run: {', '.join(isa for isa, _, _ in runs)}; ", end="")
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
