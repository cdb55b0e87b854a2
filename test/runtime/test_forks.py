"""Children of fork() find no lock held by a thread that they do not have.

The parent works on one thread of OpenMP, as torch asks of whoever forks; other threads of Python
optimize, plan, run and profile meanwhile."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_isa

# argv: how many children. Prints how many did not end by themselves, and what others said.
PROGRAM = textwrap.dedent(
    """
    import itertools, os, random, signal, sys, threading, time, warnings
    import torch, torch.nn as nn
    import torch_blocked

    CHILD_SECONDS = 300
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first = nn.Conv2d(3, width, 3, padding=1)
            self.second = nn.Conv2d(width, width, 3, padding=1)
            self.norm = nn.GroupNorm(1, width)
            self.last = nn.Linear(width, 5)

        def forward(self, x):
            x = self.norm(self.second(self.first(x).relu())).relu()
            return self.last(x.mean((2, 3)))

    def use(net, fast, size):
        x = torch.randn(1, 3, size, size)
        y = fast(x)
        torch.testing.assert_close(y, net(x), rtol=1e-3, atol=1e-4)
        net(x.to_blocked())
        return y

    def child(net, fast):
        use(net, fast, 24)  # a size that has a plan
        use(net, fast, 41)  # and one that has none
        own = Net(9).eval()
        use(own, torch_blocked.optimize(own, torch.randn(1, 3, 20, 20)), 22)
        large = torch.randn(4, 16, 160, 160).to_blocked()
        assert torch.equal((large + large).to_dense(), 2 * large.to_dense())
        with torch_blocked.profile() as p:
            use(own, own, 18)
        assert p.table()

    def optimizes(stop):
        for width in itertools.cycle(range(4, 40)):
            if stop.is_set():
                return
            net = Net(width).eval()
            torch_blocked.optimize(net, torch.randn(1, 3, 16, 16))

    def plans(stop, net, fast):
        for size in itertools.cycle(range(16, 80)):
            if stop.is_set():
                return
            use(net, fast, size)
            torch.randn(2, 16, 300, 300).to_blocked().relu()
            net.first.weight.data.add_(0)  # packed anew
            with torch_blocked.profile():
                net(torch.randn(1, 3, 12, 12).to_blocked())

    def ends(pid):
        until = time.monotonic() + CHILD_SECONDS
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return None if status == 0 else f"status {status}"
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hung"

    with torch.no_grad():
        net = Net(8).eval()
        fast = torch_blocked.optimize(net, torch.randn(1, 3, 24, 24))
        child(net, fast)  # imports what there is to import
    stop = threading.Event()

    def in_thread(work, *arguments):
        def run():
            with torch.no_grad():
                work(stop, *arguments)
        threads.append(threading.Thread(target=run))
        threads[-1].start()

    threads = []
    in_thread(optimizes)
    in_thread(plans, net, fast)
    random.seed(0)
    ended = []
    for _ in range(int(sys.argv[1])):
        time.sleep(random.random() * 0.1)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                import faulthandler
                faulthandler.dump_traceback_later(CHILD_SECONDS - 10)
                with torch.no_grad():
                    child(net, fast)
                status = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(status)
        ended.append(ends(pid))
    stop.set()
    for each in threads:
        each.join()
    wrong = [each for each in ended if each]
    print(f"{len(ended)} children, wrong: {wrong}")
    os._exit(bool(wrong))
    """
)


def run_children(count, folder):
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_BLOCKED_CHECK", None)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(count)], env=environment, capture_output=True, text=True
    )


def test_children_of_a_process_that_optimizes_and_plans(tmp_path):
    done = run_children(6, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def in_child(work, seconds=60):
    """work() in a child; whether it ended by itself, with success."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


HELD = textwrap.dedent(
    """
    import sys, threading, time
    sys.path.insert(0, sys.argv[1])
    import torch, torch.nn as nn
    import torch_blocked
    from test_forks import in_child
    from torch_blocked import forks, module_paths, optimized_module, submodules

    torch.set_num_threads(1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(1, 3, 20, 20)
    with torch.no_grad():
        fast = torch_blocked.optimize(net, x)
        expected = net(x)
    held, stop = threading.Event(), threading.Event()

    def holds():
        with fast._lock, module_paths._lock, submodules._lock, module_paths.known():
            held.set()
            stop.wait()

    def work():
        with torch.no_grad():
            torch.testing.assert_close(fast(torch.randn(1, 3, 31, 29)).shape, (1, 8, 27, 25))
            again = torch_blocked.optimize(net, x)
            torch.testing.assert_close(again(x), expected, rtol=1e-4, atol=1e-5)
        # A thread that asked for paths is not here, nor are its hooks.
        assert not torch.nn.modules.module._has_any_global_hook()

    thread = threading.Thread(target=holds)
    thread.start()
    held.wait()
    assert in_child(work)
    stop.set()
    thread.join()

    # Who forks holding a lock has it in the child.
    def owned():
        assert fast._lock._is_owned()
        fast._lock.release()
        fast._lock.acquire()

    with fast._lock:
        assert in_child(owned)
    """
)


def test_locks_of_python_that_another_thread_holds():
    done = subprocess.run(
        [sys.executable, "-c", HELD, os.path.dirname(__file__)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


DRAWS = textwrap.dedent(
    """
    import sys, threading, time
    sys.path.insert(0, sys.argv[1])
    import torch
    import torch_blocked
    from test_forks import in_child

    torch.set_num_threads(1)
    stop = threading.Event()

    def child_draws():
        time.sleep(0.01)  # until the other thread is within a draw
        return in_child(lambda: torch.rand(1))

    def draws():
        while not stop.is_set():
            torch.randn(5_000_000)  # holds the lock of the numbers all the while

    thread = threading.Thread(target=draws)
    thread.start()
    ended = [child_draws() for _ in range(5)]
    stop.set()
    thread.join()
    assert all(ended), ended
    """
)


def test_random_numbers_that_another_thread_draws():
    done = subprocess.run(
        [sys.executable, "-c", DRAWS, os.path.dirname(__file__)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_lock_is_one_that_forks_free():
    """No module of the package makes a lock of its own, and nothing in C++ a mutex."""
    root = Path(__file__).parents[2]
    words = re.compile(
        r"threading\.R?Lock\(|@.*cached_property|import cached_property|std::mutex \w"
    )
    files = [*root.glob("src/torch_blocked/**/*.py"), *root.glob("csrc/**/*.cpp")]
    files += root.glob("csrc/**/*.h")
    found = {file.name for file in files if words.search(file.read_text())}
    # The two that free all others; threads of one loop, and a test's.
    assert found == {"forks.py", "fork.h", "fork.cpp", "threads.cpp", "module.cpp"} & found
    assert {"forks.py", "fork.h"} <= found
