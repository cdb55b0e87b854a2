"""The lists of implementations: each can be forced, says what ran last, and gives the same results
by each of its rows; times are kept for one build only."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import forced
from helpers.optimized import blocked
from torch import nn

import torch_blocked as tb
from torch_blocked import _C, saved
from torch_blocked.optimized_module import tuning_file

pytestmark = pytest.mark.usefixtures("cache_folder")

FAMILIES = (
    "convolution",
    "linear",
    "memory_reorder",
    "pooling",
    "quantized_convolution",
    "quantized_linear",
    "reorder",
    "squeeze_excite",
    "weight_gradient",
)


def test_families():
    implementations = _C.implementations()
    assert tuple(implementations) == FAMILIES
    for names in implementations.values():
        assert names and len(set(names)) == len(names)
        assert all(name in _C.fingerprint() for name in names)
    assert _C.onednn_version()["version"] in _C.fingerprint()


def test_unknown_names():
    names = "transpose, in_order, picture, onednn, aten"
    with pytest.raises(ValueError, match=rf"expected one of \[{names}\], got best"):
        _C.force_implementation("reorder", "best")
    with pytest.raises(ValueError, match="expected one of .*, got convolutions"):
        _C.force_implementation("convolutions", "")
    with pytest.raises(ValueError, match="expected one of .*, got convolutions"):
        _C.last_implementation("convolutions")


@pytest.mark.parametrize("name", ("transpose", "onednn", "aten"))
@pytest.mark.parametrize("block", (8, 16))
def test_reorders(name, block):
    x = torch.randn(2, 17, 5, 7)
    for dense in (x, x.contiguous(memory_format=torch.channels_last)):
        expected = dense.to_blocked(f"nChw{block}c")
        with forced(name, "reorder"):
            result = dense.to_blocked(f"nChw{block}c")
            assert _C.last_implementation("reorder") == name
            assert torch.equal(result._physical, expected._physical)
            assert torch.equal(result.to_dense(), x)


class Mixing(nn.Module):
    """A layer over the lanes of tokens and one over the tokens, in channels-last between them."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(17), nn.Linear(35, 9)

    def forward(self, x):
        return self.layer(self.norm(x).transpose(1, 2))


@pytest.mark.parametrize("name", ("in_order", "onednn", "aten"))
@torch.no_grad()
def test_reorders_of_dense(name):
    model, x = Mixing().eval(), torch.randn(3, 35, 17)
    optimized = tb.optimize(model, x, tune=False)
    optimized.choice = "blocked"
    assert "reorder" in optimized.plan()
    expected = optimized(x)
    torch.testing.assert_close(expected, model(x))
    with forced(name, "reorder"):
        assert torch.equal(optimized(x), expected)
        assert _C.last_implementation("reorder") == name


@pytest.mark.parametrize("name", ("picture", "onednn", "aten"))
@pytest.mark.parametrize("channels", (1, 2, 3, 4))
@pytest.mark.parametrize("images", (1, 3))
def test_reorders_of_pictures(name, channels, images):
    x = torch.randint(0, 256, (images, channels, 37, 31), dtype=torch.uint8)
    expected = torch.zeros(images, 1, 37, 31, 4, dtype=torch.uint8)
    expected[:, 0, :, :, :channels] = x.permute(0, 2, 3, 1)
    for dense in (x, x.contiguous(memory_format=torch.channels_last)):
        with forced(name, "reorder"):
            result = dense.to_blocked("nChw4c")
            assert _C.last_implementation("reorder") == name
        assert torch.equal(result._physical, expected)


def test_forced_reorder_refuses():
    x = torch.randn(2, 17, 5, 7, dtype=torch.float64)
    refused = pytest.raises(NotImplementedError, match="reorder: expected a problem for transpose")
    with forced("transpose", "reorder"), refused:
        x.to_blocked("nChw8c")


# channels, outputs, groups, kernel, dtype -> what must be among those that take it
WEIGHTS = (
    (24, 40, 1, 3, torch.float32, {"winograd", "direct", "aten"}),
    (3, 16, 1, 7, torch.float32, {"direct", "aten"}),
    (16, 16, 16, 5, torch.float32, {"depthwise", "aten"}),
    (16, 16, 1, 3, torch.bfloat16, {"in_float32", "aten"}),
)


@pytest.mark.parametrize(("channels", "outputs", "groups", "kernel", "dtype", "known"), WEIGHTS)
def test_weight_gradients(channels, outputs, groups, kernel, dtype, known):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, channels, 14, 13, generator=generator)
    weight = torch.randn(outputs, channels // groups, kernel, kernel, generator=generator)
    x, weight = x.to(dtype).double(), weight.to(dtype).double().requires_grad_()
    y = F.conv2d(x, weight, padding=kernel // 2, groups=groups)
    diff = torch.randn(y.shape, generator=generator).to(dtype)
    (expected,) = torch.autograd.grad(y, weight, diff.double())
    narrow = weight.detach().to(dtype).requires_grad_()
    taken = set()
    for name in _C.implementations()["weight_gradient"]:
        y = F.conv2d(x.to(dtype).to_blocked("nChw8c"), narrow, padding=kernel // 2, groups=groups)
        try:
            with forced(name, "weight_gradient"), tb.strict():
                (result,) = torch.autograd.grad(y, narrow, diff.to_blocked("nChw8c"))
        except NotImplementedError as error:
            assert f"expected a problem for {name}" in str(error) or name == "aten"
            taken |= {name} & {"aten"}
            continue
        assert _C.last_implementation("weight_gradient") == name
        taken.add(name)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert (result - expected).abs().max() <= tolerance * expected.abs().max(), name
    assert known - ({"winograd"} if _C.isa() == "default" else set()) <= taken


@torch.no_grad()
def test_linear_rows():
    optimized = blocked(nn.Linear(300, 70).eval(), torch.randn(2, 300))
    taken = {}
    for rows in (1, 100):
        x = torch.randn(rows, 300)
        optimized(x)
        taken[rows] = _C.last_implementation("linear")
        assert f" {taken[rows]} " in optimized.plan(x)
    assert taken[100] == ("amx" if _C.isa() == "amx" else "direct")
    assert taken[1] in _C.implementations()["linear"]
    assert _C.isa() == "default" or taken[1] == "few_rows"
    with forced("onednn", "linear"):
        optimized(torch.randn(3, 300))
        assert _C.last_implementation("linear") == "onednn"
    assert " onednn " in optimized.plan(torch.randn(3, 300))  # what was planned then


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.gates = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        y = F.max_pool2d(self.convolution(x), 2)
        return y * torch.sigmoid(self.gates(F.adaptive_avg_pool2d(y, 1)))


@torch.no_grad()
def test_families_of_one():
    optimized = blocked(Pooled().eval(), torch.randn(1, 3, 16, 16))
    optimized(torch.randn(1, 3, 18, 18))
    assert _C.last_implementation("pooling") == "maximum"
    assert _C.last_implementation("squeeze_excite") == "three_passes"


# What no kernel takes: read from a file, it must have been believed.
BELIEVED = "fastest alone: 0.001 us"


def in_each_format(problems):
    """A plan may also use a format that the plan before did not measure."""
    formats = re.compile(r"(nchw|nhwc|nChw\d+c)-\1")
    return {
        formats.sub(f"{tag}-{tag}", problem)
        for problem in problems
        for tag in ("nchw", "nhwc", "nChw8c", "nChw16c")
    }


def test_tuning_file_is_of_one_build(monkeypatch):
    model, x = nn.Conv2d(8, 8, 3, padding=1).eval(), torch.randn(1, 8, 9, 9)
    first = blocked(model, x, tune=True)
    problems = in_each_format(first._forms[0].compiled.times())
    assert problems and BELIEVED not in first.plan()
    lines = [f"{problem}\taten\t0.001\n" for problem in problems]
    tuning_file().write_text("".join(lines))
    assert BELIEVED in blocked(model, x, tune=True).plan()
    before = tuning_file()
    monkeypatch.setattr(_C, "fingerprint", lambda: "another oneDNN")
    assert tuning_file() != before
    assert BELIEVED not in blocked(model, x, tune=True).plan()


def test_times_in_a_saved_model_are_of_one_build(monkeypatch, tmp_path):
    path = tmp_path / "model.pt"
    blocked(nn.Conv2d(8, 8, 3, padding=1).eval(), torch.randn(1, 8, 9, 9), tune=True).save(path)
    data = torch.load(path, weights_only=True)
    data["times"] = dict.fromkeys(in_each_format(data["times"]), ("aten", 0.001))
    saved.save(data, path)
    tuning_file().unlink(missing_ok=True)  # it would be believed before the model
    assert BELIEVED in tb.load(path).plan()
    monkeypatch.setattr(_C, "fingerprint", lambda: "another list")
    assert BELIEVED not in tb.load(path).plan()


def test_a_saved_model_has_the_times_of_its_own_problems(tmp_path):
    blocked(nn.Conv2d(8, 16, 1).eval(), torch.randn(1, 8, 11, 13), tune=True)
    fast = blocked(nn.Conv2d(8, 8, 3, padding=1).eval(), torch.randn(1, 8, 9, 9), tune=True)
    fast.save(tmp_path / "model.pt")
    times = torch.load(tmp_path / "model.pt", weights_only=True)["times"]
    assert times and all("[8, 8, 3, 3]" in problem for problem in times)


def test_lines_that_others_append_are_read():
    model, x = nn.Conv2d(8, 8, 3, padding=1).eval(), torch.randn(1, 8, 9, 9)
    problems = in_each_format(blocked(model, x, tune=True)._forms[0].compiled.times())
    for name in ("aten\t0.0", "onednn_blocked\t", "aten\t0.001\n"):  # the first two are cut off
        with tuning_file().open("a") as file:
            file.write("\n" + "".join(f"{problem}\t{name}" for problem in problems))
        assert (BELIEVED in blocked(model, x, tune=True).plan()) == name.endswith("\n")


ANOTHER_PROCESS = """
import sys, torch, torch_blocked as tb

torch.set_num_threads(int(sys.argv[2]))
for model, x in torch.load(sys.argv[1], weights_only=False):
    fast = tb.optimize(model, x)
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    print(fast.plan())
"""


def test_measured_times_hold_in_another_process(tmp_path):
    """Images of one channel or one pixel are plain and channels-last at once, and oneDNN's cache
    gives for one what was made for the other."""
    cases, rows = [], []
    for channels, outputs, size in ((3, 1, 1), (1, 3, 1), (1, 1, 5)):
        model = nn.Sequential(nn.Conv2d(channels, outputs, 1), nn.SiLU()).eval()
        cases.append((model, torch.randn(2, channels, size, size)))
        problems = blocked(*cases[-1], tune=True)._forms[0].compiled.times()
        plain = [problem for problem in problems if " nchw-nchw " in problem]
        assert plain
        rows += [f"{each}\taten\t1e6\n" for each in problems if each not in plain]
        rows += [f"{each}\tonednn_blocked\t0.001\n" for each in plain]
    tuning_file().write_text("".join(rows))
    path = str(tmp_path / "models.pt")
    torch.save(cases, path)
    result = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, path, str(torch.get_num_threads())],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("fastest alone: 0.001 us") == len(cases), result.stdout


@pytest.mark.parametrize("microseconds, timed", ((0.001, False), (1e9, True)))
def test_only_formats_that_could_win_are_timed(microseconds, timed):
    """No kernel in another format is asked for where the blocked one is faster than the CPU's peak
    allows without Winograd, reorders included; and none in a second format where the time of the
    first shows that the blocked one's was wrong."""
    model, x = nn.Conv2d(64, 64, 3, padding=1).eval(), torch.randn(1, 64, 56, 56)
    first = blocked(model, x, tune=True)
    times = first._forms[0].compiled.times()
    rows = [
        f"{each}\t{times[each][0]}\t{microseconds}\n"
        for each in times
        if "16c" in each or "8c" in each
    ]
    assert rows
    tuning_file().write_text("".join(rows))
    asked = " ".join(blocked(model, x, tune=True)._forms[0].compiled.times())
    assert (" nhwc-nhwc " in asked) == timed and " nchw-nchw " not in asked
