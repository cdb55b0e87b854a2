"""What a release says of itself: one version everywhere, and the rules of its Markdown."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import torch_blocked

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
