"""Pointwise ops in optimized models: functions known by what they compute, however they are
written, and programs of any ops, against float64."""

import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)


def ops_of(optimized):
    """The first column of the plan, without reorders."""
    rows = [line.split("  ")[0] for line in optimized.plan().splitlines()[2:]]
    return [row for row in rows if row not in ("reorder", "contiguous")]


# ---- functions ----------------------------------------------------------------------------------

CUBE = 0.044715
WRITTEN = {
    "hardswish": [
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x * (F.relu6(x + 3) / 6),
        lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1),
        lambda x: (x + 3).clamp(0, 6) * x * (1 / 6),
        lambda x: x * F.hardsigmoid(x),
        lambda x: (x * (3 + x).clamp(min=0).clamp(max=6)).div(6),
    ],
    "silu": [
        lambda x: x * torch.sigmoid(x),
        lambda x: x / (1 + torch.exp(-x)),
        lambda x: x * (0.5 * torch.tanh(x / 2) + 0.5),
    ],
    "gelu": [
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * (0.5 * (1 + torch.erf(x * 0.7071067811865476))),
        lambda x: x * torch.erfc(-x / 2**0.5) / 2,
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + CUBE * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + CUBE * x * x))),
        lambda x: x * torch.sigmoid(2 * 0.7978845608028654 * (x + CUBE * torch.pow(x, 3))),
    ],
    "leaky_relu": [
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: torch.maximum(x, 0.2 * x),
        lambda x: F.relu(x) - 0.3 * F.relu(-x),
    ],
    "clamp": [
        lambda x: x.masked_fill(x < 0, 0.0),
        lambda x: x.clamp(min=0).clamp(max=6),
        lambda x: -torch.minimum(-x, torch.zeros_like(x)),
        lambda x: F.threshold(x, 0.0, 0.0),
    ],
}


class Between(nn.Module):
    """A function between two convolutions, the first of which can take it."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 17, 3), nn.Conv2d(17, 8, 1)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def close_to_double(model, optimized, *args, tolerance=2e-6):
    with torch.no_grad():
        result = optimized(*args)
        expected = model.double()(*(each.double() for each in args))
        model.float()
    scale = max(expected.abs().max().item(), 1)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=tolerance * scale)
    assert torch.equal(result, optimized(*args))


@pytest.mark.parametrize(
    ("name", "which"), [(name, i) for name, all_of in WRITTEN.items() for i in range(len(all_of))]
)
def test_functions_however_written_join_the_convolution(name, which):
    model, x = Between(WRITTEN[name][which]).eval(), 4 * torch.randn(2, 3, 9, 9)
    optimized = tb.optimize(model, x, tune=False)
    assert ops_of(optimized) == [f"aten::conv2d + {name}", "aten::conv2d"]
    close_to_double(model, optimized, x)


def test_a_written_out_gate_is_part_of_squeeze_and_excitation():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 16, 3)
            self.down, self.up = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)

        def forward(self, x):
            x = self.first(x)
            gate = self.up(self.down(x.mean((2, 3), keepdim=True)).clamp(min=0))
            return x * (F.relu6(gate + 3) / 6)

    model, x = Gated().eval(), torch.randn(1, 3, 9, 9)
    optimized = tb.optimize(model, x, tune=False)
    assert len(ops_of(optimized)) == 2
    close_to_double(model, optimized, x)


# What is near to a function, but not the same.
NEARLY = {
    "another slope": lambda x: x * F.relu6(x + 3) * 0.16667,
    "another gate": lambda x: x * torch.sigmoid(1.702 * x),
    "a kink far away": lambda x: x.clamp(max=1e15).clamp(min=0),
    "rounding": lambda x: ((x + 12582912.0) - 12582912.0).clamp(min=0),
    "not 0 at 0": lambda x: (x * x + 1).clamp(max=2),
    "one side only": lambda x: torch.where(x > -1, x, 0.1 * x),
    "no value at -infinity": lambda x: (x + x.abs()) / 2,
    "zero for NaN": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "a jump": lambda x: torch.where(x > 0.5, x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", NEARLY)
def test_nearly_a_function_is_computed_as_written(name):
    function = NEARLY[name]
    model, x = Between(function).eval(), 4 * torch.randn(1, 3, 9, 9)
    optimized = tb.optimize(model, x, tune=False)
    assert ops_of(optimized)[0] not in {f"aten::conv2d + {known}" for known in WRITTEN}
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5)


class After(nn.Module):
    """A function after a convolution that changes nothing."""

    def __init__(self, function):
        super().__init__()
        self.first = nn.Conv2d(8, 8, 1, groups=8, bias=False)
        nn.init.ones_(self.first.weight)
        self.function = function

    def forward(self, x):
        return self.function(self.first(x))


@pytest.mark.parametrize(
    "function",
    [*itertools.chain(*WRITTEN.values()), *NEARLY.values()],
    ids=[*(f"{name}-{i}" for name in WRITTEN for i in range(len(WRITTEN[name]))), *NEARLY],
)
def test_infinities_and_nan_as_written(function):
    model, x = After(function).eval(), torch.randn(1, 8, 5, 7)
    x[0, :, 1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    optimized = tb.optimize(model, torch.randn(1, 8, 5, 7), tune=False)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


# ---- programs -----------------------------------------------------------------------------------

UNARY = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "clamp": lambda x: x.clamp(-1.5, 0.7), "clamp_min": lambda x: x.clamp_min(0.3),
    "clamp_max": lambda x: x.clamp_max(-0.3), "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)), "elu": F.elu,
    "elu of numbers": lambda x: F.elu(x, 0.7), "celu": lambda x: F.celu(x, 0.6), "selu": F.selu,
    "celu below zero": lambda x: F.celu(x, -0.8),
    "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "mish": F.mish, "softplus": F.softplus, "softplus of numbers": lambda x: F.softplus(x, 2.0),
    "softsign": F.softsign, "logsigmoid": F.logsigmoid,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0), "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "abs": torch.abs, "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(), "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": lambda x: (x.abs() + 0.1).log(),
    "log2": lambda x: (x.abs() + 0.1).log2(), "log10": lambda x: (x.abs() + 0.1).log10(),
    "log1p": lambda x: x.abs().log1p(), "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "sinh": torch.sinh, "cosh": torch.cosh, "asin": lambda x: x.tanh().asin(),
    "acos": lambda x: x.tanh().acos(), "atan": torch.atan, "erf": torch.erf, "erfc": torch.erfc,
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
    "neg": torch.neg, "square": torch.square, "reciprocal": lambda x: (x + 9).reciprocal(),
    "pow 2": lambda x: x**2, "pow 3": lambda x: x**3, "pow 0.5": lambda x: x.abs() ** 0.5,
    "pow -1": lambda x: (x.abs() + 1) ** -1, "pow 1.7": lambda x: x.abs() ** 1.7,
    "pow 1.5": lambda x: x.abs() ** 1.5, "pow 7": lambda x: x**7, "pow 8": lambda x: x**8,
    "hardshrink": lambda x: F.hardshrink(x, 0.7), "softshrink": lambda x: F.softshrink(x, 0.3),
    "number first": lambda x: 2 - x, "number above": lambda x: 3 / (x.abs() + 1),
    "zeros": lambda x: torch.where(x > 1, torch.zeros_like(x), x),
    "ones": lambda x: torch.where(x > 1, x, torch.ones_like(x)),
    "masked": lambda x: x.masked_fill(x >= 0.25, -1.0), "below": lambda x: x * (x < 0.2),
    "at most": lambda x: x * (x <= 0.2), "equal": lambda x: x + (x.round() == 1),
    "other": lambda x: x + (x.round() != 1),
}  # fmt: skip

BINARY = {
    "add": lambda x, y: torch.add(x, y, alpha=0.5), "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y: torch.rsub(x, y), "mul": torch.mul, "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum, "minimum": torch.minimum, "max": torch.max, "min": torch.min,
    "pow": lambda x, y: x.abs() ** y.tanh(), "atan2": torch.atan2,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "lerp far": lambda x, y: torch.lerp(x, y, 0.8),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x.abs() + 1, value=0.5),
    "where": lambda x, y: torch.where(x > y, x, 2 * y),
    "compare": lambda x, y: x * (x >= y) + y * (x < y) + x * (x <= y) + (x == y) * y + (x != y),
}  # fmt: skip


class Applied(nn.Module):
    """A function of an image as a convolution makes it, which comes back, too."""

    def __init__(self, channels, function):
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 1)
        self.vector = nn.Parameter(torch.randn(channels, 1, 1))
        self.function = function

    def forward(self, x, *more):
        image = 3 * self.convolution(x)
        return image, self.function(image, *more, self.vector)


def check_applied(model, optimized, args, tolerance=1e-5):
    with torch.no_grad():
        image, result = optimized(*args)
        again = optimized(*args)[1]
        vector = model.vector.double()
        expected = model.function(image.double(), *(each.double() for each in args[1:]), vector)
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(result, again)


@pytest.mark.parametrize("name", UNARY)
def test_unary_ops(name):
    model = Applied(17, lambda x, vector: UNARY[name](x)).eval()
    x = torch.randn(2, 3, 7, 5)
    optimized = tb.optimize(model, x, tune=False)
    assert len(ops_of(optimized)) <= 3  # the convolution, its product with 3 and one more
    check_applied(model, optimized, (x,))


def test_prelu_with_a_slope_for_each_channel():
    model = Applied(17, lambda x, vector: F.prelu(x, vector.flatten()) * 2).eval()
    x = torch.randn(2, 3, 7, 5)
    optimized = tb.optimize(model, x, tune=False)
    assert len(ops_of(optimized)) <= 3
    check_applied(model, optimized, (x,))


# Those that have kernels of their own, and how far from float64 a value may be, relative to it.
CLOSE = {
    "exp": 3e-7, "expm1": 3e-7, "elu": 4e-7, "elu of numbers": 4e-7, "celu": 4e-7, "selu": 4e-7,
    "softplus": 5e-7, "logsigmoid": 5e-7, "erf": 6e-7, "tanh": 4e-7, "prelu": 2e-7,
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSE)
@torch.no_grad()
def test_small_and_large_values(name):
    model, sizes = After(UNARY[name]).eval(), torch.logspace(-20, 2.2, 8 * 60 * 70)
    optimized = tb.optimize(model, sizes.view(1, 8, 60, 70), tune=False)
    for x in (sizes, -sizes):
        x = x.view(1, 8, 60, 70)
        result, expected = optimized(x), UNARY[name](x.double())
        is_normal = (expected.abs() > 2**-126) & expected.float().isfinite()
        error = ((result - expected) / expected)[is_normal].abs()
        assert error.max() <= CLOSE[name]
        rest = result[~is_normal], expected[~is_normal].float()
        torch.testing.assert_close(*rest, rtol=1e-3, atol=2**-126)


@pytest.mark.parametrize("name", CLOSE)
@torch.no_grad()
def test_infinities_and_nan_of_functions(name):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 88.6, -88.6, 90, -110])
    x = x.repeat(8, 3).view(1, 8, 4, 6)
    optimized = tb.optimize(After(UNARY[name]).eval(), x, tune=False)
    torch.testing.assert_close(optimized(x), UNARY[name](x), rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("other", ["image", "lanes", "pixels", "vector"])
def test_binary_ops(name, other):
    model = Applied(17, lambda x, y, vector: BINARY[name](x, vector if other == "vector" else y))
    x = torch.randn(2, 3, 7, 5)
    y = torch.randn({"lanes": (2, 17, 1, 1), "pixels": (2, 1, 7, 5)}.get(other, (2, 17, 7, 5)))
    optimized = tb.optimize(model.eval(), (x, y), tune=False)
    assert len(ops_of(optimized)) <= (3 if other in ("image", "vector") else 4)  # ops of y alone
    check_applied(model, optimized, (x, y))


# A small error of their operand is a large one of theirs.
STEEP = {
    "floor", "ceil", "round", "trunc", "equal", "other", "masked", "below", "at most", "threshold",
    "zeros", "ones", "tan", "sqrt", "pow 0.5", "asin", "acos", "where", "compare", "atan2",
    "hardshrink",
}  # fmt: skip


def random_function(seed):
    """A few ops on an image, a vector per image, a plane per image and a vector of constants."""
    smooth = [name for name in (*UNARY, *BINARY, *BINARY, *BINARY) if name not in STEEP]
    names = random.Random(seed).choices(smooth, k=8)
    places = [random.Random(f"{seed} {i}").random() for i in range(8)]

    def function(image, lanes, pixels, vector):
        values = [image, image * lanes, image + pixels, image - vector]
        for name, place in zip(names, places, strict=True):
            x = values[int(place * len(values))].tanh()  # no infinities
            values.append(UNARY[name](x) if name in UNARY else BINARY[name](x, values[-1].sin()))
        return sum(value.tanh() for value in values)

    return function


@pytest.mark.parametrize("channels", [1, 3, 7, 8, 9, 15, 16, 17, 33])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_random_programs(channels, batch):
    for seed in range(4):
        model = Applied(channels, random_function(f"{channels} {batch} {seed}")).eval()
        sizes = (batch, 3, 37, 31), (batch, channels, 1, 1), (batch, 1, 37, 31)
        args = tuple(torch.randn(size) for size in sizes)
        check_applied(model, tb.optimize(model, args, tune=False), args, tolerance=1e-4)


@pytest.mark.parametrize("channels", [3, 16, 1030])
def test_channels_last(channels):
    function = random_function(7)

    class Model(nn.Module):
        def forward(self, x, lanes, pixels):
            x = x.permute(0, 3, 1, 2)
            return function(x, lanes, pixels, torch.ones(channels, 1, 1)).permute(0, 2, 3, 1)

    args = torch.randn(2, 9, 7, channels), torch.randn(2, channels, 1, 1), torch.randn(2, 1, 9, 7)
    model = Model().eval()
    optimized = tb.optimize(model, args)
    optimized.choice = "blocked"
    formats = [line.split("  ") for line in optimized.plan().splitlines() if " + " in line]
    formats = {next(filter(None, columns[1:])).split()[0] for columns in formats}
    assert formats == ({"nhwc"} if channels <= 1024 else {"nchw"})
    close_to_double(model, optimized, *args, tolerance=1e-4)


@pytest.mark.parametrize("dims", [(7,), (5, 33), (2, 4, 6, 3, 2, 5)])
def test_tensors_that_are_no_images(dims):
    class Model(nn.Module):
        def forward(self, x, y):
            return torch.sigmoid(x) * torch.tanh(y) + x.clamp(min=0) * 0.5

    args = torch.randn(dims), torch.randn(dims)
    optimized = tb.optimize(Model().eval(), args, tune=False)
    assert len(ops_of(optimized)) == 1
    close_to_double(Model(), optimized, *args)


def test_other_shapes_are_atens():
    class Model(nn.Module):
        def forward(self, x, row):
            return (x.sigmoid() * row).tanh() + x[:, :, :1]

    args = torch.randn(2, 5, 6, 7), torch.randn(7)
    close_to_double(Model(), tb.optimize(Model().eval(), args, tune=False), *args)


def test_nan_and_infinities():
    model = Applied(8, lambda x, vector: torch.where(x > 0, x, 0.0) * 0.5 + x.sigmoid()).eval()
    x = torch.randn(1, 3, 4, 4)
    x[0, 0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    optimized = tb.optimize(model, x, tune=False)
    with torch.no_grad():
        image, result = optimized(x)
        torch.testing.assert_close(result, model.function(image, None), equal_nan=True)


# ---- products per channel among others -----------------------------------------------------------

CHANNELS = 19
AMONG = {
    "layer scale of a pooling": lambda m, x: x + m.k * (F.avg_pool2d(x, 3, 1, 1) - x),
    "batch norm of a square": lambda m, x: m.norm(x * x) + 1,
    "batch norm before mish": lambda m, x: F.mish(m.norm(F.max_pool2d(x, 3, 1, 1))),
    "batch norm, relu, a gate": lambda m, x: F.relu(m.norm(F.max_pool2d(x, 3, 1, 1))) * x,
    "two of them": lambda m, x: torch.tanh(m.norm(torch.tanh(x) * m.k) * m.k),
}


@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("name", AMONG)
@torch.no_grad()
def test_a_product_per_channel_is_part_of_the_program(name, batch):
    class Among(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS)
            self.k = nn.Parameter(torch.randn(CHANNELS, 1, 1))
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

        def forward(self, x):
            x = self.first(x)
            return AMONG[name](self, x), x

    model, x = Among().eval(), torch.randn(batch, 3, 9, 11)
    optimized = tb.optimize(model, x, tune=False)
    assert optimized.choice == "blocked"
    pointwise = [op for op in ops_of(optimized) if "conv" not in op and "pool" not in op]
    assert len(pointwise) == 1, pointwise
    result, dense = optimized(x)[0], model(x)[0]
    exact = model.double()(x.double())[0]
    assert (result - exact).abs().max() <= 4 * (dense - exact).abs().max() + 2e-6
    assert torch.equal(result, optimized(x)[0])


@pytest.mark.parametrize("channels", (1, 3, 8, 17))
@torch.no_grad()
def test_a_product_per_channel_in_planes(channels):
    """Scores of heads times a gate for each: in the order in which the ops around it have them."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.randn(channels, 1, 1))

        def forward(self, x):
            return torch.sort((x @ x.mT) * self.gate, -1)[0]

    model, x = Gated().eval(), torch.randn(2, channels, 7, 5)
    optimized = tb.optimize(model, x)
    assert optimized.choice != "blocked" or "reorder" not in optimized.plan()
    optimized.choice = "blocked"
    torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", (1, 3, 7, 8, 9, 15, 16, 17, 33, 200))
@pytest.mark.parametrize("rows", ((2, 3, 5), (), (4,), (0,), (1, 2, 3, 2, 2)))
@torch.no_grad()
def test_softmax_of_rows(rows, columns):
    class Rows(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1)

    model, x = Rows().eval(), 30 * torch.randn(*rows, columns)
    optimized = tb.optimize(model, x, tune=False, verify=False)
    optimized.choice = "blocked"
    result, dense, exact = optimized(x), model(x), model(x.double())
    assert result.shape == dense.shape and torch.equal(result, optimized(x))
    if x.numel():
        assert (result - exact).abs().max() <= 2 * (dense - exact).abs().max() + 1e-6
    if x.numel() and x.dim():
        for value in (torch.nan, torch.inf, -torch.inf):
            x.view(-1, columns)[0, columns // 2] = value
            assert torch.equal(optimized(x).isnan(), model(x).isnan())
