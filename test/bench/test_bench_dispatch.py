"""benchmarks/dispatch.py; no test asserts a time."""

import json

import dispatch
import pytest

import torch_blocked
from torch_blocked.bench.report import WrongResult

pytestmark = pytest.mark.any_isa


def test_every_op_in_every_mode(tmp_path, capsys, monkeypatch):
    for name, few in {"CALLS": 10, "SHORT": 2, "LONG": 4}.items():
        monkeypatch.setattr(dispatch, name, few)
    assert dispatch.main(["--rounds", "2", "--json", str(tmp_path / "out.json")]) == 0
    rows = [(op, mode) for op in dispatch.OPS for mode in dispatch.MODES]
    written = json.loads((tmp_path / "out.json").read_text())
    results, weights = written["results"], written["context"]["weights"]
    assert [(row["channels"], row["size"]) for row in weights] == list(dispatch.WEIGHTS)
    assert all(row["own_us"] > 0 and row["shared_us"] > 0 for row in weights)
    assert [(result["op"], result["mode"]) for result in results] == rows
    assert all(result["blocked_us"] > 0 and result["kernel_us"] > 0 for result in results)
    out = capsys.readouterr().out
    assert "| relu    | inference |" in out
    assert "a step of an optimized model" in out


def test_wrong_results_are_not_timed(monkeypatch):
    monkeypatch.setitem(dispatch.OPS, "wrong", lambda x: x + torch_blocked.is_blocked(x))
    monkeypatch.setattr(dispatch, "time_interleaved", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(WrongResult, match="wrong of a blocked tensor"):
        dispatch.bench_op("wrong", "grad", 1)
