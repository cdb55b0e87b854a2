"""Which values are bfloat16 where the user asks for it, and which stay float32."""

import itertools
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CHANNELS
from torch import nn

import torch_blocked as tb
from torch_blocked import _C
from torch_blocked.optimized_module import OptimizedModule

pytestmark = pytest.mark.usefixtures("cache_folder")

NARROW = _C.multiplies_bfloats()


def optimized(model, *args, **options):
    """In bfloat16, unverified: rounding is what is tested."""
    options = {"tune": False, "verify": False} | options
    fast = tb.optimize(model.eval(), args, dtype=torch.bfloat16, **options)
    fast.choice = "blocked"
    return fast


def types_of(fast, *args):
    """Of each step, by its op: "bfloat16" or "float32"."""
    return {
        step.op: "bfloat16" if step.output.endswith("bfloat16") else "float32"
        for step in fast.steps(*args)
    }


def assert_near(model, fast, *args, times=4):
    """As near to float64 as ATen in bfloat16, times a factor; the same bits twice."""
    with torch.no_grad():
        result, again = fast(*args), fast(*args)
        exact = model.double()(*(each.double() for each in args))
        coarse = model.bfloat16()(*(each.bfloat16() for each in args))
        model.float()
    assert result.dtype == torch.float32 and result.shape == exact.shape
    assert torch.equal(result, again)
    if not exact.numel():
        return
    off, bound = ((each.double() - exact).abs().max() for each in (result, coarse))
    assert off <= times * bound + 2**-7 * exact.abs().max(), (off, bound)


class Model(nn.Module):
    """A model of its submodules and a function that calls them."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.function(self, *args)


@pytest.mark.usefixtures("in_bfloat16")
def test_followers_of_products():
    torch.manual_seed(0)
    model = Model(
        lambda s, x: s.last(F.max_pool2d(torch.sin(s.norm(s.first(x))), 2).mean((2, 3))),
        first=nn.Conv2d(3, 16, 3),
        norm=nn.GroupNorm(2, 16),
        last=nn.Linear(16, 5),
    )
    x = torch.randn(2, 3, 14, 14)
    fast = optimized(model, x)
    types = types_of(fast)
    if NARROW:
        names = ("conv2d", "group_norm", "sin", "max_pool2d", "linear")
        assert all(each == "bfloat16" for op, each in types.items() if any(n in op for n in names))
        assert types["to"] == "float32"  # of the result; the first one comes before
    else:
        assert set(types.values()) == {"float32"}
    assert_near(model, fast, x)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(
    "function",
    (
        lambda s, x, grid: s.first(x).sigmoid() * 2 + grid,  # boxes: float32 decides
        lambda s, x, grid: torch.cat([s.first(x), grid, grid], 1) * 1.5,
        lambda s, x, grid: (s.first(x) ** 2).mean(1, keepdim=True) + grid.mean(1, keepdim=True),
        lambda s, x, grid: torch.fft.rfft2(s.first(x)).abs() + grid[..., :8],
        lambda s, x, grid: s.first(x).cumsum(1) + grid,
    ),
)
def test_what_stays_float32(function):
    torch.manual_seed(0)
    model = Model(function, first=nn.Conv2d(3, 6, 3, padding=1))
    x, grid = torch.randn(1, 3, 14, 14), 600 + torch.rand(1, 6, 14, 14)
    fast = optimized(model, x, grid)
    steps = list(fast.steps())
    assert not steps[-1].output.endswith("bfloat16") and steps[-1].op != "to", fast.plan()
    with torch.no_grad():
        off = fast(x, grid).double() - model.double()(x.double(), grid.double())
    assert off.abs().max() < 0.2  # 600 in bfloat16 is off by up to 2


@pytest.mark.usefixtures("in_bfloat16")
def test_nothing_converts_between_products():
    """Images and tokens stay bfloat16 from the first product to the last."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(16)
    tokens = Model(
        lambda s, x: s.last(F.gelu(s.norm(s.first(x)))),
        first=nn.Linear(8, 16), norm=norm, last=nn.Linear(16, 4),
    )  # fmt: skip
    images = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Hardswish(), nn.Conv2d(16, 16, 3, groups=16), nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2), nn.Conv2d(16, 4, 1),
    )  # fmt: skip
    for model, x in ((tokens, torch.randn(2, 5, 8)), (images, torch.randn(1, 3, 20, 20))):
        fast = optimized(model, x)
        conversions = [step for step in fast.steps() if step.op == "to"]
        assert len(conversions) == 2 * NARROW, fast.plan()
        assert_near(model, fast, x)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("images", (0, 1, 3))
@pytest.mark.parametrize("channels", CHANNELS)
def test_rows_of_both_types(channels, images):
    """Norms, softmax and programs read and write either type, in every format."""
    torch.manual_seed(channels)
    of_channels = nn.LayerNorm(channels)

    def norm_of_channels(x):
        return of_channels(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(s, x):
        x = norm_of_channels(s.first(x))  # bfloat16 in and out
        y = s.second(norm_of_channels(x + 1) * x)
        z = norm_of_channels(torch.tanh(y.abs()) * y)  # bfloat16 in, float32 out
        return torch.softmax(z.flatten(2), -1) + s.tokens(y.flatten(2)).sum(1, keepdim=True)

    model = Model(
        forward, of=of_channels, first=nn.Conv2d(3, channels, 3, padding=1),
        second=nn.Conv2d(channels, channels, 1), tokens=nn.LayerNorm(35),
    )  # fmt: skip
    x = torch.randn(images, 3, 7, 5)
    fast = optimized(model, torch.randn(1, 3, 7, 5))
    assert_near(model, fast, x)
    assert_near(
        model, fast, x.to_blocked().to_dense().contiguous(memory_format=torch.channels_last)
    )


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("channels", CHANNELS)
def test_programs_after_layers(channels):
    """A program on what a convolution stores, alone and in a chain of rows."""
    torch.manual_seed(channels)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.Softplus(), nn.Conv2d(channels, 24, 1),
        nn.Softsign(), nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Sigmoid(),
    )  # fmt: skip
    x = torch.randn(3, 3, 33, 31)
    fast = optimized(model, x)
    assert_near(model, fast, x)
    assert not NARROW or Counter(types_of(fast).values())["bfloat16"] >= 3, fast.plan()


class Block(nn.Module):
    """One of the parts that are fused between two convolutions."""

    def __init__(self, part, channels, *more):
        super().__init__()
        self.first, self.part = nn.Conv2d(3, channels, 3, padding=1), part
        self.more = nn.ModuleList(more)
        with torch.no_grad():
            self.outputs = part(self.more, self.first(torch.randn(1, 3, 6, 8))).shape[1]
        self.last = nn.Conv2d(self.outputs, 5, 1)

    def forward(self, x):
        return self.last(self.part(self.more, self.first(x)))


def squeeze_excite(channels):
    def part(m, x):
        gate = torch.sigmoid(m[1](F.silu(m[0](x.mean((2, 3), keepdim=True)))))
        return F.relu(x * gate + x)

    return Block(part, channels, nn.Conv2d(channels, 7, 1), nn.Conv2d(7, channels, 1))


def hard_gate(channels):
    def part(m, x):
        return x * F.hardsigmoid(m[0](F.adaptive_avg_pool2d(x, 1)))

    return Block(part, channels, nn.Conv2d(channels, channels, 1))


def norm_and_activation(channels):
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    nn.init.normal_(norm.running_mean)
    return Block(lambda m, x: m[1](x) * F.silu(m[0](x)), channels, norm, nn.Conv2d(channels, 1, 1))


def odd_concat(channels):
    def part(m, x):
        return torch.cat([m[0](x), x, m[1](x), x.relu()], 1)

    return Block(part, channels, nn.Conv2d(channels, 5, 1), nn.Conv2d(channels, 11, 1))


def shuffled(channels):
    def part(m, x):
        x = torch.cat([m[0](x), x], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)[:, : c - 1]

    return Block(part, channels, nn.Conv2d(channels, channels, 1))


def pixels_shuffled(channels):
    def part(m, x):
        return F.pixel_unshuffle(F.pixel_shuffle(m[0](x), 2).tanh(), 2)

    return Block(part, channels, nn.Conv2d(channels, 4 * channels, 1))


def resampled(mode):
    def make(channels):
        def part(m, x):
            return F.interpolate(x, scale_factor=(2, 1.5), mode=mode, align_corners=True)

        return Block(part, channels)

    return make


def attention(channels):
    channels += channels % 2  # an odd number of inputs has no kernel

    def part(m, x):
        n, c, h, w = x.shape
        q, k, v = m[0](x.flatten(2).transpose(1, 2)).view(n, h * w, 3, 2, c).permute(2, 3, 0, 1, 4)
        y = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        return m[1](y.transpose(1, 2).flatten(2)).transpose(1, 2).view(n, c, h, w) + x

    more = nn.Linear(channels, 6 * channels), nn.Linear(2 * channels, channels)
    return Block(part, channels, *more)


def products(channels):
    def part(m, x):
        y = x.flatten(2)
        return (m[0](x).flatten(2) @ y.transpose(1, 2) @ y / 48).view_as(x)

    return Block(part, channels, nn.Conv2d(channels, channels, 1))


BLOCKS = {
    "squeeze_excite": squeeze_excite,
    "hard gate": hard_gate,
    "norm and activation": norm_and_activation,
    "odd concat": odd_concat,
    "shuffled": shuffled,
    "pixels shuffled": pixels_shuffled,
    "bilinear": resampled("bilinear"),
    "bicubic": resampled("bicubic"),
    "attention": attention,
    "products": products,
}


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, channels):
    """What float32 fuses is fused, and reads and writes bfloat16: only ends are converted."""
    torch.manual_seed(channels)
    model = BLOCKS[name](channels).eval()
    fast = optimized(model, torch.randn(2, 3, 6, 8))
    wide = tb.optimize(model, torch.randn(2, 3, 6, 8), tune=False, verify=False)
    # ATen's pixel_unshuffle of nothing keeps the sizes.
    for images in (1, 3) if name == "pixels shuffled" else (0, 1, 3):
        assert_near(model, fast, torch.randn(images, 3, 6, 8))
    if not NARROW:
        return
    here, there = ([step.op for step in each.steps()] for each in (fast, wide))
    # A convolution in float32 reads the channels of a shuffle where they lie.
    moves = ("to", "reorder", "contiguous", "aten::cat + view + transpose + reshape + slice")
    assert Counter(each for each in here if each not in moves) == Counter(
        each for each in there if each not in moves
    )
    assert here.count("to") == 2, fast.plan()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_moves_of_eager_tensors(channels, dtype):
    """Ops that only move numbers of two bytes keep all bits, without a dense copy."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits[torch.randperm(2**16)][: 3 * 4 * channels * 30].view(dtype)
    x = x.repeat(3 * 4 * channels * 30 // x.numel() + 1)[: 3 * 4 * channels * 30]
    x = x.view(3, 4 * channels, 5, 6)
    y = x[:, :channels].to_blocked()
    index = torch.randperm(channels)
    with tb.strict():
        for function, src in (
            (lambda t: t[:, index], y),
            (lambda t: t.flip(1), y),
            (lambda t: torch.cat([t, t[:, :1], t], 1), y),
            (lambda t: F.pixel_shuffle(t, 2), x.to_blocked()),
            (
                lambda t: F.pixel_unshuffle(t, 2),
                x.transpose(2, 3)[:, :, :, :4].contiguous().to_blocked(),
            ),
        ):
            if dtype == torch.float16 and function(src) is None:
                continue
            result, expected = function(src).to_dense(), function(src.to_dense())
            assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("mode", ("bilinear", "bicubic"))
def test_eager_resampling(mode, channels):
    x = torch.randn(2, channels, 7, 9).bfloat16()
    arguments = {"size": (11, 5), "mode": mode, "align_corners": False}
    with tb.strict():
        result = F.interpolate(x.to_blocked(), **arguments)
    exact = F.interpolate(x.double(), **arguments)
    assert result.dtype == torch.bfloat16 and torch.ops.torch_blocked.tail_is_zero(
        result._physical, channels
    )
    assert ((result.to_dense().double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()


def test_stretches_against_all_choices():
    choose = random.Random(0)
    for _ in range(300):
        stretches = [
            (choose.random(), choose.random(), choose.random() / 2)
            for _ in range(choose.randrange(1, 8))
        ]

        def time(wide, stretches=stretches):
            total = sum(each[1 if i in wide else 0] for i, each in enumerate(stretches))
            changes = (i for i in range(1, len(stretches)) if (i in wide) != (i - 1 in wide))
            return total + sum(stretches[i][2] for i in changes)

        places = range(len(stretches))
        subsets = (set(each) for n in range(len(stretches) + 1)
                   for each in itertools.combinations(places, n))  # fmt: skip
        assert time(_C.faster_in_float32(stretches)) <= min(map(time, subsets)) + 1e-12


@pytest.mark.parametrize("channels", (24, 33))
def test_types_by_times(channels, monkeypatch):
    """Whatever is faster here: results are right, and plan() says what was measured."""
    monkeypatch.setattr(OptimizedModule, "_computes", "timed")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3), nn.SiLU(), nn.Conv2d(channels, 4 * channels, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(4 * channels * 144, 10),
    )  # fmt: skip
    x = torch.randn(2, 3, 14, 14)
    fast = optimized(model, x, tune=True)
    assert_near(model, fast, x)
    words = fast.plan().splitlines()[0]
    if not NARROW:
        assert "bfloat16" not in "".join(types_of(fast).values())
    elif "float32" in words:
        assert "because that is faster: whole runs took" in words
    else:
        assert Counter(types_of(fast).values())["bfloat16"] >= 2


def test_a_cpu_without_bfloat16_computes_in_float32():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 9, 9)
    fast = tb.optimize(model, x, dtype=torch.bfloat16, tune=False)
    gains = "this CPU does not multiply bfloat16" not in fast.plan()
    assert gains == (NARROW and _C.isa() in ("avx512", "amx"))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("in_bfloat16")
def test_modules_to_keep(tmp_path):
    """They stay in float32 with all inside; so does the saved plan."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), inner, nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(1, 3, 9, 9)

    def plan_of(fast):
        steps = [step for step in fast.steps() if "conv" in step.op]
        return [step.output.endswith("bfloat16") for step in steps]

    for keep, narrow in (
        ((), [1, 1, 1]),
        (["1"], [1, 0, 1]),
        (["0", "2"], [0, 1, 0]),
        ([""], [0] * 3),
    ):
        fast = optimized(model, x, keep=keep)
        assert plan_of(fast) == [bool(each) and NARROW for each in narrow]
        fast.save(tmp_path / "model")
        loaded = tb.load(tmp_path / "model")
        assert plan_of(loaded) == plan_of(fast)
        with torch.no_grad():
            assert torch.equal(loaded(x), fast(x))
    compiled = torch.compile(
        model, backend="torch_blocked", options={"dtype": torch.bfloat16, "keep": [""]}
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    for keep, error in (("1", TypeError), ([1], TypeError), (["3"], ValueError)):
        with pytest.raises(error, match="expected keep as paths of modules"):
            tb.optimize(model, x, keep=keep)


class Cancelling(nn.Module):
    """The small difference of two large results."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("shift", torch.full((8, 1, 1), 1000.0))

    def forward(self, x):
        y = self.conv(x)
        return F.conv2d(y + self.shift, torch.eye(8)[..., None, None]) - self.shift


@pytest.mark.usefixtures("in_bfloat16")
def test_results_that_bfloat16_spoils(tmp_path):
    torch.manual_seed(0)
    model, x = Cancelling().eval(), torch.randn(2, 3, 9, 8)
    fast = tb.optimize(model, x, dtype=torch.bfloat16, tune=False)
    assert fast.choice == "blocked"
    words = "in float32, because bfloat16 changes its results: "
    assert words in fast.plan() or not NARROW
    fast.save(tmp_path / "model")
    loaded = tb.load(tmp_path / "model")
    with torch.no_grad():
        for y in (x, torch.randn(1, 3, 20, 11)):
            for each in (fast, loaded):
                torch.testing.assert_close(each(y), model(y), rtol=1e-3, atol=1e-3)
    fast.release()
    assert torch.equal(fast(x), loaded(x))


@pytest.mark.usefixtures("in_bfloat16")
def test_inputs_in_bfloat16():
    """A pipeline may have them already; the model's own type is taken, too."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 9, 9)
    fast = tb.optimize(model, x, dtype=torch.bfloat16, tune=False)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(x.bfloat16()), fast(x.bfloat16().float()))
        assert torch.equal(fast(x.bfloat16().to_blocked()), fast(x.bfloat16()))
    whole, y = model.bfloat16(), x.bfloat16()
    fast = tb.optimize(whole, y, dtype=torch.bfloat16, tune=False)
    with torch.no_grad():
        assert fast(y).dtype == whole(y).dtype == torch.bfloat16
