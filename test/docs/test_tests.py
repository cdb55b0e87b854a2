"""The rules of the folder of tests: where modules live, what they import, what a CPU cannot run."""

import ast
import itertools
from collections import Counter
from pathlib import Path

import pytest
from helpers import draws
from helpers.isas import ISAS, NEED_BFLOAT16, NEEDS, not_run

import torch_blocked

pytestmark = pytest.mark.any_isa

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
MOST = 25  # files in a folder that a reader takes in at once


def imported(path: Path) -> set[str]:
    """The last names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{each.name}" for each in node.names)}
    return {name.rpartition(".")[2] for name in names}


def test_no_file_imports_a_test_module():
    """What two modules share is in helpers, and fixtures are in conftest.py."""
    modules = {path.stem for path in FILES if path.stem.startswith("test_")} | {"conftest"}
    found = {path.name: imported(path) & modules for path in FILES}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_every_module_is_in_a_folder_that_says_what_lives_there():
    for path in FILES:
        if path.stem.startswith("test_"):
            assert path.parent.parent == TESTS, f"{path} is in no folder"
    for folder in {path.parent for path in FILES if path.parent.parent == TESTS}:
        assert (folder / "README.md").exists(), f"{folder} does not say what lives there"
        assert sum(each.is_file() for each in folder.iterdir()) <= MOST, folder


def test_names_of_modules_are_unique():
    """pytest imports them by their names alone, and documents name them so."""
    names = Counter(path.name for path in FILES if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_what_an_instruction_set_cannot_run_is_there():
    for tests in (*NEEDS, *NEED_BFLOAT16):
        file, _, name = tests.partition("::")
        found = list(TESTS.glob(f"{file}*"))
        assert found and all(f"def {name}" in path.read_text() for path in found), tests


@pytest.mark.parametrize(
    ("isa", "needs"),
    [("amx", set()), ("avx512", {"AMX"}), ("avx2", {"AMX"}), ("default", {"AMX", "AVX2"})],
)
def test_what_an_instruction_set_cannot_run_is_said(isa, needs):
    assert isa in ISAS
    assert set(not_run(isa, True).values()) == needs
    assert set(not_run(isa, False).values()) == needs | {"AVX512_BF16"}


def test_the_header_says_what_this_one_cannot_run(request):
    lines = request.config.hook.pytest_report_header(config=request.config, start_path=TESTS)
    text = "\n".join(line for part in lines for line in ([part] if type(part) is str else part))
    for tests, need in not_run(
        torch_blocked.env()["isa"], torch_blocked._C.multiplies_bfloats()
    ).items():
        assert f"not run: test/{tests}*, which needs {need}" in text


def test_every_value_is_in_a_case_that_is_not_left_out(monkeypatch):
    lists = "abcd", (1, 2, 3), (None, True)
    monkeypatch.setattr(draws, "ALL", True)
    assert len(draws.crossed(2, *lists)) == 24
    monkeypatch.setattr(draws, "ALL", False)
    cases = draws.crossed(2, *lists)
    assert len(cases) == 12
    assert {case[:2] for case in cases} == set(itertools.product(*lists[:2]))
    assert {value for case in cases for value in case} == {*"abcd", 1, 2, 3, None}
