"""What optimize times, what it keeps of that, and what it does not believe."""

import pytest
import torch
from test_optimize import blocked, cache_folder  # noqa: F401
from torch import nn

import torch_blocked as tb
from torch_blocked.optimized_module import tuning_file

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.parametrize("tune", ("all", 1, None))
def test_tune_is_one_of_three(tune):
    with pytest.raises(ValueError, match="expected tune as True, False or 'full'"):
        tb.optimize(nn.Conv2d(3, 16, 3).eval(), torch.randn(1, 3, 9, 9), tune=tune)


def test_full_tuning_times_more():
    """Plain convolutions between blocked ones promise nothing."""
    layers = (layer for _ in range(3) for layer in (nn.Conv2d(64, 64, 1), nn.ReLU()))
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 64, 40, 40)
    full, usual = (
        blocked(model, x, tune=tune)._forms[0].compiled.times() for tune in ("full", True)
    )
    assert len(full) > len(usual) and not any(" nchw-nchw " in each for each in usual)
    assert any(" nchw-nchw " in each for each in full)


def test_a_time_that_others_contradict_is_taken_again():
    """As one that another process disturbed, of a layer whose kernel in blocks takes half the time
    of those in channels-last."""
    model, x = nn.Conv2d(64, 64, 3, padding=1, bias=False).eval(), torch.randn(1, 64, 40, 40)
    model = nn.Sequential(model, nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1, bias=False)).eval()
    blocked(model, x, tune=True)
    file = tuning_file()
    times = {}
    for line in file.read_text().splitlines():
        problem, implementation, microseconds = line.split("\t")
        in_blocks = "c-nChw" in problem
        times[problem] = (implementation, float(microseconds) * (100 if in_blocks else 1))
    file.write_text("".join(f"{name}\t{i}\t{us}\n" for name, (i, us) in times.items()))
    plan = blocked(model, x, tune=True)
    lines = file.read_text().splitlines()[len(times) :]
    again = {line.split("\t")[0]: float(line.split("\t")[2]) for line in lines}
    disturbed = [name for name in times if "c-nChw" in name and "[64, 64, 3, 3]" in name]
    assert disturbed and all(again[name] < times[name][1] for name in disturbed)
    assert sum("nChw" in str(step.output) for step in plan.steps()) >= 2, plan.plan()
    # Once: whatever contradicts bounds on this machine does so for each plan.
    assert all(f"{name} again" in again for name in disturbed)
    text = file.read_text()
    blocked(model, x, tune=True)
    assert file.read_text() == text
