"""bfloat16: computed by oneDNN where the CPU multiplies it, in float32 elsewhere, never on dense
copies. Errors are held against ATen's in bfloat16."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.optimized_module import has_bfloat16

CASES = {
    "1x1": ((2, 33, 9, 8), (17, 33, 1, 1), {}),
    "3x3": ((2, 17, 9, 8), (33, 17, 3, 3), {"padding": 1}),
    "stride": ((2, 16, 9, 8), (32, 16, 3, 3), {"stride": 2, "padding": 1}),
    "first layer": ((2, 3, 19, 18), (16, 3, 7, 7), {"stride": 2, "padding": 3}),
    "depthwise": ((2, 33, 9, 8), (33, 1, 3, 3), {"padding": 1, "groups": 33}),
    "grouped": ((2, 32, 9, 8), (32, 4, 3, 3), {"padding": 1, "groups": 8}),
    "1-D": ((2, 17, 30), (9, 17, 5), {"padding": 2}),
}


def results(function, input, weight, bias, grad, **arguments):
    """The output and the gradients of input, weight and bias, dense."""
    leaves = [t.detach().requires_grad_() for t in (input, weight, bias)]
    output = function(*leaves, **arguments)
    values = (output.detach(), *torch.autograd.grad(output, leaves, grad))
    return [v.to_dense() if torch_blocked.is_blocked(v) else v for v in values]


@pytest.mark.parametrize("case", CASES)
def test_convolution(case):
    dims, weight_dims, arguments = CASES[case]
    generator = torch.Generator().manual_seed(0)
    input, weight = (torch.randn(d, generator=generator).bfloat16() for d in (dims, weight_dims))
    bias = torch.randn(weight_dims[0], generator=generator).bfloat16()
    function = F.conv1d if len(dims) == 3 else F.conv2d
    output = function(input, weight, bias, **arguments)
    grad = torch.randn(output.shape, generator=generator).bfloat16()
    blocked = input.to_blocked()
    with torch_blocked.strict():
        physical = function(blocked, weight, bias, **arguments)._physical
        ours = results(function, blocked, weight, bias, grad.to_blocked(), **arguments)
        again = results(function, blocked, weight, bias, grad.to_blocked(), **arguments)
    theirs = results(function, input, weight, bias, grad, **arguments)
    exact = results(function, *(t.double() for t in (input, weight, bias, grad)), **arguments)
    tail = weight_dims[0] % physical.shape[-1]
    assert tail == 0 or not physical[:, -1, ..., tail:].any()
    for value, second, dense, reference in zip(ours, again, theirs, exact, strict=True):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, second)
        error = (value.double() - reference).norm() / reference.norm()
        assert error <= max(1.5 * (dense.double() - reference).norm() / reference.norm(), 3e-3)


@pytest.mark.parametrize("parameters", (torch.bfloat16, torch.float32), ids=str)
def test_batch_norm(parameters):
    torch.manual_seed(0)
    dense = nn.BatchNorm2d(17).to(parameters)
    blocked = copy.deepcopy(dense)
    input = torch.randn(3, 17, 6, 5).bfloat16()
    for training in (True, False):
        ours, theirs = ((norm.train(training), x.detach().requires_grad_())
                        for norm, x in ((blocked, input.to_blocked()), (dense, input)))  # fmt: skip
        with torch_blocked.strict():
            gradients = [step(*each) for each in (ours, theirs)]
        for value, expected in zip(*gradients, strict=True):
            assert value.dtype == expected.dtype
            torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)


def step(norm, input):
    """One step's output, gradients and running statistics, dense."""
    norm.zero_grad()
    output = norm(input)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    output.backward(weights.to_blocked() if torch_blocked.is_blocked(output) else weights)
    values = (output.detach(), input.grad, norm.weight.grad, norm.bias.grad, *norm.buffers())
    return [v.to_dense() if torch_blocked.is_blocked(v) else v for v in values]


GEOMETRY = [
    {},
    {"kernel_size": 1},
    {"kernel_size": 5, "stride": 2, "padding": 1},
    {"groups": 4},
    {"dilation": 2, "padding": (1, 2)},
    {"bias": False, "groups": 8},
]


@pytest.mark.parametrize("channels", [8, 24, 40])
@pytest.mark.parametrize("geometry", GEOMETRY)
def test_bfloat16_by_dot_products(channels, geometry):
    """Within the rounding of its result of the same numbers summed in float64."""
    x = torch.randn(2, channels, 13, 15).bfloat16()
    conv = nn.Conv2d(channels, 24, **{"kernel_size": 3, "padding": 1} | geometry).bfloat16()
    _C.force_implementation("convolution", "dots_bfloat16")
    try:
        with torch.no_grad():
            if _C.isa() == "avx512" and not has_bfloat16():
                with pytest.raises(NotImplementedError, match="dots_bfloat16"):
                    conv(x.to_blocked())
                return
            y = conv(x.to_blocked())
    finally:
        _C.force_implementation("convolution", "")
    exact = conv.double()(x.double())
    assert y.dtype == torch.bfloat16 and torch.ops.torch_blocked.tail_is_zero(y._physical, 24)
    error = (y.to_dense().double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-3).all()
