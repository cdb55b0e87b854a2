"""Models by torch_blocked.optimize: how tests make them, compare them and read their plans."""

import torch
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb


def blocked(model, *example, tune=False, **options):
    """The optimized module; the choice between it and the model is not what is tested."""
    optimized = tb.optimize(model, example, tune=tune, **options)
    optimized.choice = "blocked"
    return optimized


def assert_exact(model, optimized, *args, tolerance=4):
    """Within `tolerance` times the dense model's own float32 error (and 2 ulp) of float64; the same
    bits in a second run."""
    with torch.no_grad():
        dense = model(*args)
        exact = model.double()(*(each.double() for each in args))
        model.float()
        result = optimized(*args)
    assert result.shape == dense.shape and result.dtype == dense.dtype
    scale = exact.abs().max()
    error = (result - exact).abs().max()
    allowed = tolerance * (dense - exact).abs().max() + 4 * torch.finfo(torch.float32).eps * scale
    assert error <= allowed, f"{error} > {allowed}"
    assert torch.equal(result, optimized(*args))


def randomized(model, seed=0):
    """Batch norms with statistics that matter."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
            module.bias.data.normal_(generator=generator)
    return model.eval()


ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardswish": F.hardswish,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,  # f(0) is not 0: stays a step of its own
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "mish": F.mish,
}


def steps(fast, part):
    return [step for step in fast.steps() if part in step.op]


BY_US = "torch_blocked"

BY_ATEN = "aten"


def step(plan, op):
    """The row of an op: its name, format, dims, implementation, ..."""
    (row,) = [line for line in plan.splitlines() if line.startswith(op)]
    return row
