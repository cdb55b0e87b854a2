"""Enlarging and shrinking images between convolutions: the kernel of optimized models."""

import pytest
import torch
from helpers.draws import crossed
from helpers.optimized import assert_exact, blocked
from helpers.problems import CHANNELS
from random_resampling import SCALES, differing, options
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb

pytestmark = pytest.mark.usefixtures("cache_folder")

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
SRC = (5, 7, 4)
# Larger, smaller, the same, one pixel, and by factors that no size says exactly.
WHERE_TO = {
    "larger": {"size": (13, 9, 8)},
    "twice": {"scale_factor": 2},
    "smaller": {"size": (3, 2, 3)},
    "same": {"size": SRC},
    "one pixel": {"size": (1, 1, 1)},
    "a factor": {"scale_factor": 1.7},
    "a factor that is forgotten": {"scale_factor": 1.7, "recompute_scale_factor": True},
    "a factor below one": {"scale_factor": 0.6},
}


class Resampled(nn.Module):
    """Relu keeps the convolutions before and behind from changing places with the resampling."""

    def __init__(self, rank, channels, options):
        super().__init__()
        self.first = CONVOLUTIONS[rank](3, channels, 3, padding=1)
        self.last = CONVOLUTIONS[rank](channels, 5, 3, padding=1)
        self.options = options

    def forward(self, x):
        return self.last(F.interpolate(F.relu(self.first(x)), **self.options))


def check(rank, channels, options, batches=(1, 3, 0)):
    size = options.get("size")
    options = options if size is None else options | {"size": size[:rank]}
    model = Resampled(rank, channels, options).eval()
    optimized = blocked(model, torch.randn(1, 3, *SRC[:rank]))
    (step,) = [each for each in optimized.steps() if "upsample" in each.op]
    assert step.implementation == "torch_blocked", optimized.plan()
    assert optimized.plan().count("reorder") <= 2, optimized.plan()  # of the input and the result
    for batch in batches:
        x = torch.randn(batch, 3, *SRC[:rank])
        if batch == 0:
            assert optimized(x).shape == model(x).shape
        else:
            assert_exact(model, optimized, x)


@pytest.mark.parametrize("where_to", WHERE_TO)
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_linear(rank, align_corners, where_to):
    options = {"mode": LINEAR[rank], "align_corners": align_corners}
    check(rank, 17, WHERE_TO[where_to] | options)


@pytest.mark.parametrize("where_to", WHERE_TO)
@pytest.mark.parametrize("align_corners", [False, True])
def test_cubic(align_corners, where_to):
    check(2, 17, WHERE_TO[where_to] | {"mode": "bicubic", "align_corners": align_corners})


@pytest.mark.parametrize("where_to", WHERE_TO)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_nearest(rank, mode, where_to):
    check(rank, 17, WHERE_TO[where_to] | {"mode": mode})


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_channels(channels, mode):
    check(2, channels, {"size": (9, 11), "mode": mode}, batches=(1,))


def test_other_sizes():
    """One optimized model, images of any size."""
    model = Resampled(2, 24, {"scale_factor": 2, "mode": "bilinear"}).eval()
    optimized = blocked(model, torch.randn(1, 3, 8, 8))
    for dims in [(1, 3, 5, 9), (2, 3, 1, 1), (1, 3, 40, 3)]:
        assert_exact(model, optimized, torch.randn(dims))


OPTIONS = {
    f"{mode}-{rank}d{'-aligned' * any(more.values())}": (mode, rank, more)
    for mode, rank, more in options()
}


@pytest.mark.any_isa
@pytest.mark.parametrize("option", OPTIONS)
def test_all_sizes_and_scales(option):
    assert not differing(*OPTIONS[option], crossed(7, range(1, 41), SCALES))


@pytest.mark.any_isa
@pytest.mark.parametrize("channels", [1, 17])
@pytest.mark.parametrize("option", OPTIONS)
def test_large_images_whose_pixels_atens_other_kernels_choose(option, channels):
    pairs = crossed(6, range(1, 41, 3), SCALES[::3])
    assert not differing(*OPTIONS[option], pairs, channels=channels, long=(150, 1.01))


@pytest.mark.any_isa
@pytest.mark.parametrize("long", [(), (150, 1.01)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_of_every_type(mode, rank, dtype, long):
    sizes, scales = range(1, 41, 3), [*SCALES[::5], 1.02, 1.3, 2.02, 2.2]
    pairs = crossed(5, sizes, scales)
    assert not differing(mode, rank, {}, pairs, dtype, channels=5, long=long)


@pytest.mark.any_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", OPTIONS)
def test_sizes_that_stay_or_double_in_a_plan(option, dtype):
    """The scale says otherwise: ATen has cases of their own for these sizes, in some kernels."""
    mode, rank, more = OPTIONS[option]
    for scale in (1.02, 1.3, 2.02, 2.2):
        model = nn.Sequential(
            CONVOLUTIONS[rank](3, 5, 1),
            Function(lambda x, s=scale: F.interpolate(x, scale_factor=s, mode=mode, **more)),
            CONVOLUTIONS[rank](5, 4, 1),
        )
        model.to(dtype).eval()
        optimized = tb.optimize(model, torch.randn(1, 3, *[9] * rank).to(dtype), tune=False)
        for size in ([1, 1, 2], [3, 2, 4], [7, 33, 3], [3, 64, 1]):
            x = torch.randn(1, 3, *size[:rank]).to(dtype)
            if dtype == torch.float32:
                assert_exact(model, optimized, x)
            else:
                torch.testing.assert_close(optimized(x), model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.any_isa
@pytest.mark.parametrize("scale", [1.02, 1.3, 2.02, 2.2])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_at_sizes_that_stay_or_double(option, scale):
    mode, rank, more = OPTIONS[option]
    x = torch.randn(2, 5, *[3] * rank, dtype=torch.float64).requires_grad_()
    gradients = []
    for each in (x, x.to_blocked()):
        y = F.interpolate(each, scale_factor=scale, mode=mode, **more)
        (gradient,) = torch.autograd.grad((y * (1 + y)).sum(), x)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


class Last(nn.Module):
    """Tokens, whose images have their channels last, around a resampling."""

    def __init__(self, channels, options):
        super().__init__()
        self.first, self.last = nn.Linear(6, channels), nn.Linear(channels, 7)
        self.norm = nn.LayerNorm(channels)
        self.options = options

    def forward(self, x):
        y = self.norm(self.first(x)).permute(0, 3, 1, 2)
        return self.last(F.interpolate(y, **self.options).permute(0, 2, 3, 1))


@pytest.mark.parametrize("channels", [7, 24])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_images_that_are_views_of_tokens(channels, mode):
    model = Last(channels, {"scale_factor": 2, "mode": mode}).eval()
    x = torch.randn(2, 5, 4, 6)
    optimized = tb.optimize(model, x, tune=False)
    assert_exact(model, optimized, x)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_values_that_are_no_numbers(mode):
    """They reach the pixels that they reach in ATen."""
    model = Resampled(2, 9, {"scale_factor": 2, "mode": mode}).eval()
    x = torch.randn(1, 3, 6, 6)
    x[0, :, 2, 3] = float("inf")
    optimized = blocked(model, x)
    assert torch.equal(optimized(x).isfinite(), model(x).isfinite())
