"""The command `python -m torch_blocked bench conv`; no test asserts a time."""

import csv
import json
from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch

import torch_blocked
from torch_blocked import _C
from torch_blocked.__main__ import main
from torch_blocked.bench import convolution
from torch_blocked.bench.layers import LAYERS, Layer, parse
from torch_blocked.bench.models import MODELS, build_model

ALL_LAYERS = [layer for layers in LAYERS.values() for layer in layers]
SMALL = (
    parse("2x 17-8@9x7 k3", 2),
    parse("8-16@5 k2 s2 p0 t", 3),
    parse("8-8@20 k5 d2", 1),
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(LAYERS, "small", SMALL)
    return ["bench", "conv", "--shapes", "small", "--rounds", "2"]


@pytest.mark.parametrize("layer", ALL_LAYERS, ids=lambda layer: layer.id)
def test_layers_are_what_their_lines_say(layer):
    assert parse(f"{layer.count}x {layer.id}", len(layer.size)) == layer
    dims = (2, layer.in_channels, *layer.size)
    tensors = (torch.empty(d, device="meta") for d in (dims, layer.weight_dims))
    bias = torch.empty(layer.out_channels, device="meta")
    output = convolution.convolve(layer, *tensors, bias)
    pixels = prod(dims[2:] if layer.transposed else output.shape[2:])
    assert layer.flops(2) == 2 * 2 * pixels * prod(layer.weight_dims)


def layer_of(module, input):
    """The row of the list that describes a module and its input."""
    return Layer(
        1,
        module.in_channels,
        module.out_channels,
        tuple(input.shape[2:]),
        module.kernel_size,
        module.stride[0],
        module.padding,
        module.dilation[0],
        module.groups,
        module.transposed,
    )


@pytest.mark.parametrize("name", sorted(LAYERS.keys() & MODELS.keys()))
def test_lists_have_the_layers_of_the_models(name):
    found = Counter()
    model, _ = build_model(name)
    for module in model.modules():
        if hasattr(module, "transposed"):
            module.register_forward_hook(lambda m, args, _: found.update([layer_of(m, args[0])]))
    model.to("meta")(torch.empty(MODELS[name].input_dims, device="meta")[None])
    assert found == {replace(layer, count=1): layer.count for layer in LAYERS[name]}


def test_report(small, tmp_path, capsys):
    files = ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")]
    threads = torch.get_num_threads()
    extra = ["--batch", "1,2", "--threads", "1,2", "--implementations", "winograd4,direct"]
    assert main([*small, *extra, *files]) == 0
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    for title in ("small, batch 1, 1 thread\n", "small, batch 2, 2 threads\n"):
        assert title in out
    assert out.startswith(torch_blocked.env()["cpu"])
    rows = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("| 17-8@")]
    assert len(rows) == 4
    assert all(float(cell.strip().removesuffix("x")) > 0 for row in rows for cell in row[-1:])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["context"]["core_peak_gflops"] > 0
    records = report["results"]
    ours = [record for record in records if record["implementation"] == "ours"]
    assert len(ours) == len(SMALL) * 4
    assert {record["chosen"] for record in ours} <= set(_C.implementations()["convolution"])
    assert {"torch", "winograd4"} <= {r["implementation"] for r in records if "k3" in r["layer"]}
    assert not any(r["implementation"] == "winograd4" for r in records if "k3" not in r["layer"])
    with (tmp_path / "out.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(records)


def test_kernel_selects_layers(small, capsys):
    assert main([*small, "--kernel", "5"]) == 0
    out = capsys.readouterr().out
    assert "8-8@20 k5 d2" in out and "k3" not in out


def test_wrong_result_fails_before_it_is_timed(small, monkeypatch, capsys):
    to_blocked = torch_blocked.to_blocked
    monkeypatch.setattr(torch_blocked, "to_blocked", lambda x, tag: to_blocked(x * 1.001, tag))
    monkeypatch.setattr(convolution, "time_interleaved", lambda *_: pytest.fail("it was timed"))
    assert main(small) == 1
    error = capsys.readouterr().err
    assert error.startswith("torch_blocked bench conv: small 17-8@9x7 k3 by ours is wrong by ")
    assert error.endswith("expected below 1e-05; nothing was timed\n")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "the following arguments are required: --shapes"),
        (["--shapes", "vgg"], "argument --shapes: unknown name 'vgg'; did you mean 'vgg16'?"),
        (
            ["--shapes", "vgg16", "--batch", "1,0"],
            "argument --batch: expected an integer above 0, got '0'",
        ),
    ],
    ids=["none", "near", "batch"],
)
def test_bad_arguments_give_one_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "conv", *arguments])
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"torch_blocked bench conv: {sentence}\n"


def test_peak_is_a_peak():
    """No measure of time, but of sense: a core does between 1 and 1000 GF/s."""
    assert 1 < _C.fma_peak_gflops() < 1000


def test_bad_line():
    with pytest.raises(ValueError, match="expected IC-OC@SIZE kK ..., got '3-64 k3'"):
        parse("3-64 k3", 2)
