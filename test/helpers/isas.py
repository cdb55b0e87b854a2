"""Instruction sets: what each cannot run, and how a better CPU is limited to it."""

# As torch_blocked.env()["isa"] calls them, the best one first.
ISAS = ("amx", "avx512", "avx2", "default")

# The least instruction set that tests need, by how their ids begin: tests of kernels that others do
# not have, or of the choice of these kernels.
NEEDS = {
    "kernels/test_amx.py": "amx",
    "int8/test_int8_winograd.py": "avx2",
    "kernels/test_bfloat16.py::test_sums_and_activations_after_winograd": "avx2",
    "kernels/test_chains.py::test_real_": "avx2",
    "kernels/test_few_rows.py": "avx2",
    "kernels/test_linear.py::test_sums": "avx2",
    "kernels/test_stored_programs.py::test_of_": "avx2",
    "kernels/test_winograd": "avx2",
}
# With AVX-512 these need its instructions for bfloat16. Kernels of lesser sets need none.
NEED_BFLOAT16 = (
    "kernels/test_bfloat16.py::test_optimized_models_in_bfloat16",
    "kernels/test_bfloat16.py::test_sums_and_activations_after_winograd",
)
CALLED = {"amx": "AMX", "avx2": "AVX2"}  # how users call them


def _limits(ours: str, onednn: str, aten: str) -> dict[str, str]:
    return {
        "TORCH_BLOCKED_MAX_ISA": ours,  # our kernels and our oneDNN
        "ONEDNN_MAX_CPU_ISA": onednn,  # torch's copy of oneDNN, too
        "ATEN_CPU_CAPABILITY": aten,
    }


# What makes a CPU that has a better set behave as one that has only this set.
LIMITS = {
    "avx512": _limits("avx512", "AVX512_CORE_FP16", "avx512"),
    # The first CPUs with AVX-512: they multiply neither bytes nor bfloat16.
    "avx512_core": _limits("avx512", "AVX512_CORE", "avx512"),
    "avx2": _limits("avx2", "AVX2", "avx2"),
    "default": _limits("default", "SSE41", "default"),
}


def lesser(isas: list[str]) -> list[str]:
    """The limits under which a CPU with these sets, best first, is a lesser one."""
    best = isas[0]
    return [
        name for name in LIMITS if name != best and LIMITS[name]["TORCH_BLOCKED_MAX_ISA"] in isas
    ]


def not_run(isa: str, multiplies_bfloats: bool) -> dict[str, str]:
    """How the ids of tests begin that are not run on this CPU, each with its need."""
    better = ISAS[: ISAS.index(isa)]
    found = {tests: CALLED[least] for tests, least in NEEDS.items() if least in better}
    return found if multiplies_bfloats else found | dict.fromkeys(NEED_BFLOAT16, "AVX512_BF16")
