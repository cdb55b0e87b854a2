"""The comparison benchmarks/peers.py; no test asserts a time or needs another engine."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import chart
import engines
import numpy
import peers
import pytest

pytestmark = pytest.mark.any_isa
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"


def record(model, engine, median_ms, threads=1, failure=""):
    return {
        "model": model,
        "batch": 1,
        "threads": threads,
        "engine": engine,
        "failure": failure,
        "median_ms": median_ms,
        "min_ms": median_ms,
    }


RECORDS = [
    record("a", "torch", 8.0),
    record("a", "openvino", 4.0),
    record("a", "torch_blocked", 2.0),
    record("b", "torch", 9.0),
    record("b", "openvino", None, failure="no such op"),
    record("b", "torch_blocked", 18.0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with out.json, out.svg and out.txt of a run of two engines and one that fails."""
    folder = tmp_path_factory.mktemp("peers")
    done = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "peers.py", "hifigan", "--threads", "1"),
            *("--engines", "torch,torch-cl,torch-fold", "--seconds", "0", "--cache", folder),
            *("--json", folder / "out.json", "--svg", folder / "out.svg"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder / "out.txt").write_text(done.stdout)
    return folder


def test_engines_run_in_processes_of_their_own(folder):
    report = json.loads((folder / "out.json").read_text())
    assert report["context"]["threads"] == [1] and report["tables"][0]["rows"][0][0] == "hifigan"
    torch, channels_last, folded = report["results"]
    assert "no channels_last" in channels_last["failure"] and channels_last["median_ms"] is None
    for result in (torch, folded):
        assert result["failure"] == ""
        assert len(result["rounds_ms"]) == peers.MIN_ROUNDS
        assert 0 < result["min_ms"] <= result["median_ms"]
        assert result["relative_error"] < engines.TOLERANCE
    assert "hifigan, torch-cl: torch has no channels_last" in (folder / "out.txt").read_text()


def test_a_wrong_result_is_not_timed(folder):
    (cached,) = folder.glob("hifigan-*")
    expected = cached / "batch1" / "expected.npy"
    right = numpy.load(expected)
    numpy.save(expected, right * 1.01)
    job = engines.Job("hifigan", 1, 1, str(cached))
    (result,) = peers.run_row(job, ["torch"], {}, seconds=0)
    numpy.save(expected, right)
    assert result["failure"].startswith("wrong by 9.9e-03") and result["median_ms"] is None


def test_busy_processes_come_and_go():
    with peers.busy(2) as others:
        assert [other.poll() for other in others] == [None, None]
    assert all(other.poll() is not None for other in others)


def test_a_dead_process_is_a_failure(monkeypatch):
    crash = [sys.executable, "-c", "import os; os.abort()"]
    monkeypatch.setattr(peers, "arguments", lambda *_: crash)
    (result,) = peers.run_row(engines.Job("hifigan", 1, 1, ""), ["torch"], {}, seconds=0)
    assert result["failure"] == "its process ended with -6"


def test_table_names_the_best_and_the_geometric_mean():
    lines = peers.render(RECORDS, "median_ms").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert lines[0] == "Batch 1, 1 thread, median_ms in ms"
    assert cells[4] == ["a", "8.00", "4.00", "**2.00**", "2.00x", "4.00x"]
    assert cells[5] == ["b", "**9.00**", "-", "18.00", "0.50x", "0.50x"]
    assert cells[6] == ["geometric mean", "", "", "", "1.00x", "1.41x"]
    assert "b, openvino: no such op" in lines


def test_later_measurements_replace_earlier_ones(tmp_path):
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"results": RECORDS}))
    later = [record("a", "openvino", 3.0), record("a", "openvino", 5.0, threads=2)]
    result = peers.merged([path], later)
    assert len(result) == len(RECORDS) + 1
    assert result[1]["median_ms"] == 3.0


def titles_of(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def test_chart_has_a_mark_for_each_result():
    titles = titles_of(chart.draw("a title", peers.rows_to_draw(RECORDS, "median_ms")))
    assert titles[0] == "a title"
    assert titles[1:4] == ["torch", "openvino", "torch_blocked"]  # the legend
    marks = dict(title.rsplit(": ", 1) for title in titles[4:])
    assert marks == {
        "a, 1, 1T, torch": "0.50",
        "a, 1, 1T, openvino": "1.00",
        "a, 1, 1T, torch_blocked": "2.00",
        "b, 1, 1T, torch": "1.00",
        "b, 1, 1T, torch_blocked": "0.50",
    }


def test_unknown_names_give_one_sentence(capsys):
    for arguments in (["resnet51"], ["resnet18", "--engines", "onnx"]):
        with pytest.raises(SystemExit):
            peers.parse(arguments)
    assert "unknown model 'resnet51'" in capsys.readouterr().err
