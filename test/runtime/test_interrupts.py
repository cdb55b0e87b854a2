"""Ctrl-C, and whatever else is no Exception, ends what it meets: nothing takes it for a failure of
its own."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked
from torch_blocked import module_paths, progress

pytestmark = pytest.mark.any_isa


class Gates(nn.Module):
    """It asks for a size, so that a new one is captured when it comes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        y = self.second(F.relu(self.first(x)))
        return y + x.shape[2]


class Stop(BaseException):
    pass


KINDS = [KeyboardInterrupt, SystemExit, Stop]


@pytest.fixture
def net(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with torch.no_grad():
        yield Gates().eval()


def raised_at(monkeypatch, count, kind):
    """place() raises at its call of that number, as if a signal had come then."""
    place, calls = module_paths.place, iter(range(1000))

    def raises():
        if next(calls) == count:
            raise kind("stop")
        return place()

    monkeypatch.setattr(module_paths, "place", raises)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_raised_while_the_recorder_asks_for_a_place(net, monkeypatch, kind, count):
    x = torch.randn(1, 3, 12, 12)
    expected = net(x)
    with monkeypatch.context() as patch:
        raised_at(patch, count, kind)
        with pytest.raises(kind, match="stop"):
            torch_blocked.optimize(net, x)
    fast = torch_blocked.optimize(net, x)  # and leaves nothing behind
    torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_raised_in_a_first_call_at_a_new_size(net, monkeypatch, kind):
    x, y = torch.randn(1, 3, 12, 12), torch.randn(1, 3, 20, 12)
    fast = torch_blocked.optimize(net, x)
    with monkeypatch.context() as patch:
        raised_at(patch, 1, kind)
        with pytest.raises(kind, match="stop"):
            fast(y)
    torch.testing.assert_close(fast(y), net(y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_raised_while_the_tuner_tells_what_it_times(net, monkeypatch, kind):
    x = torch.randn(1, 3, 12, 12)

    def raises(problem):
        raise kind("stop")

    with monkeypatch.context() as patch:
        patch.setattr(progress, "tuning", raises)
        with pytest.raises(kind, match="stop"):
            torch_blocked.optimize(net, x)
    fast = torch_blocked.optimize(net, x)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


@torch.library.custom_op("interrupts::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@unknown.register_fake
def _(x):
    if x.shape[-1] == 14:
        raise KeyboardInterrupt("stop")
    return torch.empty_like(x)


def test_raised_by_a_rule_for_sizes_that_is_written_in_python(net):
    """Where the capture is asked whether it holds for other sizes."""

    class Model(nn.Module):
        def forward(self, x):
            return torch.ops.interrupts.unknown(x).relu()

    fast = torch_blocked.optimize(Model().eval(), torch.randn(1, 3, 12, 12), verify=False)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        fast(torch.randn(1, 3, 12, 14))


LONG = textwrap.dedent(
    """
    import sys, threading, time, signal, os
    import torch, torch.nn as nn
    import torch_blocked

    layers = [nn.Conv2d(32 + i, 33 + i, 3, padding=1) for i in range(60)]  # seconds of timing
    net = nn.Sequential(*layers).eval()
    x = torch.randn(1, 32, 160 , 160)
    with torch.no_grad():
        torch_blocked.optimize(nn.Conv2d(3, 8, 3).eval(), torch.randn(1, 3, 9, 9))
        net(x)
    # A shell's job in the background begins with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = threading.Event()
    begun = torch_blocked.progress.tuning

    def tuning(problem):
        began.set()
        begun(problem)

    # From C++'s own loops: nothing is told of timing, where Python would see the signal.
    torch_blocked.optimized_module.progress.tuning = tuning
    def interrupt():
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)
        print("sent", time.monotonic(), flush=True)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        torch_blocked.optimize(net, x, tune="full")
    except KeyboardInterrupt:
        print("stopped", flush=True)
        os._exit(0)
    print("went on", flush=True)
    os._exit(1)
    """
)


def test_a_signal_stops_what_tunes(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LONG], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "stopped" in done.stdout, done.stdout + done.stderr[-2000:]


def test_in_another_thread(net, monkeypatch):
    """An exception that is sent to a thread (PyThreadState_SetAsyncExc), as some servers do."""
    x = torch.randn(1, 3, 12, 12)
    raised_at(monkeypatch, 1, Stop)
    ended = []

    def work():
        try:
            with torch.no_grad():
                torch_blocked.optimize(net, x)
        except Stop as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [str(each) for each in ended] == ["stop"]
