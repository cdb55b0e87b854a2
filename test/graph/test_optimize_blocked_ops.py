"""Ops between convolutions that eager keeps blocked stay blocked in torch_blocked.optimize."""

import pytest
import torch
from helpers.nets import Between, Op
from helpers.optimized import BY_ATEN, BY_US, assert_exact, blocked, step
from helpers.problems import PROBLEMS, SPATIAL, threads
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked.optimized_module import tuning_file

pytestmark = pytest.mark.usefixtures("cache_folder")


def format_of_rank(rank):
    """The blocked format of this machine."""
    return tb.to_blocked(torch.zeros(1, 1, *[1] * rank)).format


def norm(layer):
    """With a weight and a bias that matter."""
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


# The op as the plan calls it, who runs it, and the layer for so many channels.
LAYERS = {
    "group_norm": ("aten::group_norm", BY_US, lambda c: nn.GroupNorm(3, c, affine=False)),
    "instance_norm": ("aten::instance_norm", BY_US, lambda c: nn.InstanceNorm2d(c)),
    "instance_norm affine": (
        "aten::instance_norm",
        BY_US,
        lambda c: norm(nn.InstanceNorm2d(c, affine=True)),
    ),
    "reflection_pad": ("aten::pad", BY_ATEN, lambda c: nn.ReflectionPad2d((1, 0, 2, 1))),
    "circular": ("aten::pad", BY_ATEN, lambda c: Op(lambda x: F.pad(x, (1, 1, 0, 1), "circular"))),
    "replicate": (
        "aten::pad",
        BY_ATEN,
        lambda c: Op(lambda x: F.pad(x, (1, 1, 0, 1), "replicate")),
    ),
    "crop": ("aten::pad", BY_ATEN, lambda c: Op(lambda x: F.pad(x, (-1, 1, 0, -1)))),
    "constant_pad_nd": (
        "aten::constant_pad_nd",
        BY_ATEN,
        lambda c: Op(lambda x: torch.constant_pad_nd(x, (0, 2))),
    ),
    "mean of rows": ("aten::mean", BY_ATEN, lambda c: Op(lambda x: x.mean(-1, keepdim=True))),
    "sum of columns": ("aten::sum", BY_ATEN, lambda c: Op(lambda x: x.sum(2, keepdim=True) * 0.25)),
    "amax": ("aten::amax", BY_ATEN, lambda c: Op(lambda x: x.amax((2, 3), keepdim=True))),
    "amin": ("aten::amin", BY_ATEN, lambda c: Op(lambda x: x.amin(3, keepdim=True))),
    "vector_norm": (
        "aten::linalg_vector_norm",
        BY_US,
        lambda c: Op(lambda x: x / x.norm(dim=(2, 3), keepdim=True)),
    ),
    "bicubic": (
        "aten::upsample_bicubic2d",
        BY_US,
        lambda c: Op(lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic")),
    ),
}


@pytest.mark.any_isa
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("channels", [9, 18, 48])
def test_layers_stay_blocked(name, channels):
    op, by, layer = LAYERS[name]
    model = Between(layer(channels), channels).eval()
    x = torch.randn(2, 5, 9, 7)
    optimized = blocked(model, x)
    plan = optimized.plan()
    assert format_of_rank(2) in step(plan, op) and f" {by} " in step(plan, op)
    assert "no kernel" not in plan and plan.count("reorder") <= 2, plan  # in and out
    for dims in ((2, 5, 9, 7), (1, 5, 4, 6), (3, 5, 8, 8)):
        assert_exact(model, optimized, torch.randn(dims), tolerance=8)
    empty = torch.randn(0, 5, 9, 7)
    if name == "instance_norm affine":  # torch refuses it, and so do we
        for each in (model, optimized):
            with pytest.raises((IndexError, RuntimeError), match="index 0 out of range"):
                each(empty)
    else:
        assert optimized(empty).shape == model(empty).shape


@pytest.mark.any_isa
@pytest.mark.parametrize("name", LAYERS)
def test_layers_between_channels_last_are_as_exact(name):
    """Beside convolutions that are the fastest in nhwc, of images whose mean is large."""
    op, _, layer = LAYERS[name]
    torch.manual_seed(0)
    model = Between(layer(18), 18).eval()
    nn.init.constant_(model.first.bias, 100)
    x = torch.randn(2, 5, 9, 7)
    for _ in range(3):  # what is slow makes the plan time others
        blocked(model, x, tune="full")
        lines = [line.split("\t") for line in tuning_file().read_text().splitlines()]
        times = {problem: 1e-3 if " nhwc-nhwc " in problem else 1e6 for problem, _, _ in lines}
        tuning_file().write_text("".join(f"{p}\t{by}\t{times[p]}\n" for p, by, _ in lines))
    optimized = blocked(model, x, tune="full")
    assert name != "group_norm" or " nhwc " not in step(optimized.plan(), op)
    assert_exact(model, optimized, x, tolerance=16)  # the convolutions may be Winograd's


@pytest.mark.any_isa
def test_prelu_of_computed_slopes():
    model = Between(Op(lambda x: F.prelu(x, x.abs().mean((0, 2, 3)))), 18).eval()
    x = torch.randn(2, 5, 9, 7)
    optimized = blocked(model, x)
    row = step(optimized.plan(), "aten::prelu")
    assert format_of_rank(2) in row and f" {BY_ATEN} " in row
    assert_exact(model, optimized, x, tolerance=8)


class Row(nn.Module):
    """A row of the table of problems, its operands as parameters."""

    def __init__(self, problem, channels):
        super().__init__()
        dims = problem.operand_dims((2, channels, *SPATIAL[problem.ndim]))
        self.operands = nn.ParameterList(torch.rand(each) + 0.5 for each in dims)
        self.run = problem.run

    def forward(self, x):
        return self.run(x, *self.operands)


@pytest.mark.any_isa
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.step], ids=lambda p: p.id)
@pytest.mark.parametrize("channels", [9, 48])
def test_rows_stay_blocked(problem, channels):
    rank, spatial = problem.ndim - 2, SPATIAL[problem.ndim]
    model = Between(Row(problem, channels), channels, rank).eval()
    x = torch.randn(2, 5, *spatial)
    optimized = blocked(model, x)
    plan = optimized.plan()
    row = step(plan, problem.step)
    assert format_of_rank(rank) in row and f" {BY_US} " in row
    assert "no kernel" not in plan and plan.count("reorder") <= 2, plan  # in and out
    for dims in (x.shape, (1, 5, *(size + 1 for size in spatial)), (3, 5, *spatial)):
        x = torch.randn(dims)
        assert_exact(model, optimized, x, tolerance=8)
        with threads(1):
            on_one = optimized(x)
        assert torch.equal(optimized(x), on_one)
    empty = torch.randn(0, 5, *spatial)
    assert optimized(empty).shape == model(empty).shape


@pytest.mark.parametrize("rank", [1, 3])
def test_instance_norms_of_other_ranks(rank):
    Norm = {1: nn.InstanceNorm1d, 3: nn.InstanceNorm3d}[rank]
    model = Between(Norm(18), 18, rank).eval()
    x = torch.randn(2, 5, *(6, 5, 7)[:rank])
    optimized = blocked(model, x)
    assert format_of_rank(rank) in step(optimized.plan(), "aten::instance_norm")
    assert_exact(model, optimized, x, tolerance=8)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norms_of_whole_images(affine):
    model = Between(norm(nn.LayerNorm([18, 9, 7], elementwise_affine=affine)), 18).eval()
    x = torch.randn(3, 5, 9, 7)
    optimized = blocked(model, x)
    assert format_of_rank(2) in step(optimized.plan(), "aten::layer_norm")
    assert_exact(model, optimized, x, tolerance=8)
    rows = Between(norm(nn.LayerNorm([9, 7])), 18).eval()  # of each channel: left to ATen
    assert_exact(rows, blocked(rows, x), x, tolerance=8)


@pytest.mark.parametrize("shuffle, out", [(nn.PixelShuffle(2), 9), (nn.PixelUnshuffle(2), 144)])
def test_pixel_shuffles(shuffle, out):
    model = Between(shuffle, 36, out=out).eval()
    for dims in ((2, 5, 6, 8), (1, 5, 4, 4)):
        x = torch.randn(dims)
        optimized = blocked(model, x)
        row = step(optimized.plan(), "aten::pixel_")
        assert format_of_rank(2) in row and f" {BY_US} " in row
        assert_exact(model, optimized, x)


class Sampled(nn.Module):
    """At points that a convolution moves: the grid is a view."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(5, channels, 3, padding=1)
        self.grid = nn.Conv2d(5, 2, 3, padding=1)
        self.last = nn.Conv2d(channels, 7, 1)

    def forward(self, x):
        grid = torch.tanh(self.grid(x)).permute(0, 2, 3, 1)
        return self.last(F.grid_sample(self.first(x), grid, align_corners=False))


@pytest.mark.parametrize("channels", [50, 64, 9])  # of few channels ATen's is faster
def test_grid_samples(channels):
    model = Sampled(channels).eval()
    x = torch.randn(2, 5, 9, 7)
    optimized = blocked(model, x)
    assert ("no kernel" in step(optimized.plan(), "aten::grid_sampler")) == (channels == 9)
    assert_exact(model, optimized, x, tolerance=16)


class Computed(nn.Module):
    """Weights that are no constants, and constants that are views of others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(5, 18, 3, padding=1)
        self.last = nn.Conv2d(18, 7, 1)
        self.bias = nn.Parameter(torch.randn(36))

    def forward(self, x):
        y = self.first(x)
        return self.last(F.group_norm(y, 3, weight=y.mean((0, 2, 3)), bias=self.bias[::2]))


def test_parameters_that_are_computed():
    model = Computed().eval()
    x = torch.randn(2, 5, 9, 7)
    optimized = blocked(model, x)
    assert f" {BY_US} " in step(optimized.plan(), "aten::group_norm")
    assert_exact(model, optimized, x, tolerance=8)


def test_views_are_read_in_order():
    """What makes a view is ATen's, and so is what reads it."""
    model = Between(Op(lambda x: F.group_norm(x[:, :, 1:, ::2], 3)), 18).eval()
    x = torch.randn(2, 5, 9, 7)
    assert_exact(model, blocked(model, x), x, tolerance=8)
    every_second = torch.randn(2, 5, 18, 14)[:, :, ::2, ::2]
    model = nn.Sequential(nn.InstanceNorm2d(5), nn.Conv2d(5, 16, 3)).eval()
    assert_exact(model, blocked(model, every_second), every_second, tolerance=8)


def test_a_blocked_input_is_normalized_as_it_is():
    model = nn.Sequential(norm(nn.GroupNorm(3, 18)), nn.ReLU(), nn.Conv2d(18, 16, 3)).eval()
    x = torch.randn(2, 18, 9, 7)
    optimized = blocked(model, x.to_blocked(), tune=True)
    assert format_of_rank(2) in step(optimized.plan(), "aten::group_norm")
    torch.testing.assert_close(optimized(x.to_blocked()), model(x))


@pytest.mark.any_isa
def test_plain_formats_take_atens_op():
    """What no convolution reads or makes is plain, and stays so; so is what the graph returns."""
    model = nn.Sequential(nn.GroupNorm(3, 18), nn.PReLU(18), nn.Softmax(1)).eval()
    x = torch.randn(2, 18, 9, 7)
    optimized = blocked(model, x)
    assert "reorder" not in optimized.plan()
    for op in ("aten::group_norm", "aten::softmax"):
        assert f" {BY_ATEN} " in step(optimized.plan(), op)
    assert f" {BY_US} " in step(optimized.plan(), "aten::_prelu_kernel")
    assert torch.equal(optimized(x), model(x))
    last = blocked(nn.Sequential(nn.Conv2d(18, 2, 3), nn.GroupNorm(1, 2)).eval(), x)
    assert f" {BY_ATEN} " in step(last.plan(), "aten::group_norm")


def test_instance_norms_with_running_statistics():
    layer = norm(nn.InstanceNorm2d(18, affine=True, track_running_stats=True))
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    model = Between(layer, 18).eval()
    x = torch.randn(2, 5, 9, 7)
    assert_exact(model, blocked(model, x), x)


def test_norms_survive_changes_of_the_model_and_release():
    model = Between(norm(nn.GroupNorm(3, 18)), 18).eval()
    x = torch.randn(2, 5, 9, 7)
    optimized = blocked(model, x)
    expected = optimized(x)
    optimized.release()
    with torch.no_grad():
        model.op.weight.fill_(3)
    assert torch.equal(optimized(x), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_with_any_number_of_threads(name):
    model = Between(LAYERS[name][2](18), 18).eval()
    x = torch.randn(2, 5, 33, 17)
    optimized = blocked(model, x)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(optimized(x))
    assert torch.equal(*results)


@pytest.mark.any_isa
def test_a_saved_model_keeps_them(tmp_path):
    model = Between(norm(nn.GroupNorm(3, 18)), 18).eval()
    x = torch.randn(2, 5, 9, 7)
    optimized = blocked(model, x)
    optimized.save(tmp_path / "model.pt")
    loaded = tb.load(tmp_path / "model.pt")
    assert torch.equal(loaded(x), optimized(x))
    y = torch.randn(3, 5, 4, 6)
    assert torch.equal(loaded(y), optimized(y))


@torch.no_grad()
def test_compiled_models_keep_them():
    model = Between(norm(nn.InstanceNorm2d(18, affine=True)), 18).eval()
    compiled = torch.compile(model, backend="torch_blocked")
    for batch in (2, 3):
        x = torch.randn(batch, 5, 9, 7)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
