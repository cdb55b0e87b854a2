"""benchmarks/yolo.py, and what detectors need; without ultralytics, OpenVINO and torchvision."""

import importlib
import sys

import pytest
import torch
import yolo
from torch import nn
from zoo import row
from zoo.yolo import NETWORKS, SIZES, TIMED, Predicted

pytestmark = pytest.mark.any_isa


def record(engine, min_ms, failure="", model="yolo11n@480x640", **more):
    times = {"median_ms": None} if failure else {"median_ms": 2 * min_ms, "min_ms": min_ms}
    about = {"model": model, "batch": 3, "threads": 2, "engine": engine, "failure": failure}
    return about | times | {"relative_error": 2e-6} | more


def test_a_line_has_error_times_and_ratios():
    row = [record("openvino", 6.0), record("torch_blocked", 4.0, whole=True)]
    assert yolo.cells(row) == [
        *("yolo11n", "480x640", "3", "yes", "2.0e-06"),
        *("6.00", "12.00", "4.00", "8.00", "1.50x", "1.50x"),
    ]
    row[1]["whole"] = False
    assert yolo.cells(row)[3] == "no"


def test_what_fails_has_no_times_and_is_told():
    rows = [
        [record("openvino", 6.0), record("torch_blocked", 4.0, whole=True)],
        [record("openvino", 0, "no such op"), record("torch_blocked", 4.0, whole=False)],
        [record("openvino", 6.0), record("torch_blocked", 0, "wrong by 1")],
    ]
    cells = [yolo.cells(row)[3:] for row in rows]
    notes = yolo.notes(rows)
    assert cells[1] == ["no", "2.0e-06", "-", "-", "4.00", "8.00", "-", "-"]
    assert cells[2] == ["-", "-", "6.00", "12.00", "-", "-", "-", "-"]
    assert notes == [
        "speed by least times: geometric mean 1.50x, least 1.50x",
        "yolo11n@480x640, openvino: no such op",
        "yolo11n@480x640, torch_blocked: wrong by 1",
    ]


@pytest.mark.parametrize("words", [["yolo99n"], ["--sizes", "640x641"]])
def test_what_is_unknown_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        yolo.main(words)
    assert "unknown" in capsys.readouterr().err


def test_every_network_has_every_size():
    assert len(TIMED) == len(NETWORKS) * len(SIZES)
    assert TIMED["yolo26n@480x640"].input_dims == (3, 480, 640)


class Network(nn.Module):
    def forward(self, x):
        boxes = torch.stack([640 * x[:, 0].flatten(1), 0.01 * x[:, 1].flatten(1)], 1)
        return (boxes, 3 * x), {"feats": x}


def test_each_channel_is_scaled_and_all_are_one_tensor():
    x = torch.randn(2, 3, 4, 5)
    model = Predicted(Network())
    assert model(x).abs().max() > 100
    model.scale(x)
    found = model(x)
    assert found.shape == (2, 2 * 20 + 3 * 20)
    channels = torch.cat([found[:, :40].reshape(2, 2, 20), found[:, 40:].reshape(2, 3, 20)], 1)
    assert torch.allclose(channels.abs().amax((0, 2)), torch.ones(5))


def test_nms_keeps_the_best_of_boxes_that_overlap():
    boxes = torch.tensor(
        [[0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30], [0, 0, 10, 5], [2, 0, 12, 10]]
    ).float()
    scores = torch.tensor([0.8, 0.9, 0.3, 0.7, 0.6])
    # 0 and 4 have 9/11 in common with 1, and 3 has 45/105 = 0.43.
    assert row.nms(boxes, scores, 0.5).tolist() == [1, 3, 2]
    assert row.nms(boxes, scores, 0.4).tolist() == [1, 2]
    assert row.nms(boxes, scores, 0.9).tolist() == [1, 0, 3, 4, 2]
    assert row.nms(boxes[:0], scores[:0], 0.5).shape == (0,)


TORCHVISION = {
    "__init__.py": 'import torch\n\ntorch.library.register_fake("torchvision::nms")(print)',
    "ops/__init__.py": "",
    "ops/boxes.py": "",
    "ops/roi_align.py": "import functools\n\n\n@functools.wraps(max)\ndef _roi_align(): ...",
}


def test_torchvision_imports_without_its_library(tmp_path, monkeypatch):
    for name, text in TORCHVISION.items():
        (tmp_path / "torchvision" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torchvision" / name).write_text(text)
    (tmp_path / "torchvision" / "_C.so").write_text("for another torch")
    for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="nms"):
        importlib.import_module("torchvision")
    library = row.declare_torchvision_ops.__wrapped__()
    monkeypatch.setattr(row, "declare_torchvision_ops", lambda: library)
    row.torchvision_without_library()
    assert sys.modules["torchvision.ops"].nms is sys.modules["torchvision.ops.boxes"].nms is row.nms
    assert sys.modules["torchvision.ops.roi_align"]._roi_align is max
    for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
