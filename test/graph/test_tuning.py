"""What optimize times, what it keeps of that, and what it does not believe."""

import pytest
import torch
from helpers.optimized import blocked
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


def test_formats_are_timed_in_one_measure():
    """Blocks were timed while another process disturbed, by a factor of 100, and are the faster
    kernel all the same: what runs beside them now is as slow, in their measure."""
    layers = (nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 64, 40, 40)
    blocked(model, x, tune=True)
    file = tuning_file()
    lines = [line.split("\t") for line in file.read_text().splitlines()]
    of_blocks = {
        problem: (kernel, float(time)) for problem, kernel, time in lines if "-nChw" in problem
    }
    file.write_text(
        "".join(f"{p}\t{kernel}\t{100 * us}\n" for p, (kernel, us) in of_blocks.items())
    )
    plan = blocked(model, x, tune=True)
    layers = [step for step in plan.steps() if "conv" in step.op]
    assert len(layers) == 2 and all("nChw" in str(step.output) for step in layers), plan.plan()
    times = plan._forms[0].compiled.times()
    others = [us for problem, (_, us) in times.items() if " nhwc-nhwc" in problem]
    assert others and all(us > 30 * min(us for _, us in of_blocks.values()) for us in others)
