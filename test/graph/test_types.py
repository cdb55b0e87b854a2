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
    """As near to float64 as the model in bfloat16 is, by ATen, times a factor; the same bits twice."""
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
    images = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Hardswish(), nn.Conv2d(16, 16, 3, groups=16),
                           nn.AvgPool2d(2), nn.Upsample(scale_factor=2), nn.Conv2d(16, 4, 1))  # fmt: skip
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
    assert_near(model, fast, x.to_blocked().to_dense().contiguous(memory_format=torch.channels_last))


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
