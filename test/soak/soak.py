"""Everything at once in one process for as long as wanted; memory and descriptors must not grow.

    python test/soak/soak.py --minutes 30
    python test/soak/soak.py --minutes 5 --seed 4711

Callers call optimized models, replace, release, save and load them, run eager blocked tensors,
train, change weights and the number of threads. The main thread forks, spawns and interrupts
processes meanwhile. Every result is compared with the dense one. The figures are printed every
minute and at the end. The exit status is 1 after any wrong result, error or bad end of a child, if
optimized modules outlive their use, and if there are more descriptors or is more resident memory
than after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # there are more callers than cores
# Of the primitives that oneDNN keeps, 1024 by default: so few are there from the first minute on.
# Sizes, formats and threads that change would fill its cache for an hour, which is no leak.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
sys.path.insert(0, str(Path(__file__).parents[1]))

import soak_activities  # noqa: E402
import torch  # noqa: E402
from soak_activities import ACTIVITIES, Caller, World  # noqa: E402
from soak_children import CHILDREN, SECONDS, make  # noqa: E402
from soak_eager import fill_caches  # noqa: E402
from soak_figures import Figures, bound_arenas, sample  # noqa: E402

CALLERS = 4
_HANGS = 2 * SECONDS + 120  # seconds for a child and a quiet point
_SAMPLES = 100  # as many in a run, but none within a second of another


class Gate:
    """Callers pass it between two activities, and wait there while it is shut."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shut, self._waiting, self.is_over = False, 0, False

    def go_on(self) -> bool:
        """Whether the caller does one thing more."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._shut)
            self._waiting -= 1
            return not self.is_over

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within it no caller does anything."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: self._waiting == CALLERS)
        yield
        with self._changed:
            self._shut = False
            self._changed.notify_all()


def work(caller: Caller, gate: Gate) -> None:
    """The life of a caller."""
    fill_caches()
    while gate.go_on():
        name = soak_activities.chosen(caller.random)
        caller.do(name, ACTIVITIES[name].run)


def signals(caller: Caller) -> None:
    """The handler runs in the main thread, whatever that is at."""
    caller.world.counts.signals["sent"] += 1
    os.kill(os.getpid(), signal.SIGUSR1)


ACTIVITIES["signal"] = soak_activities.Activity(signals, 1)


def first_of_all(caller: Caller) -> None:
    """Does everything once: what is loaded or made once is there from then on."""
    caller.world.warm_up()
    for name, activity in ACTIVITIES.items():
        caller.do(name, activity.run)
    torch.set_num_threads(1)


class Samples:
    """Takes a sample when one is due, and prints the figures every minute."""

    def __init__(self, figures: Figures, gate: Gate, say: Callable[[str], None]) -> None:
        self._figures, self._gate, self._say = figures, gate, say
        self._begin = self._next = time.monotonic()
        self._minutes = 0

    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def take_if_due(self) -> None:
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        if time.monotonic() >= self._next:
            self.take()
            self._next = time.monotonic() + max(self._figures.seconds / _SAMPLES, 1.0)

    def take(self) -> None:
        with self._gate.quiet():
            self._figures.samples.append(sample(self.seconds()))
        if self.seconds() // 60 > self._minutes:
            self._minutes = self.seconds() // 60
            self._say(f"\nafter {self.seconds() / 60:.1f} minutes\n{self._figures.table()}")


def make_children(figures: Figures, caller: Caller, samples: Samples) -> None:
    """Until the time is over: one of each kind first, then any."""
    names, weights = list(CHILDREN), [weight for _, weight in CHILDREN.values()]
    for name in names:
        make(name, caller, samples.take_if_due)
    while samples.seconds() < figures.seconds:
        make(caller.random.choices(names, weights)[0], caller, samples.take_if_due)
    samples.take()
    faulthandler.cancel_dump_traceback_later()


def soak(figures: Figures, seed: int, folder: Path, say: Callable[[str], None]) -> None:
    """Runs callers and children. The thread that calls it must be the main one."""
    torch.set_num_threads(1)  # it forks, so it never uses several threads itself
    world, gate = World(seed, folder, figures.counts), Gate()

    def handle(*_: object) -> None:
        figures.counts.signals["handled"] += 1

    signal.signal(signal.SIGUSR1, handle)
    first = threading.Thread(target=first_of_all, args=(Caller(world, f"{seed}-first"),))
    first.start()
    first.join()
    callers = [
        threading.Thread(target=work, args=(Caller(world, f"{seed}-{i}"), gate))
        for i in range(CALLERS)
    ]
    for each in callers:
        each.start()
    try:
        make_children(figures, Caller(world, f"{seed}-children"), Samples(figures, gate, say))
    finally:
        gate.is_over = True
        for each in callers:
            each.join()


def run(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--within", type=float, default=2, help="percent that memory may grow by")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed

    def say(text: str) -> None:
        print(text, flush=True)

    say(f"seed {seed}, {options.minutes:g} minutes, {CALLERS} callers")
    faulthandler.enable()
    bound_arenas()
    warnings.simplefilter("ignore")
    # Such a warning says that the model runs itself or in parts: none of these models should.
    warnings.filterwarnings("error", message="torch_blocked::optimize")
    figures = Figures(options.minutes * 60, options.within)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # this user's times are neither read nor changed
        soak(figures, seed, Path(folder), say)
    for kind, text in figures.counts.first.items():
        say(f"\nthe first of {kind}\n{text}")
    say(f"\nin all\n{figures.table()}\n")
    failures = figures.failures()
    for each in failures:
        say(f"failed: {each}")
    say(f"seed {seed}: {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(run())
