"""Every way into the package has a row in docs/reliability.md, and a test that is there."""

import ast
import re
from argparse import _SubParsersAction
from pathlib import Path

import pytest
import torch

import torch_blocked
from torch_blocked.__main__ import parser

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()
PACKAGE, SOURCES = ROOT / "src/torch_blocked", ROOT / "csrc"


def cells(section: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def named(section: str) -> set[str]:
    """What the first column names."""
    return {word for row in cells(section) for word in re.findall(r"`([^`]+)`", row[0])}


SECTIONS = re.findall(r"^## (.*)$", PAGE, re.M)
ROWS = [row for section in SECTIONS for row in cells(section)]
FILES = {path.name for path in (ROOT / "test").rglob("*.py")}


def test_every_row_names_tests_that_are_there():
    for row in ROWS:
        tests = re.findall(r"`(\w+\.py)`", row[-1])
        assert tests, row
        for test in tests:
            assert test in FILES, row
    assert len(ROWS) > 40


def test_public_functions():
    assert named("Public functions") == set(torch_blocked.__all__)


def test_ops():
    schemas = torch._C._jit_get_all_schemas()
    ops = {
        each.name.partition("::")[2] for each in schemas if each.name.startswith("torch_blocked:")
    }
    assert named("Ops of `torch.ops.torch_blocked`") == ops


def test_commands():
    (commands,) = (each for each in parser()._actions if isinstance(each, _SubParsersAction))
    assert named("Commands") == set(commands.choices)


# Calls that open files, by their last name. models.load builds a network.
_OPENS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "mkstemp"}
_OPENS_OF_TORCH = {"torch.load", "torch.save"}
_OPENS_IN_CPP = r"\bstd::[io]?fstream\b|(?<![\w:])::open(?:at)?\(|\bfopen\(|\bmkstemp\(|\btmpfile\("


def opens_files(path: Path) -> bool:
    text = path.read_text()
    if path.suffix != ".py":
        return re.search(_OPENS_IN_CPP, text) is not None
    calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
    return any(each.split(".")[-1] in _OPENS or each in _OPENS_OF_TORCH for each in calls)


def test_sources_that_open_files():
    python = (path for path in PACKAGE.rglob("*.py") if opens_files(path))
    cpp = (path for path in SOURCES.rglob("*.[ch]*") if opens_files(path))
    found = {str(path.relative_to(PACKAGE)) for path in python}
    found |= {str(path.relative_to(SOURCES)) for path in cpp}
    assert named("Sources that open files") == found


def test_settings():
    read = set()
    for folder in (PACKAGE, SOURCES):
        for path in folder.rglob("*.*"):
            if path.suffix in (".py", ".cpp", ".h"):
                lines = [s for s in path.read_text().splitlines() if re.search("environ|getenv", s)]
                read |= set(re.findall(r'"([A-Z][A-Z_]{3,})"', "\n".join(lines)))
    assert named("Settings") == read
