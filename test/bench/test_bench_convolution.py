"""benchmarks/convolutions.py; no test asserts a time."""

import json
from math import prod

import convolutions
import pytest
import torch
from convolutions import layers_of, main
from torch import nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.bench.report import WrongResult

NAME = "test_bench_convolution:Small"
SMALL = [NAME, "--input", "17x9x7", "--rounds", "2"]


class Small(nn.Module):
    """Convolutions of one, two and three dims, one of them twice."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(17, 17, 3, padding="same")
        self.again = nn.Conv2d(17, 17, 3, padding=1)
        self.volume = nn.ConvTranspose3d(17, 16, 2, (2, 2, 1))
        self.signal = nn.Conv1d(17, 8, 5, padding="valid", dilation=2)

    def forward(self, x):
        y = self.again(self.image(x))
        return self.volume(y[:, :, None]), self.signal(y.flatten(2))


LAYERS = ("17-17@9x7 k3", "17-16@1x9x7 k2 s2x2x1 t", "17-8@63 k5 p0 d2")


def test_layers_are_those_of_the_model():
    model = Small()
    layers = layers_of(model, torch.zeros(1, 17, 9, 7))
    assert [(layer.count, layer.id) for layer in layers] == list(
        zip((2, 1, 1), LAYERS, strict=True)
    )
    assert all(not module._forward_hooks for module in model.modules())
    for layer, module in zip(layers, (model.image, model.volume, model.signal), strict=True):
        input = torch.randn(2, layer.in_channels, *layer.size)
        assert layer.weight_dims == module.weight.shape
        expected = module(input)
        output = convolutions.convolve(layer, input, module.weight, module.bias)
        torch.testing.assert_close(output, expected)
        pixels = prod(layer.size) if layer.transposed else prod(expected.shape[2:])
        assert layer.flops(tuple(expected.shape)) == 2 * 2 * pixels * prod(layer.weight_dims)


@pytest.mark.parametrize(
    "name, distinct, calls", [("resnet50", 23, 53), ("hifigan", 42, 78), ("unet3d", 18, 18)]
)
def test_layers_of_known_models(name, distinct, calls):
    layers = convolutions.layers_to_time(name, None, None)
    assert (len(layers), sum(layer.count for layer in layers)) == (distinct, calls)


def test_report(tmp_path, capsys):
    files = ["--json", str(tmp_path / "out.json")]
    threads = torch.get_num_threads()
    extra = ["--batch", "1,2", "--threads", "1,2", "--implementations", "winograd4,direct"]
    assert main([*SMALL, *extra, *files]) == 0
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    for title in (", batch 1, 1 thread\n", ", batch 2, 2 threads\n"):
        assert title in out
    assert out.startswith(torch_blocked.env()["cpu"])
    rows = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("| 17-17@")]
    assert len(rows) == 4
    assert all(float(cell.strip().removesuffix("x")) > 0 for row in rows for cell in row[-1:])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["context"]["core_peak_gflops"] > 0
    records = report["results"]
    ours = [record for record in records if record["implementation"] == "ours"]
    assert len(ours) == len(LAYERS) * 4
    assert {record["chosen"] for record in ours} <= set(_C.implementations()["convolution"])
    assert {"torch", "winograd4"} <= {r["implementation"] for r in records if "k3" in r["layer"]}
    assert not any(r["implementation"] == "winograd4" for r in records if "k1" in r["layer"])


def test_kernel_selects_layers(capsys):
    assert main([*SMALL, "--kernel", "5"]) == 0
    out = capsys.readouterr().out
    assert "17-8@63 k5 p0 d2" in out and "k3" not in out


def test_wrong_result_fails_before_it_is_timed(monkeypatch):
    to_blocked = torch_blocked.to_blocked
    monkeypatch.setattr(torch_blocked, "to_blocked", lambda x, tag: to_blocked(x * 1.001, tag))
    monkeypatch.setattr(
        convolutions, "time_interleaved", lambda *_, **__: pytest.fail("it was timed")
    )
    with pytest.raises(WrongResult, match=f"{NAME} {LAYERS[0]} by ours is wrong by .*1e-05"):
        main(SMALL)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "the following arguments are required: MODEL"),
        (["resnet"], "argument MODEL: unknown model 'resnet'; did you mean 'resnet50'?"),
        (
            ["unet", "--implementations", "winograd"],
            "argument --implementations: unknown name 'winograd'; did you mean 'winograd4'?",
        ),
        (["unet", "--batch", "1,0"], "argument --batch: expected an integer above 0, got '0'"),
    ],
    ids=["none", "near", "implementation", "batch"],
)
def test_bad_arguments_give_one_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit):
        main(arguments)
    assert sentence in capsys.readouterr().err


def test_peak_is_a_peak():
    """No measure of time, but of sense: a core does between 1 and 1000 GF/s."""
    assert 1 < _C.fma_peak_gflops() < 1000
