"""bfloat16: computed by oneDNN where the CPU multiplies it, in float32 elsewhere, never on dense
copies. Errors are held against ATen's in bfloat16."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.implementations import forced
from torch import nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.optimized_module import OptimizedModule

pytestmark = pytest.mark.usefixtures("in_bfloat16")

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
    # That of rounding a result is 1.7e-3; F(2x2) rounds what it multiplies, too.
    bound = 5e-3 if case == "3x3" else 3e-3
    tail = weight_dims[0] % physical.shape[-1]
    assert tail == 0 or not physical[:, -1, ..., tail:].any()
    for value, second, dense, reference in zip(ours, again, theirs, exact, strict=True):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, second)
        error = (value.double() - reference).norm() / reference.norm()
        assert error <= max(1.5 * (dense.double() - reference).norm() / reference.norm(), bound)


def norms(channels):
    groups = 3 if channels % 3 == 0 else 1
    return [nn.BatchNorm2d(channels), nn.GroupNorm(groups, channels)]


@pytest.mark.parametrize("channels", (1, 3, 7, 8, 9, 15, 16, 17, 33))
@pytest.mark.parametrize("images", (1, 3))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("of_parameters", (None, torch.float32), ids=str)
def test_norms(channels, images, dtype, of_parameters):
    """Within the error of ATen's, or of rounding, beside float64; the same bits twice."""
    torch.manual_seed(channels)
    x = (2 + torch.randn(images, channels, 6, 5)).to(dtype)
    for norm in norms(channels):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        dense = norm.to(of_parameters or dtype)
        for training in (True, False):
            steps = [
                step(copy.deepcopy(model).train(training), input.detach().requires_grad_())
                for model, input in (
                    (dense, x.to_blocked()),
                    (dense, x.to_blocked()),
                    (dense, x),
                    (copy.deepcopy(dense).double(), x.double()),
                )
            ]
            for ours, again, theirs, exact in zip(*steps, strict=True):
                assert ours.dtype == theirs.dtype and torch.equal(ours, again)
                off, bound = ((each.double() - exact).abs().max() for each in (ours, theirs))
                assert off <= 1.5 * bound + 2 * torch.finfo(dtype).eps * exact.abs().max()


def step(norm, input):
    """One step's output, gradients and running statistics, dense."""
    norm.zero_grad()
    with torch_blocked.strict():
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


def by(implementation, conv, x):
    """The result of one implementation; nothing where the CPU cannot run it."""
    with forced(implementation, "convolution"), torch.no_grad():
        if _C.isa() == "default" and "winograd" in implementation:
            return None  # has none without SIMD; the convolution would run on dense copies
        if not _C.multiplies_bfloats():
            with torch_blocked.strict(), pytest.raises(NotImplementedError, match=implementation):
                conv(x.to_blocked())
            return None
        return conv(x.to_blocked())


TRANSPOSED = [
    {"kernel_size": 2, "stride": 2, "padding": 0},
    {"kernel_size": 4, "stride": 2, "output_padding": 1},
    {"stride": (1, 3), "dilation": 2, "groups": 8},
    {"kernel_size": 2, "stride": 3, "padding": 2, "bias": False},
]


@pytest.mark.parametrize("channels", [8, 24, 40])
@pytest.mark.parametrize(
    "kind, geometry",
    [(nn.Conv2d, each) for each in GEOMETRY] + [(nn.ConvTranspose2d, each) for each in TRANSPOSED],
)
def test_bfloat16_by_dot_products(channels, kind, geometry):
    """Within the rounding of its result of the same numbers summed in float64."""
    x = torch.randn(2, channels, 13, 15).bfloat16()
    conv = kind(channels, 24, **{"kernel_size": 3, "padding": 1} | geometry).bfloat16()
    y = by("dots_bfloat16", conv, x)
    if y is None:
        return
    exact = conv.double()(x.double())
    assert y.dtype == torch.bfloat16 and torch.ops.torch_blocked.tail_is_zero(y._physical, 24)
    error = (y.to_dense().double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-3).all()


# Error in the Euclidean norm: F(4x4) in float32 rounds its result only, in fixed point what it
# multiplies to 10 bits and more, F(2x2) to 8.
WINOGRAD = {"winograd4_bfloat16": 2e-3, "winograd4_fixed": 2.5e-3, "winograd2_bfloat16": 5e-3}
TILES = [
    {},
    {"padding": 0, "bias": False},
    {"padding": (2, 1)},
    {"transposed": True},
]


@pytest.mark.parametrize("implementation", WINOGRAD)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_bfloat16_by_winograd(implementation, tiles):
    tiles = dict(tiles)
    kind = nn.ConvTranspose2d if tiles.pop("transposed", False) else nn.Conv2d
    for n, channels, size in ((1, 1, (3, 4)), (3, 17, (13, 15)), (0, 8, (5, 5)), (2, 33, (6, 29)),
                              (1, 16, (56, 56))):  # fmt: skip
        torch.manual_seed(0)
        x = torch.randn(n, channels, *size).bfloat16()
        conv = kind(channels, 24, 3, **{"padding": 1} | tiles).bfloat16()
        y = by(implementation, conv, x)
        if y is None:
            return
        assert torch.equal(y.to_dense(), by(implementation, conv, x).to_dense())
        assert y.dtype == torch.bfloat16 and torch.ops.torch_blocked.tail_is_zero(y._physical, 24)
        exact = copy.deepcopy(conv).double()(x.double())
        assert y.shape == exact.shape
        error = (y.to_dense().double() - exact).norm()
        assert error <= WINOGRAD[implementation] * exact.norm()


FIXED = "winograd4_fixed"


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1.0, 1e20, 1e30])
def test_numbers_of_any_size_in_fixed_point(scale):
    conv = nn.Conv2d(17, 24, 3, padding=1, bias=False).bfloat16()
    x = (scale * torch.randn(2, 17, 13, 15)).bfloat16()
    x[0, 3] = 0
    y = by(FIXED, conv, x)
    if y is None:
        return
    exact = copy.deepcopy(conv).double()(x.double())
    error = (y.to_dense().double() - exact).abs().max()
    # As in all of avx512_bf16, what is almost denormal counts as 0.
    assert error <= max(8e-3 * exact.abs().max(), 1e-32)
    zero = by(FIXED, conv, torch.zeros_like(x))
    assert torch.equal(zero.to_dense(), torch.zeros_like(exact).bfloat16())


def test_sizes_of_channels_differ_in_fixed_point():
    """One of src 50 times as large as the others; those of weights by up to 1e6."""
    conv = nn.Conv2d(70, 24, 3, padding=1, bias=False)
    conv.weight.data *= torch.logspace(-3, 3, 24).view(-1, 1, 1, 1)
    x = torch.randn(2, 70, 13, 15)
    x[:, 5] *= 50
    conv, x = conv.bfloat16(), x.bfloat16()
    y = by(FIXED, conv, x)
    if y is None:
        return
    exact = copy.deepcopy(conv).double()(x.double())
    error = (y.to_dense().double() - exact).abs().amax((0, 2, 3)) / exact.abs().amax((0, 2, 3))
    assert error.max() <= 1.5e-2


def test_no_sum_overflows_in_fixed_point():
    """The largest words that src can make at a position meet equal weights in all channels. An
    overflow would be off by as much as all products add up to."""
    conv = nn.Conv2d(200, 24, 3, bias=False).bfloat16()
    conv.weight.data.fill_(1.0)
    for signs in ([1, -1, -1, 1], [1, 1, 1, 1], [1, -1, 1, -1]):
        signs = torch.tensor(signs).repeat(4)
        x = (signs[:, None] * signs).bfloat16().expand(1, 200, 16, 16).contiguous()
        y = by(FIXED, conv, x)
        if y is None:
            return
        exact = F.conv2d(x.double(), conv.weight.double())
        assert (y.to_dense().double() - exact).abs().max() <= 0.01 * 9 * 200


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_in_fixed_point_reaches_its_tiles(value):
    conv = nn.Conv2d(33, 24, 3, padding=1).bfloat16()
    x = torch.randn(1, 33, 26, 27).bfloat16()
    usual = by(FIXED, conv, x)
    if usual is None:
        return
    for row, column in ((0, 0), (9, 11), (12, 14), (25, 26)):
        marked = x.clone()
        marked[0, 7, row, column] = value
        result, usual_dense = by(FIXED, conv, marked).to_dense(), usual.to_dense()
        reached = torch.zeros(26, 27, dtype=torch.bool)
        for h in range(0, 26, 4):
            for w in range(0, 27, 4):
                if h - 1 <= row < h + 5 and w - 1 <= column < w + 5:
                    reached[h : h + 4, w : w + 4] = True
        assert result[..., reached].isnan().all()
        assert torch.equal(result[..., ~reached], usual_dense[..., ~reached])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_in_fixed_point(value):
    conv, x = nn.Conv2d(33, 24, 3).bfloat16(), torch.randn(1, 33, 9, 9).bfloat16()
    conv.weight.data[5, 3, 1, 1] = value
    y = by(FIXED, conv, x)
    if y is None:
        return
    result = y.to_dense()
    assert result[:, 5].isnan().all()
    assert result[:, [i for i in range(24) if i != 5]].isfinite().all()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(19, 33, 3, padding=1), nn.Conv2d(33, 33, 3, padding=1)

    def forward(self, x):
        x = F.leaky_relu(self.first(x), 0.2)
        return torch.relu(self.second(x) + x)


@pytest.mark.parametrize("implementation", WINOGRAD)
def test_sums_and_activations_after_winograd_in_bfloat16(implementation, tmp_path, monkeypatch):
    """Where the times that a saved model brings say that it is the fastest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 19, 14, 15)
    timed = torch_blocked.optimize(model, x, dtype=torch.bfloat16, verify=False)
    blocks = [each for each in timed._forms[0].compiled.times() if "c-nChw" in each]
    assert len(blocks) == 2
    # Other formats are not timed beside these: they would save the reorders.
    times = {each: (implementation, 0.1) for each in blocks}
    optimized = OptimizedModule(model, tune=False, dtype=torch.bfloat16, times=times)
    optimized._prepare((x,), {})
    optimized.choice = "blocked"
    assert optimized.plan().count(implementation) == 2
    torch.testing.assert_close(optimized(x).float(), model(x), rtol=2e-2, atol=2e-2)


DEPTHWISE = [
    {},
    {"kernel_size": 5, "padding": 2, "stride": 2},
    {"kernel_size": (3, 1), "padding": (2, 1), "dilation": (2, 1)},
    {"transposed": True, "stride": 2},
]


# Input and output channels, and groups: of one channel; in all lanes of a vector the same input,
# inputs of one vector, of two, and of any number.
GROUPS = [
    *((channels, channels, channels) for channels in (2, 8, 17, 33, 96)),
    (32, 32, 2),
    (48, 32, 2),
    (32, 32, 8),
    (33, 33, 11),
    (24, 48, 3),
    (72, 12, 6),
]


@pytest.mark.parametrize("channels, outputs, groups", GROUPS)
@pytest.mark.parametrize("geometry", DEPTHWISE, ids=str)
def test_groups_in_bfloat16(channels, outputs, groups, geometry):
    """Within the rounding of its result of the same numbers summed in float64."""
    geometry = dict(geometry)
    kind = nn.ConvTranspose2d if geometry.pop("transposed", False) else nn.Conv2d
    arguments = {"kernel_size": 3, "padding": 1, "groups": groups} | geometry
    name = "depthwise" if groups == channels == outputs else "grouped"
    for n, size in ((3, (13, 15)), (1, (7, 29)), (0, (5, 5))):
        x = torch.randn(n, channels, *size).bfloat16()
        conv = kind(channels, outputs, **arguments).bfloat16()
        y = by(name, conv, x)
        if y is None:
            return
        exact = copy.deepcopy(conv).double()(x.double())
        assert y.dtype == torch.bfloat16 and y.shape == exact.shape
        assert torch.ops.torch_blocked.tail_is_zero(y._physical, outputs)
        assert torch.equal(by(name, conv, x)._physical, y._physical)
        error = (y.to_dense().double() - exact).abs()
        assert (error <= exact.abs() * 2**-8 + 1e-5).all()


class Narrow(nn.Module):
    """What optimize runs in bfloat16 beside convolutions of images."""

    def __init__(self, linear, behind):
        super().__init__()
        self.conv = nn.Conv2d(3, 40, 3, padding=1)
        self.depthwise = nn.Conv2d(40, 40, 3, padding=1, groups=40)
        self.linear, self.behind = linear, behind

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = F.max_pool2d(self.depthwise(x) + x, 3, 2, 1)
        return self.behind(self.linear, x)


# Of each implementation of linear layers: whether it has a bias, and what makes its rows of an
# image. They are no view of the image, or the layer would be a convolution.
LINEAR = {
    "few_rows_bfloat16": (True, lambda layer, x: F.hardswish(layer(x.mean((2, 3))))),
    "dots_bfloat16": (False, lambda layer, x: F.gelu(layer(x.flatten(2)[..., :40]))),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("outputs", (1, 33, 64, 130))
def test_optimized_models_in_bfloat16(outputs, name):
    torch.manual_seed(0)
    bias, behind = LINEAR[name]
    model = Narrow(nn.Linear(40, outputs, bias), behind).eval()
    x = torch.randn(2, 3, 17, 14)
    with forced(name, "linear"):
        optimized = torch_blocked.optimize(model, x, dtype=torch.bfloat16, tune=False)
        optimized.choice = "blocked"
        results = [optimized(x), optimized(x)]
        plan = optimized.plan()
    assert name in plan and "maximum" in plan, plan
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], model(x), rtol=2e-2, atol=2e-2)


def test_maxima_of_bfloat16_keep_nan_and_infinities():
    x = torch.randn(2, 33, 9, 8).bfloat16()
    for value in (float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0):
        x[torch.rand(x.shape) < 0.05] = value
    x[:, 3] = -float("inf")
    x = x.float()
    model, blocked = nn.MaxPool2d(3, 2, 1).eval(), x.to_blocked()
    optimized = torch_blocked.optimize(model, blocked, dtype=torch.bfloat16, tune=False)
    optimized.choice = "blocked"
    assert "maximum" in optimized.plan()
    result = optimized(blocked).to_dense()
    torch.testing.assert_close(result, model(x), equal_nan=True, rtol=0, atol=0)


class Pointwise(nn.Module):
    """Gates, activations by their formulas, norms that fold into nothing, concats, sums."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.up = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.groups = nn.GroupNorm(1, 2 * channels)
        self.scale = nn.Parameter(torch.randn(channels, 1, 1))
        self.last = nn.Conv2d(2 * channels, 5, 1)

    def forward(self, x):
        x = self.first(x)
        x = x * F.relu6(x + 3) / 6
        gate = torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))
        y = torch.where(x * gate > 0.1, x * gate, 0.3 * x) * self.scale + x
        z = torch.cat([y, x.abs().sqrt()], 1)
        return self.last(torch.tanh(self.norm(z)) + torch.relu(self.groups(z)))


@pytest.mark.parametrize("channels", (1, 3, 7, 8, 9, 15, 16, 17, 33))
@pytest.mark.parametrize("images", (1, 3))
def test_pointwise_programs_in_bfloat16(channels, images):
    torch.manual_seed(channels)
    model, x = Pointwise(channels).eval(), torch.randn(images, 3, 13, 11)
    with torch.no_grad():
        model.norm.running_mean.normal_(0, 0.3)
        model.norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        optimized = torch_blocked.optimize(model, x, dtype=torch.bfloat16, tune=False, verify=False)
        optimized.choice = "blocked"
        result, expected = optimized(x), model(x)
        by_ops = copy.deepcopy(model).bfloat16()(x.bfloat16()).float()
    assert torch.equal(result, optimized(x))
    off, bound = ((each - expected).norm() / expected.norm() for each in (result, by_ops))
    assert off <= 1.2 * bound + 5e-3, (off, bound)
    slow = [s for s in optimized.steps() if s.implementation == "aten" and "cat" not in s.op]
    assert len(slow) <= 1, optimized.plan()  # the mean of the gate


@pytest.mark.parametrize("function", (F.silu, lambda x: F.gelu(x, approximate="tanh")))
def test_rough_gates_at_the_ends_of_all_numbers(function):
    """Beside float64 over all that bfloat16 has, NaN and infinities too."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).float().view(1, 16, 64, 64)

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Conv2d(16, 16, 1, groups=16, bias=False)

        def forward(self, x):
            return function(self.same(x))

    model = Gate().eval()
    nn.init.ones_(model.same.weight)
    with torch.no_grad():
        fast = torch_blocked.optimize(model, x, dtype=torch.bfloat16, tune=False, verify=False)
        fast.choice = "blocked"
        result, exact = fast(x).double(), function(x.double())
    finite = exact.isfinite() & (x.abs() < 1e19)  # whose cube is a number, too
    off = (result - exact)[finite].abs()
    bound = exact[finite].abs() * (2**-8 + 2e-4) + x[finite].abs() * 4e-39 + 1e-15
    assert (off <= bound).all()
    assert result[x.isnan()].isnan().all() and (result[x == float("inf")] == float("inf")).all()
