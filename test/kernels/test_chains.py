"""Convolutions whose rows go through all in turn: the same bits as one after the other."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.draws import crossed
from helpers.int8_layers import Conv
from helpers.optimized import blocked
from helpers.problems import CHANNELS, threads
from torch import nn

pytestmark = [
    pytest.mark.usefixtures("in_bfloat16"),
    pytest.mark.usefixtures("cache_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Chain(nn.Module):
    """Convolutions of bytes, of which the last one may add what the first one reads."""

    def __init__(self, *convolutions, residual=False):
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.residual = residual

    def forward(self, x):
        y = x
        for convolution in self.convolutions[:-1]:
            y = convolution(y)
        return self.convolutions[-1](y, x) if self.residual else self.convolutions[-1](y)


def depthwise(channels, kernel=3, to=(0.05, 117), **geometry):
    geometry = {"padding": kernel // 2, **geometry}
    return Conv(channels, channels, kernel, groups=channels, then=F.relu, src=(0.05, 117), to=to,
                **geometry)  # fmt: skip


def point(inputs, outputs, src=(0.05, 117), **what):
    return Conv(inputs, outputs, 1, src=src, **what)


def real(*layers, then=nn.ReLU6):
    """Convolutions, with an activation after each but the last."""
    each = [layer for convolution in layers for layer in (convolution, then())]
    return nn.Sequential(*each[:-1])


class Added(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


def steps_in_turn(fast):
    return sum("in turn" in step.why for step in fast.steps())


@torch.no_grad()
def check(model, x, steps):
    """In turn, and one after the other, as a profiler sees them; `steps` of them in turn."""
    fast = blocked(model.eval(), x, verify=False)
    in_turn = fast(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        apart = fast(x)
    assert torch.equal(in_turn, apart)
    assert torch.equal(in_turn, fast(x))
    expected = model(x)
    off = ((in_turn - expected) / 0.05).abs().round()
    assert off.max() <= 3 and (off > 0).float().mean() < 0.02, off.max()
    assert steps_in_turn(fast) == steps, fast.plan()


def has_chains():
    """Whether src of bytes is multiplied as it is: words are widened, and have no chains."""
    model = Chain(point(16, 96, src=(0.03, 101)), depthwise(96), point(96, 16)).eval()
    return steps_in_turn(blocked(model, torch.randn(1, 16, 20, 20), verify=False)) == 3


@pytest.mark.parametrize(
    ("channels", "count_and_images"), crossed(3, CHANNELS[2:], [(1, 1), (2, 3), (3, 1)])
)
def test_inverted_residual(channels, count_and_images):
    count, images = count_and_images
    all_steps = has_chains()
    with threads(count):
        for (stride, kernel), residual in itertools.product(
            ((1, 3), (2, 3), (1, 5), (2, 5)), (False, True)
        ):
            if residual and stride > 1:
                continue
            block = Chain(
                point(channels, 3 * channels, then=F.relu6),
                depthwise(3 * channels, kernel, stride=stride),
                point(3 * channels, channels, residual=(0.05, 117) if residual else None),
                residual=residual,
            )
            model = nn.Sequential(point(channels, channels, src=(0.03, 101)), block)
            steps = 3 if residual else 4  # what the sum reads, too, is written
            check(model, torch.randn(images, channels, 33, 29), steps * all_steps)


@pytest.mark.parametrize("size", [(64, 64), (200, 96), (9, 300), (5, 16), (128, 31)])
def test_sizes(size):
    steps = 3 if has_chains() and size[0] >= 8 else 0  # fewer rows are not shared out
    for count in (1, 2):
        with threads(count):
            model = Chain(point(24, 96, src=(0.03, 101)), depthwise(96), point(96, 24))
            check(model, torch.randn(1, 24, *size), steps)


def test_what_is_in_turn():
    """A first layer; a depthwise one with its 1x1 alone; two blocks in a row; uneven padding."""
    all_steps = has_chains()
    first = Conv(3, 32, 3, padding=1, stride=2, src=(0.03, 101), then=F.relu)
    x = torch.randn(1, 3, 64, 62)
    check(Chain(first, depthwise(32), point(32, 16)), x, 3 * all_steps)
    x = torch.randn(2, 40, 31, 30)
    check(Chain(depthwise(40), point(40, 24)), x, 2 * all_steps)
    blocks = [point(40, 64), depthwise(64), point(64, 24), point(24, 72), depthwise(72, 5),
              point(72, 24)]  # fmt: skip
    check(Chain(*blocks), x, 6 * all_steps)
    check(Chain(depthwise(40), point(40, 40), depthwise(40), point(40, 40)), x, 4 * all_steps)
    asymmetric = depthwise(64, padding=(0, 2), stride=2)
    check(Chain(point(40, 64), asymmetric, point(64, 24)), x, 3 * all_steps)


@pytest.mark.parametrize(
    ("width", "kernel", "stride"), crossed(4, [64, 65, 66, 67], [2, 3, 5], [2, 3, 4])
)
@threads(2)
def test_windows_that_do_not_reach_the_end_of_a_row(width, kernel, stride):
    all_steps = has_chains()
    x = torch.randn(1, 24, 83, width)
    for geometry in ({"padding": 0}, {"padding": (kernel // 2, 0)}):
        middle = depthwise(48, kernel, stride=stride, **geometry)
        check(Chain(point(24, 48, src=(0.03, 101)), middle, point(48, 24)), x, 3 * all_steps)
        check(Chain(depthwise(24, kernel, stride=stride, **geometry), point(24, 24)), x,
              2 * all_steps)  # fmt: skip
        dense = Conv(48, 32, kernel, src=(0.05, 117), stride=stride, **geometry)
        check(Chain(point(24, 48, src=(0.03, 101)), dense, point(32, 24)), x, 3 * all_steps)


def test_who_is_not_in_turn():
    """Large weights beside few pixels; a value that another layer or the caller reads."""
    check(Chain(point(200, 600), depthwise(600), point(600, 200)), torch.randn(1, 200, 7, 7), 0)

    class Both(Chain):
        def forward(self, x):
            y = self.convolutions[0](x)
            return self.convolutions[1](y) + y

    model = Both(point(24, 48), depthwise(48)).eval()
    fast = blocked(model, torch.randn(1, 24, 30, 30), verify=False)
    assert steps_in_turn(fast) == 0


@torch.no_grad()
def test_residual_stays_until_all_have_read_it():
    """The sum may not lie over the image that other rows still read."""
    block = Chain(
        point(32, 96, src=(0.05, 117), then=F.relu),
        depthwise(96),
        point(96, 32, residual=(0.05, 117)),
        residual=True,
    )
    model = nn.Sequential(point(32, 32, src=(0.03, 101)), block, block).eval()
    x = torch.randn(1, 32, 60, 60)
    fast = blocked(model, x, verify=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        expected = fast(x)
    for _ in range(5):
        assert torch.equal(fast(x), expected)


# ---- float32 and bfloat16 ------------------------------------------------------------------------


DTYPES = (None, torch.bfloat16)


@torch.no_grad()
def check_real(model, x, steps, dtype=None):
    """In turn as one after the other, and close to float64."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    exact = model.double()(x.double())
    fast = blocked(model.float().eval(), x, verify=False, dtype=dtype)
    in_turn = fast(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        apart = fast(x)
    assert torch.equal(in_turn, apart) and torch.equal(in_turn, fast(x))
    error = (in_turn - exact).abs().max() / exact.abs().max()
    assert error <= (3e-2 if dtype else 1e-5), error
    assert steps_in_turn(fast) == steps, fast.plan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count, images", [(2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("channels", (7, 16, 33))
def test_real_inverted_residual(channels, count, images, dtype):
    wide = 3 * channels
    with threads(count):
        for (stride, kernel), residual in itertools.product(
            ((1, 3), (2, 3), (1, 5), (2, 5)), (False, True)
        ):
            if residual and stride > 1:
                continue
            middle = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide)
            then = (nn.ReLU6, nn.SiLU)[residual]
            body = real(nn.Conv2d(channels, wide, 1), middle, nn.Conv2d(wide, channels, 1),
                        then=then)  # fmt: skip
            x = torch.randn(images, channels, 129, 29)
            # What a sum adds is read twice, and stays.
            model = Added(body) if residual else body
            check_real(nn.Sequential(nn.MaxPool2d(1), model), x, 3, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_geometry(dtype):
    """Windows that end before a row does, taps beyond the image, dilation, groups, depthwise first,
    sums in several parts."""

    def check_body(body, *dims):
        steps = sum(isinstance(layer, nn.Conv2d) for layer in body.modules())
        check_real(nn.Sequential(nn.MaxPool2d(1), body), torch.randn(1, *dims), steps, dtype)

    with threads(2):
        geometry = crossed(3, (1, 2, 3), (2, 3, 5), (0, 1, 4), (1, 2))
        for stride, kernel, padding, dilation in geometry:
            middle = nn.Conv2d(48, 48, kernel, stride, padding, dilation, groups=48)
            body = [nn.Conv2d(24, 48, 1), middle, nn.Conv2d(48, 24, 1)]
            for first in (0, 1):
                width = 40 + (stride + padding + first) % 2
                check_body(real(*body[first:]), body[first].in_channels, 211, width)
        middle = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        check_body(real(nn.Conv2d(640, 64, 1), middle), 640, 120, 32)
        middle = nn.Conv2d(96, 96, 3, padding=1, groups=96)  # of several groups
        check_body(Added(real(nn.Conv2d(80, 96, 1), middle, nn.Conv2d(96, 80, 1))), 80, 70, 40)
        middle = nn.Conv2d(64, 64, 3, stride=2, padding=1, groups=8)  # at stride 1 it is Winograd's
        check_body(real(nn.Conv2d(32, 64, 1), middle, nn.Conv2d(64, 32, 1)), 32, 40, 31)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", (3, 5))
@pytest.mark.parametrize("stride, channels", [(1, 7), (2, 33)])
def test_real_on_one_thread(stride, channels, kernel, dtype):
    """Only what is more than caches hold."""
    middle = nn.Conv2d(64, 64, kernel, stride, kernel // 2, groups=64)
    body = real(nn.Conv2d(channels, 64, 1), middle, nn.Conv2d(64, channels, 1), then=nn.SiLU)
    model = Added(body) if stride == 1 else body
    with threads(1):
        for rows, steps in ((300, 3), (30, 0)):
            x = torch.randn(1, channels, rows, 200)
            check_real(nn.Sequential(nn.MaxPool2d(1), model), x, steps, dtype)


def test_real_rows_made_twice():
    """Windows of 9 rows over 16 that two threads share would make 1.5 times the rows."""
    body = [nn.Conv2d(48, 96, 1), nn.Conv2d(96, 96, 5, padding=4, dilation=2, groups=96)]
    with threads(2):
        for rows, steps in ((16, 0), (160, 2)):
            x = torch.randn(1, 48, rows, 32)
            check_real(nn.Sequential(nn.MaxPool2d(1), real(*body)), x, steps)


@threads(2)
def test_real_values_beyond_all_numbers():
    """Infinite weights do not meet the padding."""
    model = real(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32))
    with torch.no_grad():
        model[2].weight[3, 0, 0, 0] = float("inf")
        x = torch.randn(1, 16, 30, 30)
        expected = model(x)
        result = blocked(model.eval(), x, verify=False)(x)
    assert torch.equal(result.isnan(), expected.isnan())
    torch.testing.assert_close(result[:, 4:], expected[:, 4:])
