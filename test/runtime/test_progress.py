"""Bars on terminals, and silence elsewhere."""

import contextlib
import io

import pytest
import torch
from torch import nn

import torch_blocked
from torch_blocked import progress
from torch_blocked.bench.measure import time_interleaved
from torch_blocked.environment import tuning_file

pytestmark = pytest.mark.any_isa


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def all_is_worth_a_bar(monkeypatch, tmp_path):
    """And nothing was timed before."""
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def written(file, work) -> str:
    before = len(file.getvalue())
    with contextlib.redirect_stderr(file), torch.no_grad():
        work()
    return file.getvalue()[before:]


def tune():
    model, x = nn.Conv2d(16, 16, 3, padding=1).eval(), torch.randn(1, 16, 12, 12)
    return torch_blocked.optimize(model, x)


def rounds():
    time_interleaved({"one": lambda: None}, rounds=3, what="a model")


def explain():
    torch_blocked.explain(nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 12, 12), tune=False)


def one_by_one():
    assert list(progress.each("layers", "ab")) == ["a", "b"]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (tune, "timing kernels: 0it"),
        (rounds, "0/4 ["),
        (explain, "explaining:   0%|"),
        (one_by_one, "layers:   0%|"),
    ],
)
def test_a_bar_on_a_terminal_that_goes_away(work, words):
    lines = [line.strip() for line in written(Terminal(), work).split("\r")]
    assert any(words in line for line in lines)
    assert lines[-1] == lines[-2] == ""


@pytest.mark.parametrize("work", [tune, rounds])
def test_silence_elsewhere(work):
    assert written(io.StringIO(), work) == ""


def test_silence_where_all_is_known():
    (form,) = tune()._forms
    # Not those of this machine, which may be busy: what contradicts another is timed again.
    times = [
        (what, by, "0.1" if "nChw" in what else "1e6")
        for what, (by, _) in form.compiled.times().items()
    ]
    tuning_file().write_text("".join("\t".join(line) + "\n" for line in times))
    assert written(Terminal(), tune) == ""


@pytest.mark.parametrize("work", [tune, rounds])
def test_silence_about_what_is_soon_done(work, monkeypatch):
    monkeypatch.setattr(progress, "DELAY_SECONDS", 2)
    assert written(Terminal(), work).strip() == ""


def test_a_bar_counts():
    def work():
        with progress.Bar("a model", 2) as bar:
            bar.mininterval = 0  # else its next line comes after a tenth of a second
            bar.update()
            bar.update()

    text = written(Terminal(), work)
    assert "1/2 [" in text and "2/2 [" in text
