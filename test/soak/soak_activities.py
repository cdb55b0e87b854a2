"""What the callers of the soak do, each in random order."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soak_eager
import torch
from soak_figures import Counts
from soak_models import Known, check_close, known_models
from torch import Tensor

import torch_blocked as tb

THREADS = (1, 2, 3, 4)
# What a module without its model says to sizes that it has no plan for, and to save().
_WITHOUT_MODEL = (
    "torch_blocked::optimize: expected inputs like earlier ones",
    "torch_blocked::optimize: expected inputs of sizes that were planned before release()",
    "torch_blocked::optimize: expected dense weights to save, got a module after release()",
)


class Refused(Exception):
    """What the documents say is refused, and where it may be."""


class Live:
    """An optimized module that several callers hold."""

    def __init__(self, module: Any, has_model: bool = True) -> None:
        if module.choice not in ("blocked", "dense"):
            raise RuntimeError(f"the model itself runs: {module.reason}")
        self.module, self.has_model = module, has_model

    def __call__(self, x: Tensor) -> Tensor:
        return self._asked(self.module, x)

    def save(self, path: Path) -> None:
        self._asked(self.module.save, path)

    def plan(self) -> str:
        return self._asked(self.module.plan)

    def release(self) -> None:
        if self.module.choice == "dense":  # then there is nothing to release
            raise Refused
        self.has_model = False
        self.module.release()

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ValueError as error:
            if str(error).startswith(_WITHOUT_MODEL) and not self.has_model:
                raise Refused from error
            raise


@dataclass
class Place:
    """A model, and the optimized module that stands for it now. Their number never changes, so
    that memory can be flat."""

    known: Known
    live: Live


class World:
    """What all callers share."""

    def __init__(self, seed: int, folder: Path, counts: Counts) -> None:
        self.folder, self.counts = folder, counts
        self.pipe = os.pipe()  # one child at a time writes into it
        self.models = known_models(seed)
        self.eager = soak_eager.Expected()
        self.places = [Place(known, optimized(known, 0)) for known in self.models]

    def warm_up(self) -> None:
        """Plans every size, so that later plans replace others."""
        for place in self.places:
            for which, x in enumerate(place.known.inputs):
                place.known.check(which, place.live(x))


class Caller:
    """One caller's numbers, and what they choose."""

    def __init__(self, world: World, seed: str) -> None:
        self.world, self.random = world, random.Random(seed)

    def place(self) -> Place:
        return self.random.choice(self.world.places)

    def input(self, known: Known) -> int:
        return self.random.randrange(len(known.inputs))

    def do(self, name: str, activity: Callable[[Caller], None]) -> None:
        """Does it once, and counts it."""
        counts = self.world.counts
        counts.called(name)
        try:
            activity(self)
        except Refused:
            counts.was_refused(name)
        except Exception as error:
            counts.failed(name, error)


@torch.no_grad()
def optimized(known: Known, which: int, tune: bool = False) -> Live:
    return Live(tb.optimize(known.model(), known.inputs[which], tune=tune))


def call(caller: Caller, place: Place | None = None) -> None:
    place = place or caller.place()
    which, live = caller.input(place.known), place.live
    x = place.known.inputs[which]
    if x.dim() == 4 and caller.random.random() < 0.2:
        x = caller.random.choice(
            (tb.to_blocked(x), x.contiguous(memory_format=torch.channels_last))
        )
    with torch.no_grad():
        y = live(x)
    place.known.check(which, y.to_dense() if tb.is_blocked(y) else y)


def call_in_a_new_thread(caller: Caller) -> None:
    """What a thread keeps goes with it."""
    place, failed = caller.place(), []

    def run() -> None:
        try:
            torch.set_num_threads(2)
            call(caller, place)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def renew(caller: Caller) -> None:
    """Others may still run the module that goes. The other sizes are planned when they come."""
    place = caller.place()
    which = caller.input(place.known)
    place.live = optimized(place.known, which)


def renew_by_times(caller: Caller) -> None:
    place = caller.place()
    place.live = optimized(place.known, caller.input(place.known), tune=True)


def release(caller: Caller) -> None:
    caller.place().live.release()


def save_and_load(caller: Caller) -> None:
    """The loaded module takes the place of the other one, now and then."""
    place = caller.place()
    which = caller.input(place.known)
    path = caller.world.folder / f"{threading.get_ident()}.pt"
    with torch.no_grad():
        place.live.save(path)
        try:
            again = Live(tb.load(path), has_model=False)
        finally:
            path.unlink()
        place.known.check(which, again(place.known.inputs[which]))
    if caller.random.random() < 0.2:
        place.live = again


def plan(caller: Caller) -> None:
    with torch.no_grad():
        assert caller.place().live.plan().startswith("runs: ")


def explain(caller: Caller) -> None:
    known = caller.random.choice(caller.world.models)
    with torch.no_grad():
        assert tb.explain(known.model(), known.inputs[0], tune=False).table()


def profile(caller: Caller) -> None:
    place = caller.place()
    with tb.profile(torch_reorders=caller.random.random() < 0.5) as recorded:
        call(caller, place)
    assert recorded.table()


def change_threads(caller: Caller) -> None:
    torch.set_num_threads(caller.random.choice(THREADS))


def change_formats(caller: Caller) -> None:
    x = caller.world.eager.image
    y = x
    for _ in range(5):
        y = caller.random.choice(soak_eager.FORMATS)(y)
    got = y.to_dense() if tb.is_blocked(y) else y
    check_close(got.contiguous(), x, "formats", 0)


def eager_op(caller: Caller) -> None:
    eager = caller.world.eager
    name = caller.random.choice(list(soak_eager.OPS))
    tag = caller.random.choice(soak_eager.TAGS)
    with torch.no_grad():
        y = soak_eager.OPS[name](tb.to_blocked(eager.image, tag))
    check_close(y.to_dense() if tb.is_blocked(y) else y, eager.of_ops[name], f"{name} in {tag}")


def eager_model(caller: Caller) -> None:
    """The dense model itself, on a blocked image; several callers share its packed weights."""
    known = caller.random.choice(
        [each for each in caller.world.models if each.inputs[0].dim() == 4]
    )
    which = caller.input(known)
    with torch.no_grad():
        y = known.dense(tb.to_blocked(known.inputs[which], caller.random.choice(soak_eager.TAGS)))
    known.check(which, y.to_dense() if tb.is_blocked(y) else y)


def train(caller: Caller) -> None:
    eager = caller.world.eager
    name = caller.random.choice(list(soak_eager.OPTIMIZERS))
    loss = soak_eager.trained(eager.learner(), name, caller.random.choice(soak_eager.TAGS))
    check_close(loss, eager.losses[name], f"loss after {name}", 1e-2)


def change_weights(caller: Caller) -> None:
    """Every way to write is noticed before the next result."""
    eager = caller.world.eager
    conv = eager.convolution()
    x = tb.to_blocked(eager.image, caller.random.choice(soak_eager.TAGS))
    factor = 1.0
    with torch.no_grad():
        for _ in range(3):
            check_close(conv(x).to_dense(), factor * eager.convolved, "changed weights")
            caller.random.choice(soak_eager.WRITES)(conv)
            factor *= 2
        check_close(conv(x).to_dense(), factor * eager.convolved, "changed weights")


def clear_packed_weights(caller: Caller) -> None:
    tb.clear_packed_weights()


@dataclass(frozen=True)
class Activity:
    run: Callable[[Caller], None]
    weight: float


ACTIVITIES: dict[str, Activity] = {
    "call": Activity(call, 40),
    "call in a new thread": Activity(call_in_a_new_thread, 2),
    "renew": Activity(renew, 1),
    "renew by times": Activity(renew_by_times, 0.3),
    "release": Activity(release, 0.3),
    "save and load": Activity(save_and_load, 1),
    "plan": Activity(plan, 1),
    "explain": Activity(explain, 0.1),
    "profile": Activity(profile, 0.5),
    "change threads": Activity(change_threads, 3),
    "change formats": Activity(change_formats, 6),
    "eager op": Activity(eager_op, 10),
    "eager model": Activity(eager_model, 6),
    "train": Activity(train, 2),
    "change weights": Activity(change_weights, 2),
    "clear packed weights": Activity(clear_packed_weights, 0.5),
}


def chosen(choice: random.Random) -> str:
    weights = [each.weight for each in ACTIVITIES.values()]
    return choice.choices(list(ACTIVITIES), weights)[0]
