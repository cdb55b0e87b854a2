"""Threads that the system refuses, while models run on more of them. The last line of the output is
a list of faults.

ATen's own ops must not run on several threads meanwhile: libgomp ends the process where it gets no
thread. So inputs are made before, results are compared afterwards, and no op of ATen between has
more elements than the 32,768 that it shares among threads.

Usage: python -m helpers.failing.threads
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torch_blocked as tb

from .. import isolated
from . import Calls, import_once

SECONDS = 120
THREADS = 4
calls = Calls()


def optimized() -> Callable[[], Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 17, 3, padding=1), nn.SiLU(), nn.Conv2d(17, 17, 3, groups=17)]
    x = torch.randn(1, 3, 96, 96)
    fast = tb.optimize(nn.Sequential(*layers).eval(), x, tune=False, verify=False)
    fast.choice = "blocked"
    return lambda: fast(x)


def blocked(layer: nn.Module) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, 24, 64, 64).to_blocked()
    return lambda: layer.eval()(x)


def convolution() -> Callable[[], Tensor]:
    return blocked(nn.Conv2d(24, 24, 3, padding=1))


def normalization() -> Callable[[], Tensor]:
    return blocked(nn.GroupNorm(4, 24))


SCENARIOS = {each.__name__: each for each in (optimized, convolution, normalization)}


def imported(name: str, _: object) -> list[str]:
    with torch.no_grad():
        SCENARIOS[name]()()
    return [*sys.modules]


@torch.no_grad()
def tried(name: str, most: int) -> str:
    """What is wrong where only `most` more threads may live at once, or ""."""
    torch.set_num_threads(1)
    run = SCENARIOS[name]()
    expected = run()
    torch.set_num_threads(THREADS)
    with calls.threads_fail(most):
        results = [run() for _ in range(3)]
    wrong = "" if calls.fired else "no thread was refused"
    results.append(run())
    torch.set_num_threads(1)
    results = [each.to_dense() if tb.is_blocked(each) else each for each in results]
    wanted = expected.to_dense() if tb.is_blocked(expected) else expected
    return wrong + "; other bits" * (not all(torch.equal(each, wanted) for each in results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in SCENARIOS:
        import_once(isolated.alone(imported, each, SECONDS).value)
    cases = [(name, most) for name in SCENARIOS for most in range(THREADS - 1)]
    outcomes = isolated.run(lambda case, _: tried(*case), cases, limit=SECONDS, at_once=1)
    faults = [(*each.case, each.death or each.value) for each in outcomes]
    print(json.dumps([fault for fault in faults if fault[2]]))
