"""Weights that were made under torch.inference_mode(), of whose writes PyTorch keeps no count."""

import pytest
import torch
from torch import nn

import torch_blocked as tb
from torch_blocked.optimized_module import OptimizedModule

pytestmark = pytest.mark.any_isa


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14**2, 5)
    return nn.Sequential(*layers).eval()


def run(mode, function, *args):
    with mode():
        return function(*args)


MODES = (torch.no_grad, torch.inference_mode)


@pytest.mark.parametrize("made", (None, torch.inference_mode))
@pytest.mark.parametrize("called", MODES)
@pytest.mark.parametrize("given", MODES)
@pytest.mark.parametrize("way", ("compile", "optimize"))
def test_they_are_taken(way, made, called, given):
    torch._dynamo.reset()
    model = net() if made is None else run(made, net)
    x = run(given, torch.randn, 1, 3, 16, 16)
    with called():
        if way == "compile":
            fast = torch.compile(model, backend="torch_blocked")
        else:
            fast = tb.optimize(model, x, tune=False)
            assert isinstance(fast, OptimizedModule)
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_after_a_write_dynamo_is_reset():
    torch._dynamo.reset()
    model, x = net(), torch.randn(1, 3, 16, 16)
    fast = torch.compile(model, backend="torch_blocked")
    fast(x)
    model[4].bias.add_(1)
    torch._dynamo.reset()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_part_with_such_weights():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))

        def forward(self, x):
            y = self.part(x)
            return y[y > 0]

    model = run(torch.inference_mode, lambda: Decides().eval())
    x = torch.randn(8, 4)
    fast = tb.optimize(model, x, tune=False)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert fast.plan().startswith("runs in 1 parts")
