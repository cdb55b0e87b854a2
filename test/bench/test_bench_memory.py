"""The command `python -m torch_blocked bench memory`."""

import json

import pytest

from torch_blocked.__main__ import main
from torch_blocked.bench import memory

pytestmark = pytest.mark.any_isa


def test_every_form(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "out.json"
    arguments = ["mobilenet_v2", "--input", "3x64x64", "--threads", "2", "--json", str(path)]
    assert main(["bench", "memory", *arguments]) == 0
    results = {each["form"]: each for each in json.loads(path.read_text())["results"]}
    assert list(results) == list(memory.FORMS)
    assert all(each["rss_mib"] > 100 for each in results.values())
    # 14 MB of weights: what counts here is that no module comes with them.
    assert results["load, release"]["of_torch"] < 1.3
    assert results["optimize, release"]["of_torch"] < 1.3
    assert "| mobilenet_v2 | torch             |" in capsys.readouterr().out
