"""The site builds without a warning and has every page and public name; the pictures are those that
their script draws, and show what is in memory."""

import re
import subprocess
import sys
from pathlib import Path

import paths
import pytest
import torch

import torch_blocked

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import docstrings  # noqa: E402
import pictures  # noqa: E402

pytestmark = pytest.mark.any_isa


def test_site():
    """All links between pages lead somewhere, and each page is in the navigation, or -W fails."""
    site = ROOT / "build" / "docs"
    command = ("-m", "sphinx", "-W", "-q", "-E", "-b", "html", "-c", "docs", ".", str(site))
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in ROOT.glob("docs/*.md"):
        assert (site / "docs" / f"{page.stem}.html").exists()
    api = (site / "docs" / "api.html").read_text()
    missing = [name for name in torch_blocked.__all__ if f'id="torch_blocked.{name}"' not in api]
    assert not missing, f"docs/api.md lacks {missing}"
    assert "docs/index.html" in (site / "index.html").read_text()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn_by_their_script(name):
    text = pictures.PICTURES[name]().svg()
    assert (pictures.FOLDER / f"{name}.svg").read_text() == text, "run python docs/pictures.py"
    assert len(text) < 40_000


def test_no_picture_is_left_over():
    drawn = {path.stem for path in pictures.FOLDER.glob("*.svg")}
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    assert drawn == set(pictures.PICTURES)
    assert all(f"pictures/{name}.svg" in pages for name in drawn)


@pytest.mark.parametrize("tag", pictures.FORMATS)
def test_offsets_of_the_picture_are_those_in_memory(tag):
    """What it writes below a value is where a tensor of that format has the value."""
    x = torch.arange(2 * 16 * 5 * 4.0).reshape(pictures.DIMS)
    physical = getattr(torch_blocked.to_format(x, tag), "_physical", None)
    memory = torch_blocked.to_format(x, tag) if physical is None else physical
    line = memory.as_strided((x.numel(),), (1,))
    picture = pictures.Picture("")
    pictures.strip(picture, torch_blocked.Descriptor(pictures.DIMS, "f32", tag), "a", 0)
    shown = re.findall(r'"middle( small)?" x="([\d.]+)" y="[\d.]+">(\d+)<', "".join(picture.parts))
    values = {x: int(words) for small, x, words in shown if not small}
    offsets = {x: int(words) for small, x, words in shown if small}
    assert len(values) >= 10 and values.keys() == offsets.keys()
    for place, offset in offsets.items():
        assert line[offset] == values[place]


def test_the_table_of_paths_names_reorders(monkeypatch):
    """Of activations and of weights apart: an mkldnn tensor and its layers have both, blocked ones
    have weights packed already."""
    monkeypatch.setitem(paths.LAYERS, "small", ((16, 32), 28, 3))
    monkeypatch.setattr(paths, "TRACED", 3)
    rows = {row[1]: row for row in paths.rows("small", batch=1, rounds=1)}
    assert list(rows) == list(pictures.PATHS)
    assert all(len(row) == len(paths.HEADER) and row[0] == "small" for row in rows.values())
    with paths.verbose_lines() as lines:
        torch.randn(1, 16, 28, 28).to_mkldnn()
    assert any("reorder" in line for line in lines)
    model = paths.layers((16, 32), 3)
    weights, x = [tuple(model[0].weight.shape)], torch.randn(1, 16, 28, 28)
    opaque = paths.mkldnn_utils.to_mkldnn(paths.layers((16, 32), 3))
    _, activations, of_weights = paths.by_onednn(lambda: opaque(x.to_mkldnn()), weights)
    assert activations > 0 and of_weights > 0
    _, activations, of_weights = paths.traced(lambda: model(x.to_blocked()))
    assert activations > 0 and of_weights > 0  # the first call packs
    assert paths.traced(lambda: model(x.to_blocked()))[2] == 0


def test_docstrings_become_fields():
    def function(input, size):
        """A sentence of `code` and a*b.

        input: what goes in,
            on two lines; size: ignored
        size: how much.
        Returns both.
        Raises ValueError for others."""

    lines = function.__doc__.splitlines()
    lines = [lines[0], *(line.removeprefix(" " * 8) for line in lines[1:])]
    docstrings.process(None, "function", "", function, None, lines)
    assert [line for line in lines if line] == [
        "A sentence of ``code`` and a\\*b.",
        ":param input: what goes in, on two lines; size: ignored",
        ":param size: how much.",
        ":returns: both.",
        ":Raises: ValueError for others.",
    ]
