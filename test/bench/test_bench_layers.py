"""`bench layers`: where a model's time goes."""

import json
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import torch_blocked
from torch_blocked.__main__ import main
from torch_blocked.bench import by_layer

pytestmark = pytest.mark.any_isa

SVG = "{http://www.w3.org/2000/svg}"


def sorts() -> nn.Module:
    """The op in its middle has no blocked kernel, so it runs between two reorders."""
    return nn.Sequential(nn.Conv2d(8, 24, 3), Sort(), nn.Conv2d(24, 8, 3)).eval()


class Sort(nn.Module):
    def forward(self, x):
        return x.sort(1)[0] + x


@pytest.mark.filterwarnings("ignore:torch_blocked")
def test_reorders_are_of_their_layers(tmp_path, capsys):
    files = [f"--{kind}={tmp_path / 'out'}.{kind}" for kind in ("json", "plot")]
    arguments = ["test_bench_layers:sorts", "--input", "8x20x20", "--rounds", "2", "--threads", "1"]
    assert main(["bench", "layers", *arguments, *files]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    formats = list(dict.fromkeys(row["format"] for row in rows))
    assert formats[:2] == ["nchw", "nhwc"] and formats[2].startswith("nChw")
    assert formats[3:] in ([], ["optimize"])  # the model's own ops may be faster
    for tag in formats[:3]:
        layers = [row for row in rows if row["format"] == tag]
        assert [row["layer"] for row in layers] == ["0", "1", "2", by_layer.BETWEEN]
        moved = {row["layer"] for row in layers if row["reorder_ms"] > 0}
        # The input's own reorder runs between the modules; torch reorders in dense convolutions.
        ours = {"1", by_layer.BETWEEN}
        assert (ours <= moved) if tag == formats[2] else (moved <= {"0", "2"})
        assert all(row["kernel_ms"] > 0 for row in layers[:3])
    table = capsys.readouterr().out
    assert "| test_bench_layers:sorts | nchw " in table
    assert main(["bench", "plot", str(tmp_path / "out.json"), str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_text() == (tmp_path / "out.plot").read_text()
    texts = [n.text for n in ElementTree.parse(tmp_path / "out.plot").getroot().iter(f"{SVG}text")]
    assert {by_layer.KERNELS, by_layer.REORDERS} <= set(texts)
    assert sum(" in reorders" in text and text.startswith("test_bench") for text in texts) == len(
        formats
    )


@torch.no_grad()
def test_reorders_of_torch_are_told_apart_from_its_kernels():
    """Of a convolution that oneDNN reorders around: as its verbose mode says."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()).eval()
    x = torch.randn(8, 64, 56, 56)
    with torch_blocked.profile() as p:
        model(x)
    assert p.torch_reorders
    inside = by_layer.torch_reorders(model, lambda: (x,))
    assert inside.keys() == {"", "0"} and inside["0"] == inside[""] > 0
    conv, relu, _ = rows = by_layer.eager_rows("m", "nchw", model, lambda: (x,), 3)
    assert conv.reorder_ms > 0 and conv.kernel_ms > 0 and relu.reorder_ms == 0
    assert by_layer.totals(rows)[0][3] != "0.0 %"


def test_steps_of_the_optimized_model():
    model = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 32, 3, padding=1)).eval()
    rows = by_layer.optimized_rows("m", model, torch.randn(1, 32, 56, 56))
    moves = ["reorder" in row.layer for row in rows]
    assert len(rows) - sum(moves) == 2 and any(moves)
    for row, is_move in zip(rows, moves, strict=True):
        assert (row.kernel_ms == 0) == is_move and (row.reorder_ms == 0) != is_move


def test_bars_show_the_share_of_reorders():
    rows = [by_layer.Row("m", "nchw", f"layer{i}", 3.0, 1.0) for i in range(2)]
    rows += [by_layer.Row("m", "nchw", f"short{i}", 0.01, 0.0) for i in range(3)]
    root = ElementTree.fromstring(by_layer.draw(rows))
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert "m, nchw: 8.03 ms, 24.9 % in reorders" in texts
    assert "4.000 ms, 25 % in reorders" in texts and "3 others" in texts
    _, *bars = root.iter(f"{SVG}rect")
    kernels, reorders = (float(bar.get("width")) for bar in bars[:2])
    assert kernels == pytest.approx(3 * reorders, abs=0.2)
    assert float(bars[1].get("x")) == pytest.approx(float(bars[0].get("x")) + kernels, abs=0.2)


def test_layers_take_no_part_of_a_run_that_raises():
    """The clocks end with it, and so does what they record."""
    clocks = [by_layer.Clock()]
    with pytest.raises(ValueError), clocks[0].measuring("a"):
        raise ValueError
    assert clocks[0].total["a"] > 0 and torch.is_grad_enabled()
