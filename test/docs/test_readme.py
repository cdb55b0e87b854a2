"""The code in README.md and docs/*.md runs, and what it says about files and commands is so."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import fake_packages

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of code; line is that of its first line in the page."""

    page: Path
    language: str
    line: int
    code: str


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(page, match[1], line, match[2]))
    return [block for block in found if block.language in languages]


def commands() -> list[str]:
    """The lines after a prompt, without their comments."""
    lines = [line for block in blocks("console", "bash") for line in block.code.splitlines()]
    return [line[1:].partition(" #")[0].strip() for line in lines if line.startswith("$")]


PYTHON_PAGES = sorted({block.page for block in blocks("python")})
PYTHON_COMMANDS = [line for line in dict.fromkeys(commands()) if re.match(r"(\S*/)?python ", line)]
# What makes a benchmark short: one of its models, and later arguments, which win.
FEWER_MODELS = ("bench memory torchvision:resnet50 torchvision:resnet18", "bench memory")
SHORTER = {
    "bench models": "--size 64 --rounds 1 --format nhwc",
    "bench memory": "--input 3x64x64",
    "torch_blocked explain": "--input 3x64x64 --html /dev/null --json /dev/null",
}
MAKE_COMMANDS = [line for line in dict.fromkeys(commands()) if line.startswith("make ")]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_blocks(page, tmp_path):
    """In one namespace per page, in order; a failure shows the page's own line."""
    namespace = {"__name__": page.stem}
    with contextlib.chdir(tmp_path):
        for block in blocks("python"):
            if block.page == page:
                source = "\n" * (block.line - 1) + block.code
                exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("command", PYTHON_COMMANDS)
def test_python_commands(command, tmp_path):
    """What they name as timm:NAME and the like is in small packages of ours."""
    shorter = [short for words, short in SHORTER.items() if words in command]
    arguments = shlex.split(" ".join([command.replace(*FEWER_MODELS), *shorter]))[1:]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(fake_packages.write(tmp_path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", MAKE_COMMANDS)
def test_make_targets(command):
    """The target exists; running it would install an environment and run this suite again."""
    variables = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        [*shlex.split(command), "--dry-run"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    paths = re.findall(r"`((?:csrc|src|torch_blocked|test|docs|examples)/[\w./]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing
