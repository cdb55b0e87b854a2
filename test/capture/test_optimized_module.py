"""What an optimized module does beyond one call: other sizes, threads, files, and who runs, it or
the model."""

import copy
import importlib
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import networks as models
from helpers.optimized import assert_exact, blocked
from helpers.problems import threads
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_blocked as tb
from torch_blocked import saved
from torch_blocked.optimize import _is_slower

pytestmark = pytest.mark.usefixtures("cache_folder")


def test_sizes_change_without_another_capture():
    model = models.build_model("resnet18")[0].eval()
    optimized = blocked(model, torch.randn(1, 3, 32, 32))
    for dims in [(2, 3, 32, 32), (1, 3, 33, 47)]:
        assert_exact(model, optimized, torch.randn(dims), tolerance=8)
    assert len(optimized._forms) == 1
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4"):  # the model's words
        optimized(torch.randn(1, 4, 32, 32))


class ReadsSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.convolution(x)
        return y.view(x.shape[0], -1) if x.shape[2] > 5 else y.flatten(1) * 2


def test_a_model_that_reads_sizes_is_captured_again():
    model = ReadsSizes().eval()
    optimized = blocked(model, torch.randn(2, 4, 8, 8))
    for dims in [(2, 4, 8, 8), (3, 4, 5, 5), (1, 4, 9, 9)]:
        assert_exact(model, optimized, torch.randn(dims))


def test_no_plan_is_kept_for_every_size():
    model = nn.Conv2d(3, 8, 3).eval()
    optimized = blocked(model, torch.randn(1, 3, 8, 8))
    for size in range(8, 48):
        optimized(torch.randn(1, 3, size, 8))
    x = torch.randn(1, 3, 8, 8)
    assert_exact(model, optimized, x)


def test_threads_share_one_module():
    model = models.build_model("resnet18")[0].eval()
    inputs = [torch.randn(1, 3, 32, 32) for _ in range(6)]
    optimized = blocked(model, inputs[0])
    expected = [optimized(x) for x in inputs]
    results = [None] * len(inputs)

    def run(i):
        for _ in range(5):
            results[i] = optimized(inputs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_results_are_the_callers_own():
    model = nn.Conv2d(3, 16, 3).eval()
    x = torch.randn(1, 3, 8, 8)
    optimized = blocked(model, x)
    first = optimized(x)
    kept = first.clone()
    optimized(torch.randn(1, 3, 8, 8))
    assert torch.equal(first, kept)
    identity = blocked(nn.Identity().eval(), x)
    assert torch.equal(identity(x), x)


class Results(nn.Module):
    """Results of several kinds: one that others are made of, a sum over its residual, a view, a
    permutation, a concat beside its operand, and one that is given twice."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        a = self.first(x)
        b = self.second(a) + a
        c = self.second(b).relu()
        joined = torch.cat((c, b), 1)
        return (
            a,
            b,
            c.flatten(1),
            (b * 2).permute(0, 2, 3, 1),
            joined,
            self.second(joined[:, : a.size(1)]),
            c,
        )


@torch.no_grad()
@pytest.mark.parametrize("images", (0, 1, 3))
@pytest.mark.parametrize("channels", (7, 16, 33))
@pytest.mark.parametrize("memory_format", (torch.contiguous_format, torch.channels_last), ids=str)
def test_results_of_every_kind_are_the_callers_own(images, channels, memory_format):
    model = Results(channels).eval()
    x = torch.randn(images, 3, 19, 18).to(memory_format=memory_format)
    optimized = blocked(model, x)
    first = optimized(x)
    kept = [each.clone() for each in first]
    assert_results_like(first, model(x))
    other = torch.randn_like(x)
    second = optimized(other)
    assert_results_like(second, model(other))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    for result in second[:2]:
        result.zero_()
    assert_results_like(second[2:], model(other)[2:])


def assert_results_like(results, expected):
    for result, each in zip(results, expected, strict=True):
        torch.testing.assert_close(result, each, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_results_are_not_copied():
    """They are written where the caller gets them, and their memory is not that of the next one."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Upsample(scale_factor=4)).eval()
    x = torch.randn(1, 3, 64, 64)
    optimized = blocked(model, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = [optimized(x) for _ in range(3)]
    assert not [event.key for event in profile.key_averages() if event.key == "aten::clone"]
    assert len({each.data_ptr() for each in results}) == 3


def test_save_and_load(tmp_path):
    model = models.build_model("resnet18")[0].eval()
    x = torch.randn(1, 3, 32, 32)
    optimized = blocked(model, x)
    optimized.save(tmp_path / "model.pt")
    loaded = tb.load(tmp_path / "model.pt")
    assert torch.equal(loaded(x), optimized(x))
    y = torch.randn(2, 3, 40, 40)
    assert torch.equal(loaded(y), optimized(y))
    with pytest.raises(ValueError, match=r"like earlier ones .*got float32 \[1, 4, 32, 32\]"):
        loaded(torch.randn(1, 4, 32, 32))


def test_release(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(2), nn.Linear(36, 5)).eval()
    x = torch.randn(1, 3, 8, 8)
    optimized = blocked(model, x)
    expected = optimized(x)
    weight = weakref.ref(model[0].weight)
    optimized.release()
    del model
    assert weight() is None
    assert torch.equal(optimized(x), expected)
    with pytest.raises(ValueError, match="like earlier ones"):
        optimized(torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match="save it before"):
        optimized.save(tmp_path / "model.pt")
    optimized.choice = "dense"
    with pytest.raises(ValueError, match="nothing to release"):
        optimized.release()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x):
        x = self.first(x)
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class States(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    "model, dims",
    [
        (Gated(), (1, 16, 40, 40)),
        (nn.Sequential(nn.Conv2d(16, 24, 3), nn.Conv2d(24, 24, 3, groups=24)), (1, 16, 30, 30)),
        (States(16, 32, bidirectional=True), (1, 100, 16)),
        (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()), (2, 50, 64)),
    ],
    ids=("gated", "convolutions", "states", "linear"),
)
def test_callers_during_and_after_release(model, dims):
    """More at a time than there were before: each has memory of its own, made of the plan."""
    x, callers = torch.randn(dims), 6
    with threads(1), torch.no_grad():
        optimized = blocked(model.eval(), x)
        expected = optimized(x)
        begin = threading.Barrier(callers)

        def call(caller):
            begin.wait()
            if caller == 0:
                optimized.release()
            with torch.no_grad():
                return all(torch.equal(optimized(x), expected) for _ in range(50))

        with ThreadPoolExecutor(callers) as pool:
            assert all(pool.map(call, range(callers)))


def test_release_waits_for_a_capture_of_another_thread(monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval(), torch.randn(2, 8, 9, 9)
    optimized = blocked(model, x)
    other = torch.randn(2, 8, 12, 12)
    releasing = threading.Thread(target=optimized.release)
    key_of = type(optimized)._key_of

    def slowly(self, call):
        releasing.start()
        releasing.join(0.3)
        return key_of(self, call)

    monkeypatch.setattr(type(optimized), "_key_of", slowly)
    monkeypatch.setattr(tb._C.Compiled, "covers", lambda *_: False)  # it is captured again
    with torch.no_grad():
        try:
            torch.testing.assert_close(optimized(other), model(other))
        except ValueError as error:  # released after the capture, and before there was a plan
            assert "planned before release()" in str(error)
    releasing.join()
    with pytest.raises(ValueError, match="save it before"):
        optimized.save("never")


def test_a_call_of_another_thread_waits_for_what_is_saved(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval(), torch.randn(2, 8, 9, 9)
    optimized, other = blocked(model, x), torch.randn(2, 8, 12, 12)
    optimized(torch.randn(2, 8, 10, 10))
    calling = threading.Thread(target=optimized, args=(other,))

    class Slow(OrderedDict):
        def values(self):
            for each in super().values():
                if calling.ident is None:
                    calling.start()
                calling.join(0.3)
                yield each

    optimized._served = Slow(optimized._served)
    optimized.save(tmp_path / "model.pt")
    calling.join()
    assert_exact(model, tb.load(tmp_path / "model.pt"), other)


def test_a_call_between_the_checksum_and_the_write(tmp_path, monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval(), torch.randn(2, 8, 9, 9)
    optimized, replace = blocked(model, x), saved._replace

    def later(*arguments):
        optimized(torch.randn(2, 8, 12, 12))
        replace(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(saved, "_replace", later)
        patched.setattr(tb._C.Compiled, "covers", lambda *_: False)  # it is captured again
        optimized.save(tmp_path / "model.pt")
    assert_exact(model, tb.load(tmp_path / "model.pt"), x)


def test_the_plan_after_release():
    """Live where the example has a plan; else that of then, as when other sizes have taken its
    place or the number of threads is another."""
    model, x = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval(),
        torch.randn(1, 3, 32, 9),
    )
    with torch.no_grad(), threads(1):
        optimized = blocked(model, x)
        for size in range(20, 40):  # more than there are plans
            optimized(torch.randn(1, 3, size, 9))
        steps = [step.implementation for step in optimized.steps()]
        for size in range(20, 40):
            optimized(torch.randn(1, 3, size, 9))
        optimized.release()
        assert [step.implementation for step in optimized.steps()] == steps
        plan = optimized.plan()
        assert plan.startswith("runs: blocked") and plan.count("\n") == len(steps) + 1
        assert optimized.plan(x).startswith("runs: blocked")
        with pytest.raises(ValueError, match="like earlier ones"):
            optimized.plan(torch.randn(1, 3, 77, 9))
        optimized.release()
        with threads(2):
            assert optimized.plan().startswith("runs: blocked")
            assert str(optimized) == "OptimizedModule()"
            with pytest.raises(ValueError, match="on 2 threads.*set it as it was"):
                optimized(x)
            with pytest.raises(ValueError, match="on 2 threads.*set it as it was"):
                optimized.steps()
        assert optimized(x).shape == (1, 8, 28, 5)
        for copies in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match="save it before"):
                copies(optimized)


def test_load_refuses_other_files(tmp_path):
    path = tmp_path / "other.pt"
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match="expected a file written by save"):
        tb.load(path)
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="expected a file written by save"):
        tb.load(path)
    with pytest.raises(FileNotFoundError):
        tb.load(tmp_path / "missing.pt")


def test_refusals():
    model = nn.Conv2d(3, 8, 3)
    with pytest.raises(ValueError, match="evaluation mode"):
        tb.optimize(model, torch.randn(1, 3, 8, 8))
    with pytest.raises(NotImplementedError, match="float32 or bfloat16"):
        tb.optimize(model.eval(), torch.randn(1, 3, 8, 8), dtype=torch.float16)
    with pytest.raises(TypeError, match="arguments, got list"):
        tb.optimize(model, [torch.randn(1, 3, 8, 8)])
    with pytest.raises(RuntimeError, match=r"^Given groups=1, weight of size"):
        tb.optimize(model, torch.randn(1, 4, 8, 8))
    optimized = blocked(model, torch.randn(1, 3, 8, 8))
    with pytest.raises(NotImplementedError, match="train the model"):
        optimized.train()


class Sleeper(nn.Module):
    def forward(self, x):
        time.sleep(0.005)
        return x


def test_the_faster_of_two_is_found():
    x = (torch.zeros(1),)
    assert _is_slower(Sleeper(), nn.Identity(), x)
    assert not _is_slower(nn.Identity(), Sleeper(), x)


def test_the_run_that_is_recorded_is_what_results_are_compared_with():
    """It is the model's first, and costs as long as all others."""

    class Counted(nn.Module):
        runs = 0

        def forward(self, x):
            Counted.runs += 1
            return self.conv(x).relu(), (x + 1,)

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3)

    optimized = tb.optimize(Counted().eval(), torch.randn(1, 3, 9, 9), tune=False)
    assert optimized.choice == "blocked"
    assert Counted.runs == 3  # one of them without values, and one at other sizes
    assert optimized._ran is None  # it holds results


def test_what_differs_from_the_recorded_run_is_found(monkeypatch):
    optimizing, capturing = (
        importlib.import_module(f"torch_blocked.{n}") for n in ("optimize", "capture")
    )
    monkeypatch.setattr(optimizing, "others_like", lambda example: [])
    monkeypatch.setattr(capturing, "_copied", lambda each: each.detach() + 1)
    with pytest.warns(UserWarning, match="differed from the model"):
        optimized = tb.optimize(nn.Conv2d(3, 16, 3).eval(), torch.randn(1, 3, 9, 9), tune=False)
    assert optimized.choice == "model"


def test_direct_calls_are_as_others():
    """What a call of one tensor that gives one skips: views, other sizes and types, modes."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    optimized = blocked(model, torch.randn(1, 3, 9, 9))
    for x in (
        torch.randn(1, 3, 9, 9),
        torch.randn(2, 3, 12, 9),
        torch.randn(1, 3, 9, 18)[..., ::2],
    ):
        assert optimized._direct((x,)) is None or x.shape == (1, 3, 9, 9)
        result = optimized(x)
        assert torch.equal(optimized._direct((x,)), result)
        assert torch.equal(optimized(x), result)
        torch.testing.assert_close(result, model(x))
    assert optimized._direct((x.to_blocked(),)) is None
    assert optimized._direct((x, x)) is None and optimized._direct((3,)) is None
    assert optimized._direct(()) is None
    with FakeTensorMode():
        assert optimized._direct((torch.empty(1, 3, 9, 9),)) is None
    pytest.raises(TypeError, optimized._direct, (torch.empty(1, 3, 9, 9, device="meta"),))
    pytest.raises(RuntimeError, optimized, torch.randn(1, 4, 9, 9))


def test_direct_calls_are_for_one_tensor():
    class Two(nn.Module):
        def forward(self, x):
            return x.relu(), x + 1

    x = torch.randn(1, 8, 9, 9)
    optimized = blocked(Two().eval(), x)
    assert isinstance(optimized(x), tuple) and optimized._direct((x,)) is None
    one = tb.optimize(nn.ReLU().eval(), x)
    one.choice = "dense"
    one(x)
    hooked = []
    one.register_forward_hook(lambda *args: hooked.append(args))
    one.choice = "blocked"
    assert one(x) is not None and len(hooked) == 1
