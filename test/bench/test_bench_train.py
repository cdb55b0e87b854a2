"""The command `python -m torch_blocked bench train`; no test asserts a time."""

import csv
import json

import pytest
import torch

from torch_blocked.__main__ import main
from torch_blocked.bench import models, train
from torch_blocked.bench.inference import blocked_tags

pytestmark = pytest.mark.any_isa

SMALL = ["bench", "train", "resnet18", "--size", "32", "--batch", "3", "--rounds", "2"]
MODES = ["nchw", "nhwc", blocked_tags()[0]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder with out.json and out.csv of one small run."""
    folder = tmp_path_factory.mktemp("train")
    files = ["--json", str(folder / "out.json"), "--csv", str(folder / "out.csv")]
    threads = torch.get_num_threads()
    assert main([*SMALL, "--no-compile", "--threads", "1", *files]) == 0
    assert torch.get_num_threads() == threads
    return folder


def test_json_has_every_mode(written):
    report = json.loads((written / "out.json").read_text())
    assert report["context"]["batch"] == 3 and report["context"]["threads"] == 1
    assert [result["mode"] for result in report["results"]] == MODES
    for result in report["results"]:
        assert result["input_dims"] == [3, 3, 32, 32]
        assert len(result["rounds_ms"]) == 2 and min(result["rounds_ms"]) > 0
        assert result["loss_error"] < train.LOSS_TOLERANCE
        assert result["gradient_error"] < train.GRADIENT_TOLERANCE
        assert (result["packs"] is None) == (result["mode"] in MODES[:2])
    blocked = report["results"][-1]
    assert blocked["fallbacks"] == 0 and blocked["packs"] > 0
    assert min(result["speed_to_best_torch"] for result in report["results"][:2]) <= 1


def test_csv_has_a_line_for_each_round(written):
    with (written / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["mode"], line["round"]) for line in lines] == [
        (m, r) for m in MODES for r in "01"
    ]


@pytest.mark.parametrize("name, size", (("mobilenet_v2", 64), ("unet", 32)))
def test_modes_agree(name, size):
    """Classes and masks as targets."""
    loaded = models.prepared(name, batch=4, size=size)
    results = train.bench_model(*loaded, rounds=1, compiles=False, steps=3)
    for result in results:
        assert result.loss_error < train.LOSS_TOLERANCE
        assert result.steps == 3 and result.loss_drift < 0.1
    assert results[-1].profile.fallbacks == 0


@pytest.mark.parametrize("last", (1.5, float("nan")))
def test_losses_that_leave_those_of_nchw_are_refused(last):
    losses = {"nchw": [2.0, 1.0], "nhwc": [2.0, 1.01], "nChw8c": [2.0, 1.05]}
    drifts = train.loss_drifts("net", losses, "nChw8c")
    assert [round(drift, 6) for drift in drifts.values()] == [0, 0.01, 0.05]
    with pytest.raises(train.WrongResult, match="net in nChw8c has losses wrong by .* 2 steps"):
        train.loss_drifts("net", losses | {"nChw8c": [2.0, last]}, "nChw8c")


def test_numbers_are_targets_of_mean_squared_error():
    loaded = models.prepared("hifigan", size=4)
    results = train.bench_model(*loaded, rounds=1, compiles=False)
    assert [result.mode for result in results] == ["ncw", blocked_tags(3)[0]]


@pytest.mark.parametrize(
    "wrong, training, mode, reference",
    [(1.5, 3, "nhwc", "float64"), (float("nan"), 6, "nhwc", "nchw")],
    ids=("gradient", "nan"),
)
def test_wrong_gradients_fail_before_they_are_timed(
    monkeypatch, capsys, wrong, training, mode, reference
):
    """Of two images in float64, nchw, nhwc and blocked; then of all in nchw, nhwc and blocked."""
    training_of = train.training_of
    made = []

    def sabotaged(*arguments):
        made.append(training_of(*arguments))
        if len(made) == training:
            for parameter in made[-1].model.parameters():
                parameter.register_hook(lambda gradient: gradient * wrong)
        return made[-1]

    monkeypatch.setattr(train, "training_of", sabotaged)
    monkeypatch.setattr(train, "time_interleaved", lambda *_, **__: pytest.fail("it was timed"))
    assert main([*SMALL, "--no-compile"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"torch_blocked bench train: resnet18 in {mode} has a loss wrong by ")
    assert f" of those in {reference}, expected " in error
    assert error.endswith("nothing was timed\n")


def test_autocast():
    loaded = models.prepared("mobilenet_v2", batch=2, size=32)
    results = train.bench_model(*loaded, rounds=1, compiles=False, autocast=True)
    assert [result.mode for result in results] == MODES
    assert results[-1].profile.fallbacks == 0
    assert max(result.loss_error for result in results) > 1e-4  # bfloat16


@pytest.mark.parametrize("factor, autocast", ((1.3, False), (5, True), (float("nan"), True)))
def test_rounding_under_autocast_is_measured_on_torch(factor, autocast):
    """torch's own gradients are off by half there."""

    def step(mode, factor):
        return train.FirstStep(mode, 1.0, [factor * torch.ones(3)])

    torchs, expected = step("nchw", 1.5 if autocast else 1), step("float64", 1)
    train.verify("net", [torchs, step("nChw8c", torchs.gradients[0][0])], expected, autocast)
    with pytest.raises(train.WrongResult, match="net in nChw8c .* of those in float64"):
        train.verify("net", [torchs, step("nChw8c", factor)], expected, autocast)


def test_bad_arguments_give_one_sentence(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "train", "resnet5"])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_blocked bench train: argument MODEL: unknown model 'resnet5'; ")
