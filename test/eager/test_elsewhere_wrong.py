"""What other libraries compute wrongly or crash on: values and gradients against float64."""

import pytest
import torch
import torch.nn.functional as F

import torch_blocked
from torch_blocked.tensor import format_name

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]


def random(*dims, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dims, generator=generator, dtype=dtype)


def conv1d_of_transposed(x, weight):
    return F.conv1d(x.transpose(1, 2), weight, padding=1, groups=24)


def strided_14(x, weight):
    return F.conv2d(x, weight, stride=14, padding=7)


def grouped_3d(x, weight):
    return F.conv3d(x, weight, groups=2, padding=1)


def transposed_1d(x, weight):
    return F.conv_transpose1d(x, weight, stride=2, padding=1, output_padding=1)


# name: (function of (x, weight), dims of x, dims of weight)
ELSEWHERE_WRONG = {
    "6-channels": (lambda x, w: F.conv2d(x, w, padding=1), (2, 6, 7, 7), (6, 6, 3, 3)),
    "groups-of-4": (lambda x, w: F.conv2d(x, w, groups=8), (2, 32, 9, 9), (32, 4, 3, 3)),
    "groups-of-9": (lambda x, w: F.conv2d(x, w, groups=2), (2, 18, 7, 7), (34, 9, 3, 3)),
    "groups-3d": (grouped_3d, (1, 8, 4, 5, 6), (6, 4, 3, 3, 3)),
    "stride-3": (lambda x, w: F.conv2d(x, w, stride=3), (1, 16, 11, 11), (8, 16, 3, 3)),
    "stride-14": (strided_14, (1, 105, 31, 29), (8, 105, 14, 14)),
    "kernel-of-the-width": (lambda x, w: F.conv2d(x, w), (1, 1, 20, 16), (64, 1, 5, 16)),
    "weight-permuted": (
        lambda x, w: F.conv2d(x, w.permute(3, 2, 0, 1)), (2, 16, 9, 9), (3, 3, 16, 17),
    ),
    "weight-expanded": (
        lambda x, w: F.conv2d(x, w.expand(8, 16, 3, 3)), (2, 16, 9, 9), (1, 16, 1, 1),
    ),
    "weight-sliced": (lambda x, w: F.conv2d(x, w[:, ::2, 1:]), (2, 16, 9, 9), (8, 32, 4, 3)),
    "weight-channels-last": (
        lambda x, w: F.conv2d(x, w.contiguous(memory_format=torch.channels_last)),
        (2, 16, 9, 9), (8, 16, 3, 3),
    ),
    "depthwise-1d-transposed": (conv1d_of_transposed, (2, 11, 24), (24, 1, 3)),
    "transposed-1d": (transposed_1d, (2, 9, 7), (9, 5, 3)),
    "transposed-grouped": (
        lambda x, w: F.conv_transpose2d(x, w, groups=4, stride=2), (2, 16, 9, 9), (16, 3, 2, 2),
    ),
    "dilated-grouped": (
        lambda x, w: F.conv2d(x, w, groups=4, dilation=3), (2, 16, 9, 9), (8, 4, 3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("block", (8, 16))
@pytest.mark.parametrize("name", ELSEWHERE_WRONG)
def test_values_and_gradients_against_double(name, block):
    function, dims, weight_dims = ELSEWHERE_WRONG[name]
    x, weight = random(*dims), random(*weight_dims, seed=1)
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = function(exact_x, exact_weight)
    factors = torch.arange(exact.numel()).reshape(exact.shape) % 5 - 2
    (exact * factors).sum().backward()
    leaf, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = function(leaf.to_blocked(format_name(x.dim(), block)), weight)
    result = torch_blocked.to_dense(result)
    (result * factors).sum().backward()
    for ours, theirs in (
        (result, exact),
        (leaf.grad, exact_x.grad),
        (weight.grad, exact_weight.grad),
    ):
        assert not torch_blocked.is_blocked(ours)
        error = (ours.double() - theirs).abs().max()
        assert error <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("block", (8, 16))
@pytest.mark.parametrize("mode", ("bilinear", "bicubic"))
@pytest.mark.parametrize("size", ((2, 1), (9, 1), (5, 1), (2, 3)), ids=str)
def test_antialiased(size, mode, block):
    x = random(2, 17, 5, 4)
    result = F.interpolate(x.to_blocked(format_name(4, block)), size, mode=mode, antialias=True)
    exact = F.interpolate(x.double(), size, mode=mode, antialias=True)
    assert torch_blocked.is_blocked(result)
    torch.testing.assert_close(result.to_dense().double(), exact, rtol=1e-5, atol=1e-5)
