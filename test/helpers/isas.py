"""Which test files an instruction set cannot run, and why."""

# As torch_blocked.env()["isa"] calls them, the best one first.
ISAS = ("amx", "avx512", "avx2", "default")

# The least instruction set that a file needs, and how its users call it.
NEEDS = {
    "kernels/test_amx.py": ("amx", "AMX"),
    "kernels/test_winograd.py": ("avx2", "AVX2"),
    "int8/test_int8_winograd.py": ("avx2", "AVX2"),
}


def not_run(isa: str) -> dict[str, str]:
    """The files that are not collected on this instruction set, each with what it needs."""
    better = ISAS[: ISAS.index(isa)]
    return {file: name for file, (least, name) in NEEDS.items() if least in better}
