"""A model that was saved, or timed, on a CPU with other instructions gets a plan of its own."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.isas import LIMITS, lesser
from helpers.optimized import blocked
from torch import nn

import torch_blocked as tb
from torch_blocked import environment

pytestmark = [pytest.mark.any_isa, pytest.mark.usefixtures("cache_folder")]

LOADS = """
import json, sys, torch, torch_blocked as tb

fast = tb.load(sys.argv[1])
x, expected = torch.load(sys.argv[2])
with torch.no_grad():
    torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-4)
times = [problem for form in fast._forms for problem in form.compiled.times()]
steps = [(step.implementation, step.output) for step in fast.steps()]
print(json.dumps([tb.env()["isa"], tb.native_blocks(), times, steps]))
"""


def saved(folder):
    """A model of layers whose best kernels differ between the sets, its input and its result."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.ReLU(),
        nn.Conv2d(32, 48, 1),
    ).eval()
    x = torch.randn(1, 16, 24, 24)
    fast = blocked(model, x, tune=True)
    fast.save(folder / "model.pt")
    with torch.no_grad():
        torch.save((x, model(x)), folder / "result.pt")
    return fast


def loaded(folder, limits):
    command = [sys.executable, "-c", LOADS, folder / "model.pt", folder / "result.pt"]
    printed = subprocess.check_output(command, text=True, env=os.environ | limits)
    return json.loads(printed.splitlines()[-1])


def test_on_the_same_cpu_the_times_are_taken_over(tmp_path):
    fast = saved(tmp_path)
    isa, blocks, times, steps = loaded(tmp_path, {"XDG_CACHE_HOME": str(tmp_path / "empty")})
    assert (isa, blocks) == (tb.env()["isa"], tb.native_blocks())
    assert set(times) == set(fast._forms[0].compiled.times()) and times
    assert [name for name, _ in steps] == [step.implementation for step in fast.steps()]


@pytest.mark.parametrize("limit", lesser(environment.cpu_isas()))
def test_a_lesser_cpu_plans_for_itself(tmp_path, limit):
    """It measures for itself, beside the times that the file and the model bring, and has blocks
    and kernels of its own."""
    saved(tmp_path)
    isa, blocks, times, steps = loaded(tmp_path, LIMITS[limit])
    assert isa == LIMITS[limit]["TORCH_BLOCKED_MAX_ISA"]
    assert any(problem.startswith(f"{isa} ") for problem in times)
    assert blocks == ([16, 8] if isa == "avx512" else [8])
    assert 16 in blocks or not any("16c" in output for _, output in steps)
    assert isa != "default" or not any("winograd" in name for name, _ in steps)
