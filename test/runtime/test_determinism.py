"""torch.use_deterministic_algorithms(True): neither times nor threads choose what runs, so that
bits are those of the model and of the sizes alone."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import threads
from torch import nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.environment import tuning_file

pytestmark = pytest.mark.usefixtures("cache_folder")

COUNTS = (1, 2, 3, 4, 8)


@pytest.fixture(autouse=True)
def fill():
    """Of memory that nobody has written; it only costs time."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before


@contextlib.contextmanager
def deterministic(on=True):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)
        self.norm = nn.LayerNorm(48)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 4, 12).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.out(y)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(24, 40, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Squeeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.down, self.up = (
            nn.Conv2d(3, 40, 3, 2),
            nn.Linear(40, 10),
            nn.Linear(10, 40),
        )
        self.depthwise = nn.Conv2d(40, 40, 5, padding=2, groups=40)

    def forward(self, x):
        x = F.silu(self.first(x))
        scale = self.up(F.relu(self.down(x.mean((2, 3))))).sigmoid()
        return self.depthwise(x * scale[:, :, None, None])


def convolutions(*channels, kernel=3, stride=1, groups=1, norm=None):
    layers = []
    for ins, outs in zip(channels, channels[1:], strict=False):
        layers.append(nn.Conv2d(ins, outs, kernel, stride, kernel // 2, groups=groups))
        layers += [norm(outs)] if norm else []
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


NETWORKS = {
    "few channels": (lambda: convolutions(3, 16, 24, 17), (1, 3, 33, 31)),
    "more channels": (lambda: convolutions(32, 64, 64, 96), (1, 32, 28, 28)),
    "one image of few pixels": (lambda: convolutions(128, 128, 256), (1, 128, 7, 7)),
    "a batch": (lambda: convolutions(24, 48, 48, norm=nn.BatchNorm2d), (5, 24, 14, 15)),
    "strided": (lambda: convolutions(16, 32, 64, stride=2), (2, 16, 57, 56)),
    "grouped": (lambda: convolutions(32, 32, 64, groups=4), (2, 32, 20, 20)),
    "pointwise": (lambda: convolutions(64, 128, 64, kernel=1), (1, 64, 20, 20)),
    "large kernels": (lambda: convolutions(16, 16, 24, kernel=7), (1, 16, 24, 24)),
    "group norm": (
        lambda: convolutions(16, 32, 32, norm=lambda c: nn.GroupNorm(4, c)), (2, 16, 19, 18)
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(24, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 8, 3)),
        (1, 24, 15, 15),
    ),
    "three dims": (
        lambda: nn.Sequential(nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)),
        (1, 8, 8, 12, 12),
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 10)), (37, 96)
    ),
    "few rows": (
        lambda: nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8)), (2, 512)
    ),
    "attention": (Attention, (2, 50, 48)),
    "recurrent": (Recurrent, (3, 9, 24)),
    "squeeze and excite": (Squeeze, (2, 3, 41, 40)),
}  # fmt: skip


def network(name):
    torch.manual_seed(0)
    make, dims = NETWORKS[name]
    model = make().eval()
    return model, torch.randn(dims)


def all_equal(results):
    return all(torch.equal(each, results[0]) for each in results[1:])


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_the_same_bits_with_any_number_of_threads_and_any_times(name, monkeypatch, tmp_path):
    """Optimized each time, the first time with times that others have measured."""
    model, x = network(name)
    results, plans = [], []
    with threads(2):
        torch_blocked.optimize(model, x)  # writes a tuning file
    with deterministic():
        for number, count in enumerate(COUNTS):
            if number == 1:
                monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
            with threads(count):
                fast = torch_blocked.optimize(model, x)
                results.append(fast(x))
                plans.append([step.implementation for step in fast.steps()])
    assert plans[1:] == plans[:-1]
    assert all_equal(results)


@pytest.mark.parametrize("name", [name for name, (_, dims) in NETWORKS.items() if len(dims) > 3])
@torch.no_grad()
def test_eager_bits_with_any_number_of_threads(name):
    model, x = network(name)
    x = x.to_blocked()
    results = []
    with deterministic():
        for count in COUNTS:
            with threads(count):
                y = model(x)
                results.append(y.to_dense() if torch_blocked.is_blocked(y) else y)
    assert all_equal(results)


@torch.no_grad()
def test_nothing_is_measured_or_read():
    model, x = network("more channels")
    with deterministic():
        fast = torch_blocked.optimize(model, x)
        fast(x)
    assert not tuning_file().exists() or not tuning_file().read_text()
    assert fast._forms[0].compiled.times() == {}


@torch.no_grad()
def test_switching_it_on_plans_anew(monkeypatch):
    """A module that was planned by times; off again, it has its own plans."""
    model, x = network("more channels")
    with deterministic():
        expected = torch_blocked.optimize(model, x)(x)
    with threads(2):
        torch_blocked.optimize(model, x)
    names = _C.implementations()["convolution"]
    lines = [line.split("\t") for line in tuning_file().read_text().splitlines()]
    assert lines
    for kernel in ("direct", "winograd2"):
        assert kernel in names
        tuning_file().write_text("".join(f"{line[0]}\t{kernel}\t1.0\n" for line in lines))
        with threads(2):
            fast = torch_blocked.optimize(model, x, verify=False)
            fast.choice = "blocked"
            by_times = fast(x)
            with deterministic():
                assert torch.equal(fast(x), expected), kernel
                assert torch.equal(fast(x), expected), kernel  # without Python of ours
            assert torch.equal(fast(x), by_times)


@torch.no_grad()
def test_a_model_that_was_slower_by_the_clock():
    model, x = network("few channels")
    with deterministic():
        expected = torch_blocked.optimize(model, x)(x)
    fast = torch_blocked.optimize(model, x)
    fast._choose("dense", "faster")
    with deterministic():
        assert torch.equal(fast(x), expected)
        assert fast.plan().startswith("runs: blocked")
    assert fast.plan().startswith("runs: dense (faster)")


@torch.no_grad()
def test_saved_and_loaded():
    model, x = network("more channels")
    y = torch.randn(1, 32, 35, 20)
    with deterministic():
        fast = torch_blocked.optimize(model, x)
        expected = fast(x), fast(y)
    for tune in (True, False):
        file = io.BytesIO()
        with threads(1):
            torch_blocked.optimize(model, x, tune=tune).save(file)
        file.seek(0)
        with deterministic(), threads(2):
            loaded = torch_blocked.load(file)
            assert torch.equal(loaded(x), expected[0]) and torch.equal(loaded(y), expected[1])


@torch.no_grad()
def test_the_order_in_which_sizes_come_does_not_matter():
    model, x = network("more channels")
    sizes = [(1, 32, 28, 28), (4, 32, 9, 50), (1, 32, 70, 64), (2, 32, 5, 5)]
    inputs = [torch.randn(size) for size in sizes]
    results = []
    with deterministic():
        for order in (inputs, inputs[::-1]):
            fast = torch_blocked.optimize(model, order[0])
            results.append([fast(each) for each in order])
    for a, b in zip(results[0], results[1][::-1], strict=True):
        assert torch.equal(a, b)


TRAINED = (
    "more channels",
    "a batch",
    "strided",
    "pointwise",
    "group norm",
    "transposed",
    "grouped",
    "three dims",
)
QUANTIZED = ("more channels", "a batch", "grouped", "linear", "attention", "recurrent")
IN_BFLOAT16 = ("more channels", "pointwise", "group norm", "few rows", "attention", "recurrent")


@pytest.mark.parametrize("name", QUANTIZED)
@torch.no_grad()
def test_int8(name):
    model, x = network(name)
    quantized = torch_blocked.quantize(model, [x, torch.randn_like(x)])
    results = []
    with deterministic():
        for count in COUNTS:
            with threads(count):
                results.append(torch_blocked.optimize(quantized, x)(x))
    assert all_equal(results)


@pytest.mark.parametrize("name", IN_BFLOAT16)
@pytest.mark.usefixtures("in_bfloat16")
@torch.no_grad()
def test_bfloat16(name):
    model, x = network(name)
    results = []
    with deterministic():
        for count in COUNTS:
            with threads(count):
                results.append(torch_blocked.optimize(model, x, dtype=torch.bfloat16)(x))
    assert all_equal(results)


@pytest.mark.parametrize("name", ("more channels", "attention", "recurrent"))
@torch.no_grad()
def test_several_callers_at_a_time(name):
    """They share one module, its plans and the pools of memory."""
    model, x = network(name)
    with deterministic(), threads(2):
        fast = torch_blocked.optimize(model, x)
        expected = fast(x)

        def call(_):
            with torch.no_grad():
                return fast(x)

        with ThreadPoolExecutor(4) as pool:
            assert all_equal([expected, *pool.map(call, range(16))])


# ---- processes ----------------------------------------------------------------------------------


IN_PROCESSES = ("more channels", "a batch", "grouped", "few rows", "attention", "recurrent")


@torch.no_grad()
def bits(count):
    """A hash of each network's results on this many threads: deterministic, and as eager runs
    without that."""
    found = {}
    with threads(count):
        for name in IN_PROCESSES:
            model, x = network(name)
            with deterministic():
                results = {"optimized": torch_blocked.optimize(model, x)(x)}
            if x.dim() > 3:
                y = model(x.to_blocked())
                results[f"eager on {count}"] = y.to_dense() if torch_blocked.is_blocked(y) else y
            for how, result in results.items():
                digest = hashlib.sha256(result.contiguous().numpy().tobytes()).hexdigest()
                found[f"{name}, {how}"] = digest
    return found


PROCESS = """
import json, sys
import torch
from test_determinism import bits
torch.utils.deterministic.fill_uninitialized_memory = False
print(json.dumps(bits(int(sys.argv[1]))))
"""


def bits_of_another_process(count, cache):
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(count)],
        cwd=os.path.dirname(__file__),
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def common(*hashes):
    """Those that all of them have, of each the names."""
    return set.intersection(*(set(each.items()) for each in hashes))


def test_processes_with_tuning_files_of_their_own(tmp_path):
    """One finds a file that names slow kernels for everything, the other one finds none."""
    model, x = network("more channels")
    with threads(3):
        torch_blocked.optimize(model, x)
    times = tuning_file()
    problems = [line.split("\t")[0] for line in times.read_text().splitlines()]
    assert problems
    times.write_text("".join(f"{problem}\taten\t0.001\n" for problem in problems))
    own = bits(2)
    others = [
        bits_of_another_process(3, os.environ["XDG_CACHE_HOME"]),
        bits_of_another_process(2, tmp_path / "empty"),
    ]
    optimized = {name for name in own if name.endswith("optimized")}
    assert {name for name, _ in common(own, *others)} >= optimized
    assert others[1] == own  # eager, too, on as many threads


# ---- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_with_any_number_of_threads(name):
    model, x = network(name)
    model.train()
    results = []
    with deterministic():
        for count in COUNTS:
            with threads(count):
                model.zero_grad()
                leaf = x.clone().requires_grad_()
                model(leaf.to_blocked()).to_dense().square().sum().backward()
                results.append([leaf.grad, *(each.grad.clone() for each in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def trained(name, steps=3):
    """The parameters and buffers after some steps of training on blocked tensors. Not the loss:
    ATen splits a large sum among its threads."""
    model, x = network(name)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x.to_blocked()).to_dense().square().mean().backward()
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("name", TRAINED)
def test_training_steps_with_any_number_of_threads(name):
    results = []
    with deterministic():
        for count in COUNTS:
            with threads(count):
                results.append(trained(name))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- without it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("more channels", "attention", "recurrent", "linear"))
@torch.no_grad()
def test_measured_plans_are_saved(name):
    """A loaded model has the times of the saved one: on as many threads it has the same bits, run
    by run."""
    model, x = network(name)
    with threads(2):
        fast = torch_blocked.optimize(model, x, verify=False)
        fast.choice = "blocked"
        file = io.BytesIO()
        expected = fast(x)
        fast.save(file)
        file.seek(0)
        loaded = torch_blocked.load(file)
        assert all_equal([expected, fast(x), loaded(x), loaded(x)])
