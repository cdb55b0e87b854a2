"""The command `python -m torch_blocked bench` and the main example; no test asserts a time."""

import csv
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_blocked
from torch_blocked.__main__ import main
from torch_blocked.bench import inference
from torch_blocked.bench.measure import Timing, time_interleaved
from torch_blocked.bench.models import MODELS
from torch_blocked.bench.report import table

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["resnet18", "--size", "64", "--rounds", "2"]
FORMATS = ["nchw", "nhwc", *(f"nChw{block}c" for block in torch_blocked.native_blocks())]
CONTEXT = {
    "date",
    "cpu",
    "isa",
    "isa_limits",
    "threads",
    "torch",
    "onednn",
    "torch_blocked",
    "dtype",
    "batch",
    "rounds",
    "batch_norm",
}
RESULT = {
    "model",
    "weights",
    "input_dims",
    "folded_batch_norms",
    "format",
    "median_ms",
    "iqr_ms",
    "min_ms",
    "speed_to_nchw",
    "relative_error",
    "reorder_percent",
    "reorders",
    "packs",
    "fallbacks",
    "refs",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder with out.json and out.csv, exit code) of one small run."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "out.json"), "--csv", str(folder / "out.csv")]
    return folder, main(["bench", *SMALL, "--batch", "3", "--threads", "1", *files])


def test_json_has_every_field(written):
    folder, code = written
    report = json.loads((folder / "out.json").read_text())
    assert code == 0
    assert set(report["context"]) == CONTEXT
    assert report["context"]["threads"] == 1 and report["context"]["batch"] == 3
    assert [result["format"] for result in report["results"]] == FORMATS
    for result in report["results"]:
        assert set(result) == RESULT | {"rounds_ms"}
        assert result["input_dims"] == [3, 3, 64, 64]
        assert len(result["rounds_ms"]) == 2 and min(result["rounds_ms"]) > 0
        assert result["relative_error"] < inference.TOLERANCE
        dense = result["format"] in ("nchw", "nhwc")
        assert (result["reorders"] is None) == dense
    assert report["results"][0]["speed_to_nchw"] == 1


def test_csv_has_a_line_for_each_round(written):
    folder, _ = written
    with (folder / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert set(lines[0]) == CONTEXT | RESULT | {"round", "ms"}
    assert [(line["format"], line["round"]) for line in lines] == list(
        itertools.product(FORMATS, "01")
    )
    assert lines[0]["input_dims"] == "3x3x64x64"


def test_report_names_the_circumstances(capsys):
    threads = torch.get_num_threads()
    assert main(["bench", *SMALL, "--threads", "1", "--no-fold"]) == 0
    assert torch.get_num_threads() == threads
    header, blank, *body = capsys.readouterr().out.splitlines()
    environment = torch_blocked.env()
    for word in ("cpu", "isa", "torch", "onednn", "torch_blocked"):
        assert str(environment[word]) in header
    assert ", 1 thread, " in header and "batch 1" in header
    assert header.endswith("batch norm folded in no row") and blank == ""
    rows = [line.strip("| ").split("|") for line in body if line.startswith("| resnet18")]
    assert [row[1].strip() for row in rows] == FORMATS
    assert "Weights: resnet18 random." in body


def test_table_is_aligned_markdown():
    text = table(["name", "ms"], [["a", "1.5"], ["longer", "10.25"]])
    assert text.splitlines() == [
        "| name   |    ms |",
        "|--------|------:|",
        "| a      |   1.5 |",
        "| longer | 10.25 |",
    ]


@pytest.mark.parametrize(
    "name, size, plain", [("hifigan", 4, ["ncw"]), ("unet3d", 8, ["ncdhw", "ndhwc"])]
)
def test_signals_and_volumes_have_formats_of_their_own(name, size, plain):
    results = inference.bench_model(name, rounds=1, size=size)
    ndim = len(results[0].input_dims)
    assert [result.format for result in results] == [*plain, *inference.blocked_tags(ndim)]
    assert results[0].input_dims[2:] == (size,) * (ndim - 2) and results[0].speed_to_nchw == 1


@pytest.mark.parametrize("fold", [True, False], ids=["fold", "no-fold"])
def test_resnet50_stays_blocked(fold):
    for result in inference.bench_model("resnet50", rounds=1, fold=fold, size=64):
        if result.profile:
            assert result.profile.reorders <= 1
            assert result.profile.packs == 0
            assert result.profile.fallbacks == 0
            assert result.profile.refs == 0


@pytest.mark.parametrize(
    "wrong", [lambda x: x * 1.01, lambda x: x * float("nan")], ids=["1%", "nan"]
)
def test_wrong_result_fails_before_it_is_timed(monkeypatch, capsys, wrong):
    to_blocked = torch_blocked.to_blocked
    monkeypatch.setattr(torch_blocked, "to_blocked", lambda x, tag: to_blocked(wrong(x), tag))
    monkeypatch.setattr(inference, "time_interleaved", lambda *_: pytest.fail("it was timed"))
    assert main(["bench", *SMALL]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"torch_blocked bench: resnet18 in {FORMATS[2]} is wrong by ")
    assert error.endswith("expected below 1e-04; nothing was timed\n")


def test_wrong_dims_fail(monkeypatch, capsys):
    to_blocked = torch_blocked.to_blocked
    monkeypatch.setattr(torch_blocked, "to_blocked", lambda x, tag: to_blocked(x[:0], tag))
    assert main(["bench", *SMALL]) == 1
    assert "gave dims [0, 1000], expected [1, 1000]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["resnet51"], "argument MODEL: unknown model 'resnet51'; did you mean 'resnet50'?"),
        (["?"], f"argument MODEL: unknown model '?'; choose from {', '.join(MODELS)}"),
        (["unet", "--batch", "0"], "argument --batch: expected an integer above 0, got '0'"),
        (
            ["unet", "--json", "no/x"],
            "argument --json: expected a file in an existing folder, got 'no/x'",
        ),
        ([], "the following arguments are required: MODEL"),
    ],
    ids=["near", "far", "batch", "folder", "none"],
)
def test_bad_arguments_give_one_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as exit:
        main(["bench", *arguments])
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"torch_blocked bench: {sentence}\n"


def test_rounds_are_interleaved_and_rotated():
    calls = []
    rivals = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = time_interleaved(rivals, rounds=4, warmups=1)
    order = [name for name, _ in itertools.groupby(calls)]
    # One warm-up and one call to choose the number of calls in a sample, then four rounds.
    assert "".join(order) == "abc" + "abc" + "abc" + "bca" + "cab" + "abc"
    assert all(len(timing.rounds_ms) == 4 for timing in timings.values())


def test_statistics():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0))
    assert (timing.median_ms, timing.iqr_ms, timing.min_ms) == (3.0, 2.0, 1.0)
    assert Timing((2.0,)).iqr_ms == 0


def test_command_line_in_a_process():
    def run(*arguments):
        command = [sys.executable, "-m", "torch_blocked", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "COMMAND" in run()
    environment = dict(line.split(maxsplit=1) for line in run("env").splitlines())
    assert set(environment) == set(torch_blocked.env())
    assert environment["torch"] == torch.__version__


def test_classify_sees_the_same_cat_dense_and_blocked(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("classify", EXAMPLES / "classify.py")
    classify = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(classify)
    benchmarks = []
    monkeypatch.setattr(classify, "command_line", lambda line: benchmarks.append(line) or 0)
    assert classify.main() == 0
    assert benchmarks == [["bench", "efficientnet_lite0", "resnet50", "--rounds", "10"]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dense, nchw:" and lines[6].startswith("blocked, nChw")
    assert lines[1] == lines[7] and lines[1].endswith("  Egyptian cat")
