"""How many cases a run of the suite takes: some in `make test`, all of them in `make test-all`.

A test leaves cases out of `make test` only where the others run the same code: no kernel, option or
type goes without one."""

import itertools
import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("TORCH_BLOCKED_TEST_ALL") == "1"


def draws(some: T, all: T) -> T:
    return all if ALL else some


def crossed(step: int, *lists: Iterable) -> list[tuple]:
    """The product of the lists. In `make test` only those cases whose places in the lists sum to a
    multiple of `step`: a value of one list meets every step-th value of another one."""
    cases = itertools.product(*map(enumerate, lists))
    places = 1 if ALL else step
    return [
        tuple(value for _, value in case)
        for case in cases
        if sum(place for place, _ in case) % places == 0
    ]
