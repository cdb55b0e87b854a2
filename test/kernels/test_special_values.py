"""NaN, infinities, denormals, signed zeros and values near the limits of float32 through every
family of kernels: what docs/numerics.md says of each holds, against ATen in float32."""

import re
from pathlib import Path

import pytest
from helpers.isas import ISAS
from helpers.problems import threads
from helpers.special_values import AS_ATEN, CASES, DIFFERENT, NOT_ALWAYS_SEEN, entry, table

from torch_blocked import _C

pytestmark = pytest.mark.usefixtures("cache_folder")

PAGE = Path(__file__).parents[2] / "docs/numerics.md"

# The least instruction set of kernels, by how their names begin after that of their family.
NEEDS = {
    r"\w+: winograd": "avx2",
    r"\w+: few_rows": "avx2",
    r"weight_gradient: onednn_blocked": "avx2",
    r"\w+: amx": "amx",
}


def is_there(family: str, kernel: str) -> bool:
    """This instruction set has the kernel."""
    name = f"{family}: {kernel}"
    least = next((isa for kernels, isa in NEEDS.items() if re.match(kernels, name)), ISAS[-1])
    return ISAS.index(_C.isa()) <= ISAS.index(least)


@pytest.mark.parametrize("row", CASES)
def test_a_row_of_the_table(row):
    """Every entry holds for every case, each kernel ran, and what is said to differ does."""
    wrong, ran, differs = [], set(), set()
    with threads(1):  # which is faster for tensors this small
        for case in CASES[row]:
            for column, how, ours, aten in case.results():
                ran.add(case.kernel)
                if not entry(row, column).is_kept(ours, aten):
                    wrong.append(f"{column}: {how}")
                if not AS_ATEN[column].is_kept(ours, aten):
                    differs.add((row, column))
    assert wrong == []
    assert ran == {case.kernel for case in CASES[row] if is_there(*case.kernel)}
    said = {(row, column) for column in DIFFERENT.get(row, ())} - NOT_ALWAYS_SEEN
    assert not ran or differs >= said


def test_the_page_has_this_table():
    lines = PAGE.read_text().splitlines()
    start = lines.index("### What each kernel does with special values")
    shown = [line for line in lines[start:] if line.startswith("|")][: len(table())]
    assert shown == table()
