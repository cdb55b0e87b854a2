"""What a release says of itself: one version everywhere, and the rules of its Markdown."""

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

import torch_blocked
from torch_blocked import _C

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MINOR = VERSION.rpartition(".")[0]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()

# Beside pyproject.toml: the file, what stands before the version in it, and the version.
SAID = [
    ("CITATION.cff", r"^version: ", VERSION),
    ("docs/first_gain.md", r"^torch_blocked +", VERSION),
    ("docs/cpp.md", r"find_package\(torch_blocked ", MINOR),
    ("examples/custom_kernel/CMakeLists.txt", r"find_package\(torch_blocked ", MINOR),
]


@pytest.mark.parametrize(("file", "before", "version"), SAID, ids=[row[0] for row in SAID])
def test_version(file, before, version):
    found = re.findall(before + r"([\d.]+)", (ROOT / file).read_text(), re.MULTILINE)
    assert found and set(found) == {version}


def test_version_of_the_package():
    assert torch_blocked.__version__ == VERSION


def test_changelog_begins_with_what_is_unreleased_and_this_version():
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)
    assert [name for name, _ in sections[:2]] == ["Unreleased", VERSION]
    released = re.search(r'^date-released: "(.*)"$', (ROOT / "CITATION.cff").read_text(), re.M)
    assert sections[1][1] == released[1]
    links = re.findall(r"^\[(.+?)\]: https://", CHANGELOG, re.MULTILINE)
    assert links == [name for name, _ in sections]


LONG = "word " * 30 + "\n"
TEXTS = {
    LONG: 1,
    "- " + LONG: 1,
    f"```\n{LONG}```\n": 0,
    f"| {LONG}": 0,
    f"- {'x' * 120}\n": 0,  # there is nowhere to break it
    f"short\n\n{LONG}short\n": 1,
}


@pytest.mark.parametrize("text", TEXTS)
def test_prose_is_wrapped(text, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(text)
    prose = runpy.run_path(str(ROOT / "release" / "prose.py"))
    assert prose["main"]([str(page)]) == TEXTS[text]
    assert capsys.readouterr().out.count("wrap the line") == TEXTS[text]


def test_entries_of_the_changelog_are_short(tmp_path, capsys):
    page = tmp_path / "CHANGELOG.md"
    short, long = "- " + "word " * 15, "- " + ("word " * 15 + "\n  ") * 3
    page.write_text(f"{short}\n{long}\n{short}\n")
    prose = runpy.run_path(str(ROOT / "release" / "prose.py"))
    assert prose["main"]([str(page)]) == 1
    assert capsys.readouterr().out.startswith(f"{page}:2: expected an entry of at most 200")


# What manylinux_2_28 has; release/wheels.py makes wheels for it.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}


def test_the_module_needs_no_newer_system_than_its_wheel_says():
    """The linker takes the newest version of a symbol; old_glibc.cpp asks for older ones."""
    symbols = subprocess.check_output(["objdump", "-T", _C.__file__], text=True)
    needed = re.findall(r"\*UND\*.*\((\w+)_([\d.]+)\) +(\w+)$", symbols, re.MULTILINE)
    assert len(needed) > 100
    for kind, version, symbol in needed:
        found = tuple(map(int, version.split(".")))
        assert kind not in NEWEST or found <= NEWEST[kind], f"{symbol} of {kind} {version}"
