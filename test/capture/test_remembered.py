"""What was compared with its model once is not compared again, unless something is another."""

import importlib
import re
from dataclasses import fields

import pytest
import torch
from helpers import networks
from random_models import RandomModel
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked import _C, remembered
from torch_blocked.capture import capture, capture_sizes
from torch_blocked.captured import Capture, CaptureError
from torch_blocked.environment import tuning_file

pytestmark = pytest.mark.any_isa

module = importlib.import_module("torch_blocked.optimize")
judgement = importlib.import_module("torch_blocked.judgement")
optimized_module = importlib.import_module("torch_blocked.optimized_module")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def compared(monkeypatch):
    """The results that were compared with a model's, in order."""
    calls = []
    original = module._compare
    monkeypatch.setattr(module, "_compare", lambda *a: calls.append(a) or original(*a))
    return calls


class Net(nn.Module):
    def __init__(self, channels=9):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 4)
        self.power = 1

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        for _ in range(self.power):
            x = x * x.sigmoid()
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def dense(model, x):
    with torch.no_grad():
        return model(x)


def test_second_time_nothing_is_compared(compared, monkeypatch):
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    first = tb.optimize(net, x, tune=False)
    assert len(compared) == 2 and first.choice == "blocked"  # the example, and another size
    again = tb.optimize(net, x, tune=False)
    assert len(compared) == 2 and again.choice == "blocked"
    assert torch.equal(again(x), first(x))
    monkeypatch.setattr(optimized_module, "capture", None)  # the forward runs for its sizes only
    third = tb.optimize(net, torch.randn_like(x), tune=False)
    assert torch.equal(third(x), first(x))
    torch.testing.assert_close(third(x[:1]), dense(net, x[:1]), rtol=1e-4, atol=1e-5)


def _other_weight(net):
    with torch.no_grad():
        net.conv.weight[0, 0, 0, 0] += 1e-3


def _other_statistics(net):
    net.norm.running_var *= 1.5


def _other_forward(net):
    net.power = 2


@pytest.mark.parametrize("change", [_other_weight, _other_statistics, _other_forward])
def test_what_changed_is_compared_again(compared, change):
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    tb.optimize(net, x, tune=False)
    change(net)
    optimized = tb.optimize(net, x, tune=False)
    assert len(compared) == 4
    torch.testing.assert_close(optimized(x), dense(net, x), rtol=1e-4, atol=1e-5)


def test_another_build_is_compared(compared, monkeypatch):
    """Whatever its kernels, it may make another graph of the same capture."""
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    tb.optimize(net, x, tune=False)
    monkeypatch.setattr(remembered, "_build", lambda: (1, 2))
    tb.optimize(net, x, tune=False)
    assert len(compared) == 4


def test_other_threads_sizes_and_settings_are_compared(compared):
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    tb.optimize(net, x, tune=False)
    tb.optimize(net, x[:, :, :8], tune=False)
    tb.optimize(net, x, tune=False, dynamic=False)  # of one size, so compared once
    before, threads = len(compared), torch.get_num_threads()
    assert before == 5
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        tb.optimize(net, x, tune=False)
    finally:
        torch.set_num_threads(threads)
    assert len(compared) == before + 2


def test_another_plan_is_compared(compared):
    net = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()).eval()
    x = torch.randn(1, 32, 28, 28)
    tb.optimize(net, x)
    before, times = len(compared), tuning_file().read_text()
    assert "\twinograd" in times
    tuning_file().write_text(re.sub(r"\twinograd\d", "\tdirect", times))
    assert "direct" in tb.optimize(net, x).plan()
    assert len(compared) == before + 2


def test_what_differed_is_compared_each_time(compared, monkeypatch):
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    monkeypatch.setattr(judgement, "difference", lambda *_: "made up")
    for _ in range(2):
        with pytest.warns(UserWarning, match="defect of torch_blocked"):
            assert tb.optimize(net, x, tune=False).choice == "model"
    assert len(compared) == 2
    assert not remembered.compared_file().exists()


def test_without_verify_nothing_is_noted(compared):
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    tb.optimize(net, x, tune=False, verify=False)
    assert not compared and not remembered.compared_file().exists()
    tb.optimize(net, x, tune=False)
    assert len(compared) == 2


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\n", b"of another kind\n" * 9])
def test_broken_file(compared, content):
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    tb.optimize(net, x, tune=False)
    remembered.compared_file().write_bytes(content)
    assert tb.optimize(net, x, tune=False).choice == "blocked" and len(compared) == 4


def test_no_file(compared, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    for _ in range(2):
        tb.optimize(net, x, tune=False)
    assert len(compared) == 4


class Kept(nn.Module):
    """Keeps at its first call what follows from its parameters, as biases of attention are."""

    def __init__(self):
        super().__init__()
        self.table, self.kept = nn.Parameter(torch.randn(8, 8)), {}

    def forward(self, x):
        if x.shape[-1] not in self.kept:
            self.kept[x.shape[-1]] = self.table @ self.table
        return F.relu(x @ self.kept[x.shape[-1]])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return F.relu(x)


class Looks(nn.Module):
    def forward(self, x):
        y = F.conv2d(x, torch.ones(1, x.shape[1], 1, 1))
        return x if y.sum() > 0 else -x


class Refuses(nn.Module):
    def forward(self, x):
        y = F.relu(x).sum()
        if y.item() == 0:
            raise ValueError("expected numbers")
        return x + y


@pytest.mark.parametrize("net", [Kept(), Counts(), Looks(), Refuses()])
def test_where_values_matter_they_are_computed(net):
    x = torch.rand(2, 3, 8, 8)
    assert capture_sizes(net.eval(), (x,)) is None
    kept = getattr(net, "kept", None)
    assert not kept and float(getattr(net, "calls", torch.zeros(()))) == 0  # put back
    for _ in range(2):
        optimized = tb.optimize(net, x, tune=False)
        torch.testing.assert_close(optimized(x), dense(net, x))
        getattr(net, "kept", {}).clear()


def test_sizes_only_computes_nothing():
    conv, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 9, 9)
    linear, index = nn.Linear(9, 5), torch.tensor([[1, 2], [3, 4]])
    with torch.no_grad(), _C.SizesOnly():
        y, z = conv(x), linear(x)
        written = x.clone()
        same = written.add_(1)
        summed = index + index
        viewed = x.view(2, -1)
        dropped = F.dropout(x, 0.5, training=False)
    for each, sizes in ((y, (2, 8, 7, 7)), (z, (2, 3, 9, 5))):
        assert each.shape == sizes and not each.any()
    assert same is written and not written.any()
    assert summed.tolist() == [[2, 4], [6, 8]]  # integers may be indices, which must be in range
    assert viewed.data_ptr() == x.data_ptr() and dropped is x
    assert conv(x).any()  # it is over


def test_random_models():
    """A run for the sizes alone notes what a whole run does, or says that it cannot tell."""
    told = 0
    for seed in range(40):
        random = RandomModel(seed)
        try:
            whole = capture(random.model, random.example)
        except CaptureError:
            continue
        sizes = capture_sizes(random.model, random.example)
        if sizes is None:
            continue
        told += 1
        for field in fields(Capture):
            if field.name not in ("constants", "ran", "metas"):
                assert getattr(sizes, field.name) == getattr(whole, field.name), (seed, field.name)
        assert sizes.same_as(whole), seed
    assert told > 20


@pytest.mark.parametrize(
    "name", ["mobilenet_v2", "unet", "convnext_tiny", "segformer_b0", "hifigan"]
)
def test_models(name):
    net = networks.build_model(name)[0].eval()
    x = torch.randn(1, *networks.MODELS[name].input_dims)
    assert capture_sizes(net, (x,)).same_as(capture(net, (x,)))
