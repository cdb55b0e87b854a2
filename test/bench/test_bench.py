"""The command `python -m torch_blocked bench` and the main example; no test asserts a time."""

import csv
import importlib.util
import itertools
import json
import re
import statistics
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_blocked
from torch_blocked.__main__ import main
from torch_blocked.bench import inference, memory, models, packages, time_bars
from torch_blocked.bench.measure import Timing, time_interleaved
from torch_blocked.bench.networks import MODELS
from torch_blocked.text_table import columns, markdown

pytestmark = pytest.mark.any_isa

EXAMPLES = Path(__file__).parents[2] / "examples"
SVG = "{http://www.w3.org/2000/svg}"
CHOICE = ", ".join([*MODELS, *packages.SHORT])
SMALL = ["resnet18", "--size", "64", "--rounds", "2"]
BLOCKED = [f"nChw{block}c" for block in torch_blocked.native_blocks()]
FORMATS = ["nchw", "nhwc", *BLOCKED, "optimize"]
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
    """(folder with out.json, out.csv and out.svg, exit code) of one small run."""
    folder = tmp_path_factory.mktemp("bench")
    files = [f"--{kind}={folder / 'out'}.{kind}" for kind in ("json", "csv")]
    files.append(f"--plot={folder / 'out.svg'}")
    return folder, main(["bench", "models", *SMALL, "--batch", "3", "--threads", "1", *files])


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
        assert result["relative_error"] < inference.TOLERANCES["float32"]
        assert (result["reorders"] is None) == (result["format"] not in BLOCKED)
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
    assert main(["bench", "models", *SMALL, "--threads", "1", "--no-fold", "--format", "nhwc"]) == 0
    assert torch.get_num_threads() == threads
    header, blank, *body = capsys.readouterr().out.splitlines()
    environment = torch_blocked.env()
    for word in ("cpu", "isa", "torch", "onednn", "torch_blocked"):
        assert str(environment[word]) in header
    assert ", 1 thread, " in header and "batch 1" in header
    assert header.endswith("batch norm folded in no row") and blank == ""
    rows = [line.strip("| ").split("|") for line in body if line.startswith("| resnet18")]
    assert [row[1].strip() for row in rows] == FORMATS[:2]
    assert "Weights: resnet18 random." in body


def test_plot_has_a_bar_for_each_format_and_its_spread(written):
    folder, _ = written
    report = json.loads((folder / "out.json").read_text())["results"]
    root = ElementTree.parse(folder / "out.svg").getroot()
    texts = [node.text for node in root.iter(f"{SVG}text")]
    medians = [f"{statistics.median(record['rounds_ms']):.2f} ms" for record in report]
    assert [t for t in texts if t in FORMATS] == FORMATS and "resnet18" in texts
    assert [t.partition(" (")[0] for t in texts if " ms (" in t] == medians
    widths = [float(bar.get("width")) for bar in root.iter(f"{SVG}rect")][1:]  # after the page's
    slowest = max(statistics.median(record["rounds_ms"]) for record in report)
    for width, record in zip(widths, report, strict=True):
        share = statistics.median(record["rounds_ms"]) / slowest
        assert width == pytest.approx(max(widths) * share, abs=0.2)
    assert len([node for node in root.iter(f"{SVG}path") if node.get("class") == "spread"]) == len(
        FORMATS
    )


def test_plot_of_a_file(written, tmp_path):
    folder, _ = written
    assert main(["bench", "plot", f"{folder / 'out.json'}", f"{tmp_path / 'again.svg'}"]) == 0
    assert (tmp_path / "again.svg").read_text() == (folder / "out.svg").read_text()
    (tmp_path / "none.json").write_text('{"context": {}, "results": [{"model": "a"}]}')
    assert main(["bench", "plot", f"{tmp_path / 'none.json'}", f"{tmp_path / 'a.svg'}"]) == 1


def test_plot_of_other_engines():
    """Records of benchmarks/peers.py name engines."""
    record = {"model": "a", "batch": 8, "threads": 2, "rounds_ms": [1.0, 2.0, 9.0]}
    picture = time_bars.draw([record | {"engine": "torch"}, record | {"engine": "ours"}])
    texts = [node.text for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert texts[1:] == ["a, batch 8, threads 2"] + [
        word for name in ("torch", "ours") for word in (name, "2.00 ms (1.50 to 5.50)")
    ]


class Odd(nn.Module):
    """A model of the user's: no folding by tracing, two results, one of them no tensor."""

    def forward(self, x):
        y = self.convolution(x) if x.sum() < 1e9 else x
        return {"y": y, "mean": y.mean(), "dims": y.dim()}

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 5, 3)


def test_a_model_of_the_users(capsys):
    arguments = ["bench", "test_bench:Odd", "--input", "4x9x8", "--rounds", "1"]
    assert main(arguments) == 1
    assert "test_bench:Odd; --no-fold times it as it is" in capsys.readouterr().err
    assert main([*arguments, "--no-fold", "--format", "nChw4c,optimize"]) == 0
    rows = [line.split()[1:4] for line in capsys.readouterr().out.splitlines() if "Odd" in line]
    assert [row[2] for row in rows[:3]] == ["nchw", "nChw4c", "optimize"]


def test_a_format_of_other_dims(capsys):
    assert main(["bench", *SMALL, "--format", "nCw8c"]) == 1
    assert "torch_blocked bench models: " in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype, tmp_path):
    path = tmp_path / "out.json"
    formats = ["--format", BLOCKED[0], "--dtype", dtype, "--json", str(path)]
    assert main(["bench", "models", *SMALL, *formats]) == 0
    report = json.loads(path.read_text())
    assert report["context"]["dtype"] == dtype
    assert all(result["relative_error"] > 1e-6 for result in report["results"])


def report_of(path, **medians):
    rounds = {name: [0.9 * ms, ms, 1.1 * ms] for name, ms in medians.items()}
    results = [{"model": "a", "format": f, "rounds_ms": r} for f, r in rounds.items()]
    path.write_text(json.dumps({"context": {"torch": path.stem}, "results": results}))
    return str(path)


def test_two_runs_are_compared(tmp_path, capsys):
    before = report_of(tmp_path / "old.json", nchw=10.0, nhwc=10.0, nChw8c=10.0, nChw4c=1.0)
    after = report_of(tmp_path / "new.json", nchw=10.5, nhwc=5.0, nChw8c=20.0)
    assert main(["bench", "compare", before, after]) == 0
    told, *lines = capsys.readouterr().out.splitlines()
    assert told == "torch: old before, new after"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5]]
    assert rows == [
        ["a", "nchw", "10.000", "10.500", "0.952x", "0.86-1.05", "same"],
        ["a", "nhwc", "10.000", "5.000", "2.000x", "1.81-2.21", "faster"],
        ["a", "nChw8c", "10.000", "20.000", "0.500x", "0.45-0.55", "slower"],
    ]
    assert lines[-1].startswith("geometric mean 0.984x of 3")
    assert main(["bench", "compare", before, report_of(tmp_path / "none.json")]) == 1
    assert "no timed measurement in common" in capsys.readouterr().err


def test_table_is_aligned_markdown():
    rows = [["a", "1.5"], ["longer", "10.25"]]
    text = markdown(["name", "ms"], rows)
    assert text.splitlines() == [
        "| name   |    ms |",
        "|--------|------:|",
        "| a      |   1.5 |",
        "| longer | 10.25 |",
    ]
    assert columns(["name", "ms"], rows, "lr").splitlines() == [
        "name       ms",
        "a         1.5",
        "longer  10.25",
    ]


@pytest.mark.parametrize(
    "name, size, plain", [("hifigan", 4, ["ncw"]), ("unet3d", 8, ["ncdhw", "ndhwc"])]
)
def test_signals_and_volumes_have_formats_of_their_own(name, size, plain):
    formats = [*plain[1:], *inference.blocked_tags(len(plain[0]))]
    results = inference.bench_model(*models.prepared(name, size=size), 1, formats=formats)
    ndim = len(results[0].input_dims)
    assert [result.format for result in results] == [plain[0], *formats]
    assert results[0].input_dims[2:] == (size,) * (ndim - 2) and results[0].speed_to_nchw == 1


@pytest.mark.parametrize("fold", [True, False], ids=["fold", "no-fold"])
def test_resnet50_stays_blocked(fold):
    loaded = models.prepared("resnet50", size=64)
    for result in inference.bench_model(*loaded, rounds=1, fold=fold, formats=BLOCKED):
        if result.profile:
            assert result.profile.reorders <= 1
            assert result.profile.packs == 0
            assert result.profile.fallbacks == 0
            assert result.profile.refs == 0


class WithBodyInDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.body = nn.Conv2d(16, 16, 3).double()

    def forward(self, x):
        return self.body(self.stem(x).double()).float()


def test_model_of_two_dtypes_runs_as_it_is(monkeypatch):
    module = types.ModuleType("two_dtypes")
    module.build = WithBodyInDouble
    monkeypatch.setitem(sys.modules, "two_dtypes", module)
    loaded = models.prepared("two_dtypes:build", size=8)
    results = inference.bench_model(*loaded, rounds=1, formats=BLOCKED)
    assert [result.format for result in results] == ["nchw", *BLOCKED]
    assert models.load("two_dtypes:build").module.body.weight.dtype is torch.float64


@pytest.mark.parametrize(
    "wrong", [lambda x: x * 1.01, lambda x: x * float("nan")], ids=["1%", "nan"]
)
def test_wrong_result_fails_before_it_is_timed(monkeypatch, capsys, wrong):
    to_blocked = torch_blocked.to_blocked
    monkeypatch.setattr(torch_blocked, "to_blocked", lambda x, tag: to_blocked(wrong(x), tag))
    monkeypatch.setattr(inference, "time_interleaved", lambda *_, **__: pytest.fail("it was timed"))
    assert main(["bench", "models", *SMALL, "--format", BLOCKED[0]]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"torch_blocked bench models: resnet18 in {BLOCKED[0]} is wrong by ")
    assert error.endswith("expected below 1e-04; nothing was timed\n")


def test_wrong_dims_fail(monkeypatch, capsys):
    to_blocked = torch_blocked.to_blocked
    monkeypatch.setattr(torch_blocked, "to_blocked", lambda x, tag: to_blocked(x[:0], tag))
    assert main(["bench", "models", *SMALL, "--format", BLOCKED[0]]) == 1
    assert "gave dims [0, 1000], expected [1, 1000]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["resnet51"], "argument MODEL: unknown model 'resnet51'; did you mean 'resnet50'?"),
        (
            ["?"],
            f"argument MODEL: unknown model '?'; choose from {CHOICE}, {packages.FORMS}",
        ),
        (["unet", "--batch", "0"], "argument --batch: expected an integer above 0, got '0'"),
        (
            ["unet", "--json", "no/x"],
            "argument --json: expected a file in an existing folder, got 'no/x'",
        ),
        ([], "the following arguments are required: MODEL"),
        (["no.such:net"], "argument MODEL: 'no.such:net': no module 'no'; is it installed?"),
        (
            ["math:pi"],
            "argument MODEL: 'math:pi': expected a function or class that makes a model, "
            "got 3.141592653589793",
        ),
        (["unet", "--input", "3x0"], "argument --input: expected an integer above 0, got '0'"),
        (
            ["unet", "--format", "nhwcc"],
            "argument --format: unknown format 'nhwcc'; did you mean 'nhwc'?",
        ),
    ],
    ids=["near", "far", "batch", "folder", "none", "module", "factory", "input", "format"],
)
def test_bad_arguments_give_one_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "models", *arguments])
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"torch_blocked bench models: {sentence}\n"


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

    assert "COMMAND" in run() and "BENCHMARK" in run("bench")
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
    assert benchmarks == [["bench", "models", "efficientnet_lite0", "resnet50", "--rounds", "10"]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dense, nchw:" and lines[6].startswith("blocked, nChw")
    assert lines[1] == lines[7] and lines[1].endswith("  Egyptian cat")


class Two(torch.nn.Module):
    """A model of two arguments of other dims."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 8)

    def forward(self, image, other):
        return self.first(image).relu().mean((2, 3)) + self.second(other)


TWO = ["--input", "3x8x8", "--input"]
OF_SEVERAL = [["bench", "models", "--rounds", "1"], ["explain"], ["bench", "memory"],
              ["bench", "layers", "--rounds", "1"]]  # fmt: skip
OF_ONE = [["bench", "train", "--rounds", "1"]]


@pytest.mark.parametrize("command", OF_SEVERAL, ids=" ".join)
def test_models_of_several_inputs(command, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # bench memory has processes
    monkeypatch.setattr(memory, "FORMS", {"torch": memory.dense, "optimize": memory.optimized})
    assert main([*command, "test_bench:Two", *TWO, "8"]) == 0
    out = capsys.readouterr().out
    assert "test_bench:Two" in out or "first" in out


WRONG_INPUTS = {
    "one for two": (["test_bench:Two", "--input", "3x8x8"], "an --input for each argument of "
                    r"forward\(image, other\), got 1; give --input once for each"),
    "none for two": (["test_bench:Two"], "an --input for each argument of forward"),
    "three for two": (["test_bench:Two", *TWO, "8", "--input", "8"], r"got 3; give"),
    "two for one": (["resnet18", *TWO, "3x8x8"], "for each argument of forward.*got 2"),
    "other sizes": (["test_bench:Two", *TWO, "9"], "--input as the model takes it, got 3x8x8 "
                    "and 9: mat1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_INPUTS)
@pytest.mark.parametrize("command", [*OF_SEVERAL, *OF_ONE], ids=" ".join)
def test_wrong_inputs_give_one_sentence(command, case, capsys):
    words, sentence = WRONG_INPUTS[case]
    assert main([*command, *words]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    several = case == "other sizes" and command in OF_ONE
    expected = "expected one --input here, got 2; explain, bench models" if several else sentence
    assert re.search(f"^torch_blocked [a-z ]+: '.*': .*{expected}", error), error
