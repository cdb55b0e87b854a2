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
import torch.nn.functional as F
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


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 17, 3, padding=1), nn.Conv2d(17, 17, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.adaptive_avg_pool2d(self.first(x), 3))


def pooling() -> Callable[[], Tensor]:
    """By oneDNN, which begins teams of its own: the error says how many threads there are."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 96, 96)
    fast = tb.optimize(Pools().eval(), x, tune=False, verify=False)
    fast.choice = "blocked"
    assert any("pool" in step.op and "onednn" in step.implementation for step in fast.steps())
    return lambda: fast(x)


SAYS = "expected 4 threads, got {0} from the system; call torch.set_num_threads({0})"
SCENARIOS = {each.__name__: each for each in (optimized, convolution, normalization, pooling)}


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
    results, said = [], ""
    with calls.threads_fail(most):
        try:
            results = [run() for _ in range(3)]
        except RuntimeError as error:
            said = str(error)
    wrong = "" if calls.fired else "no thread was refused"
    if (name == "pooling") != (SAYS.format(most + 1) in said):
        wrong += f"; it says {said!r}"
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
