"""The processes that the soak makes while its callers work: by fork(), and new ones.

As a command it is what a new process does: `soak_children.py load FOLDER`."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from soak_activities import Caller, Refused, call  # noqa: E402
from soak_models import Known, check_close  # noqa: E402
from torch import nn  # noqa: E402

import torch_blocked as tb  # noqa: E402

SECONDS = 240  # after which a child hangs; it has less than half of a core
_AGAIN = 5.0  # a finalizer drops what is raised in it, so a signal may have to be sent again


def _forked(log: Path, work: Callable[[], None]) -> int:
    """The number of a child that does the work on one thread, as torch asks of whoever forks."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(log, "w") as said:
                os.dup2(said.fileno(), 2)
            # Not dump_traceback_later(): it would wait for the parent's own thread for this.
            faulthandler.register(signal.SIGUSR2, file=2)
            torch.set_num_threads(1)
            work()
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return child


def _end(child: int, meanwhile: Callable[[], None]) -> int:
    """The exit code of a child. The parent works meanwhile."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        meanwhile()
    os.kill(child, signal.SIGUSR2)  # it says where it is
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork(caller: Caller, log: Path, meanwhile: Callable[[], None]) -> int:
    """It runs a module of its parent, at a size that may have no plan yet."""
    place = caller.place()

    def work() -> None:
        try:
            call(caller, place)
        except Refused:
            pass

    return _end(_forked(log, work), meanwhile)


def interrupt(caller: Caller, log: Path, meanwhile: Callable[[], None]) -> int:
    """Ctrl-C comes while it optimizes; then it optimizes anew."""
    known, (reads, writes) = caller.random.choice(caller.world.models), caller.world.pipe
    begun, after = False, caller.random.uniform(0, 1)

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ["XDG_CACHE_HOME"] = str(log.parent / "none")  # no times are known
        layers = [nn.Conv2d(32 + i, 33 + i, 3, padding=1) for i in range(40)]
        try:
            os.write(writes, b"!")
            tb.optimize(nn.Sequential(*layers).eval(), torch.randn(1, 32, 96, 96), tune="full")
            while True:
                time.sleep(0.01)  # the signal is still to come
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        again = tb.optimize(known.model(), known.inputs[0], tune=False)
        with torch.no_grad():
            known.check(0, again(known.inputs[0]))

    def interrupts() -> None:
        nonlocal begun, after
        if not begun and select.select([reads], [], [], 0.01)[0]:
            begun = os.read(reads, 1) == b"!"
            after += time.monotonic()
        elif begun and time.monotonic() > after:
            os.kill(child, signal.SIGINT)
            after = time.monotonic() + _AGAIN
        meanwhile()

    child = _forked(log, work)
    return _end(child, interrupts)


def call_on_one_thread(caller: Caller) -> None:
    """What the parent does while it waits: it must not use several threads, for it forks. Handlers
    of signals run in the midst of it."""
    caller.do("call by who forks", call)
    time.sleep(0.005)


def _spawned(caller: Caller, log: Path, meanwhile: Callable[[], None], work: str) -> int:
    """A new process that loads what this one saves."""
    place = caller.place()
    which, live = caller.input(place.known), place.live
    folder = caller.world.folder / "spawned"
    folder.mkdir(exist_ok=True)
    try:
        with torch.no_grad():
            live(place.known.inputs[which])  # a saved model may serve the sizes that it has met
        live.save(folder / "model.pt")
    except Refused:  # it was released
        return 0
    torch.save((place.known.inputs[which], place.known.results[which]), folder / "known.pt")
    with open(log, "w") as said:
        command = [sys.executable, __file__, work, str(folder), str(place.known.within)]
        process = subprocess.Popen(command, stdout=said, stderr=said)
    code = _end(process.pid, meanwhile)
    process.returncode = code  # it has been waited for
    return code


def spawn(caller: Caller, log: Path, meanwhile: Callable[[], None]) -> int:
    return _spawned(caller, log, meanwhile, "load")


def deterministic(caller: Caller, log: Path, meanwhile: Callable[[], None]) -> int:
    return _spawned(caller, log, meanwhile, "deterministic")


Child = Callable[[Caller, Path, Callable[[], None]], int]
CHILDREN: dict[str, tuple[Child, float]] = {
    "fork": (fork, 6),
    "fork and SIGINT": (interrupt, 2),
    "spawn": (spawn, 1),
    "deterministic": (deterministic, 1),
}


def make(name: str, caller: Caller, also: Callable[[], None]) -> None:
    """Makes a child of this kind, and notes its end. also(): what the parent does meanwhile, beside
    calls."""
    log = caller.world.folder / "child.txt"

    def meanwhile() -> None:
        call_on_one_thread(caller)
        also()

    try:
        code = CHILDREN[name][0](caller, log, meanwhile)
    except Exception as error:
        caller.world.counts.failed(name, error)
        return
    caller.world.counts.ended(name, code, log.read_text()[-4000:] if log.exists() else "")


@torch.no_grad()
def load(known: Known, path: Path) -> None:
    loaded = tb.load(path)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        known.check(0, loaded(known.inputs[0]))


@torch.no_grad()
def same_bits(known: Known, path: Path) -> None:
    """Deterministic algorithms are for a whole process, so one of its own switches them."""
    loaded, (x,) = tb.load(path), known.inputs
    torch.use_deterministic_algorithms(True)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(loaded(x))
        known.check(0, results[-1])
    torch.use_deterministic_algorithms(False)
    known.check(0, loaded(x))
    # Steps of ATen promise less.
    if not any(step.implementation == "aten" for step in loaded.steps(x)):
        for each in results[1:]:
            check_close(each, results[0], "the bits on several threads", 0)


WORK = {"load": load, "deterministic": same_bits}

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2)
    folder = Path(sys.argv[2])
    x, result = torch.load(folder / "known.pt")
    told = Known("a loaded model", nn.Module(), [x], [result], float(sys.argv[3]))
    WORK[sys.argv[1]](told, folder / "model.pt")
