"""Splits, concats and shuffles of channels in torch_blocked.optimize: one step, or none."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked
from helpers.problems import threads
from torch import nn
from torch.nn import functional as F

from torch_blocked import _C

pytestmark = pytest.mark.usefixtures("cache_folder")


def shuffle(x, groups):
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class Units(nn.Module):
    """As ShuffleNetV2 has them: half of the channels pass, the other half is worked on."""

    def __init__(self, half, count=3):
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * half, 3, stride=2, padding=1)
        self.units = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(half, half, 1),
                nn.ReLU(),
                nn.Conv2d(half, half, 3, padding=1, groups=half),
                nn.Conv2d(half, half, 1),
                nn.ReLU(),
            )
            for _ in range(count)
        )
        self.down = nn.Conv2d(2 * half, 2 * half, 3, stride=2, groups=2 * half)
        self.head = nn.Conv2d(2 * half, 9, 1)

    def forward(self, x):
        x = self.stem(x)
        for unit in self.units:
            first, second = x.chunk(2, 1)
            x = shuffle(torch.cat((first, unit(second)), 1), 2)
        return self.down(x).mean((2, 3)), self.head(x)


def assert_exact_outputs(model, optimized, x):
    for i in range(2):
        assert_exact(Output(model, i), Output(optimized, i), x)


class Output(nn.Module):
    def __init__(self, model, index):
        super().__init__()
        self.model, self.index = model, index

    def forward(self, x):
        return self.model(x)[self.index]


@pytest.mark.parametrize("half", [58, 17, 16, 7])
@pytest.mark.parametrize("batch", [1, 3])
def test_shuffled_units(half, batch):
    model = Units(half).eval()
    x = torch.randn(batch, 3, 17, 15)
    assert_exact_outputs(model, blocked(model, x, tune=half == 16), x)


def test_shuffled_units_of_no_image():
    model = Units(17).eval()
    optimized = blocked(model, torch.randn(1, 3, 17, 15))
    pooled, image = optimized(torch.randn(0, 3, 17, 15))
    assert pooled.shape == (0, 34) and image.shape == (0, 9, 9, 8)


def test_shuffles_cost_a_convolution_nothing():
    model = Units(58).eval()
    x = torch.randn(1, 3, 33, 31)
    plan = blocked(model, x).plan()
    # One in each unit, and a copy for the depthwise convolution; AMX, which is faster all the same,
    # reads copies.
    by_tiles = _C.isa() == "amx"
    assert plan.count("gathers its channels") == (0 if by_tiles else 3)
    assert plan.count("reshape") == (3 if by_tiles else 1)
    assert "no kernel" not in plan


def test_shuffles_give_the_same_bits_with_any_number_of_threads():
    model = Units(58).eval()
    x = torch.randn(2, 3, 65, 63)
    optimized = blocked(model, x)
    expected = optimized(x)
    for count in (1, 2, 3):
        with threads(count):
            assert all(map(torch.equal, optimized(x), expected))


def apart(x, groups=2):
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w)


# Channels in another order, as people write it.
CHANNEL_OPS = {
    "copied": lambda x: apart(x).transpose(1, 2).contiguous().view(x.shape),
    "cloned": lambda x: apart(x).transpose(1, 2).clone().flatten(1, 2),
    "permute": lambda x: apart(x).permute(0, 2, 1, 3, 4).reshape(x.shape),
    "unflatten": lambda x: x.unflatten(1, (2, -1)).swapaxes(1, 2).flatten(1, 2),
    "movedim": lambda x: apart(x).movedim(-3, 1).reshape(x.shape),
    "movedims": lambda x: apart(x).moveaxis((1, 2), (2, 1)).reshape(x.shape),
    "rows": lambda x: x.view(len(x), 2, x.shape[1] // 2, -1).swapdims(1, 2).reshape(x.shape),
    "stack": lambda x: torch.stack(x.chunk(2, 1), 2).flatten(1, 2),
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1], -3),
    "select": lambda x: torch.concat([x[:, i].unsqueeze(1) for i in (3, 1, 2)], 1),
    "hsplit": lambda x: torch.concatenate(x.hsplit([5, 11])[::-1], 1),
    "tensor_split": lambda x: torch.cat(x.tensor_split(3, 1)[::-1], -3),
    "index": lambda x: x[:, [4, 2, 2, 0, 9, -1]],
    "index_select": lambda x: x.index_select(1, torch.tensor([7, 3, 1, 0, 8])),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll((3,), (1,)),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "chunk": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "split": lambda x: torch.cat([x.split([5, 11, x.shape[1] - 16], 1)[i] for i in (2, 0, 1)], 1),
    "slice": lambda x: x[:, 3:],
    "steps": lambda x: x[:, 1:-1:2],
    "repeated": lambda x: torch.cat((x[:, 4:], x, x[:, :3]), 1),
    "shuffle": lambda x: F.channel_shuffle(x, x.shape[1] // 2),
    "narrow": lambda x: x.narrow(-3, 2, 9).contiguous(),
    "nothing": lambda x: torch.cat(x.chunk(2, 1), 1),
    "two shuffles": lambda x: shuffle(shuffle(x, 2), x.shape[1] // 2),
}


class Between(nn.Module):
    """Two convolutions and what moves channels between them."""

    def __init__(self, channels, move, kernel):
        super().__init__()
        self.first = nn.Conv2d(6, channels, 3, padding=1)
        moved = move(torch.empty(1, channels, 2, 2)).shape[1]
        self.last = nn.Conv2d(moved, 10, kernel, padding=kernel // 2)
        self.move = move

    def forward(self, x):
        return self.last(self.move(self.first(x).relu()))


@pytest.mark.parametrize("op", CHANNEL_OPS)
@pytest.mark.parametrize("kernel", [1, 3])
def test_channel_ops(op, kernel):
    for channels in (18, 32, 162):  # the last are sums of several parts on AVX2
        model = Between(channels, CHANNEL_OPS[op], kernel).eval()
        x = torch.randn(2, 6, 7, 5)
        optimized = blocked(model, x)
        assert_exact(model, optimized, x, tolerance=8)  # two convolutions, one by Winograd's
        plan = optimized.plan()
        assert plan.count("reorder") <= 2, plan  # in and out
        assert_exact(model, optimized, torch.randn(1, 6, 4, 9), tolerance=8)


# What looks like a move of channels, and moves or drops pixels or images.
OTHER_OPS = {
    "flip": lambda x: x.flip(1, 2),
    "roll": lambda x: x.roll((3, 1), (1, 3)),
    "roll all": lambda x: x.roll(5),
    "repeat": lambda x: x.repeat(1, 2, 2, 1),
    "index": lambda x: x[:, :, [1, 0]],
    "rows": lambda x: x[:, :, torch.arange(x.shape[2]).flip(0)],
    "indices": lambda x: x[:, [[1], [0]], [1, 0]].flatten(1, 2).unsqueeze(-1),
    "index by values": lambda x: x[:, x[0, :, 0, 0].argsort()],
    "images": lambda x: x.flip(0).index_select(0, torch.tensor([0, 0])),
    "stack": lambda x: torch.stack((x, x), 3).flatten(2, 3),
    "rows of channels": lambda x: x.transpose(1, 2).flip(2).transpose(1, 2),
    "select": lambda x: x[:, :, 2:3],
    "pixels as channels": lambda x: x.flatten(2).transpose(1, 2).reshape(x.shape),
}


@pytest.mark.parametrize("op", OTHER_OPS)
def test_ops_that_move_more_than_channels(op):
    for channels in (18, 32):
        model = Between(channels, OTHER_OPS[op], 1).eval()
        for x in (torch.randn(2, 6, 7, 5), torch.randn(2, 6, 3, 3)):
            assert_exact(model, blocked(model, x), x, tolerance=8)


class Rows(nn.Module):
    """Channels in another order, and pixels in a row for what reads them."""

    def __init__(self, move):
        super().__init__()
        self.first, self.move = nn.Conv2d(3, 32, 3, padding=1), move

    def forward(self, x):
        rows = self.move(self.first(x)).flatten(2)
        return rows.softmax(1), rows.mean(2)


@pytest.mark.parametrize("op", ("shuffle", "copied", "rows", "flip"))
def test_rows_of_moved_channels(op):
    model = Rows(CHANNEL_OPS[op]).eval()
    x = torch.randn(2, 3, 7, 5)
    assert_exact_outputs(model, blocked(model, x), x)


class Reads(nn.Module):
    """A gather that is an output, a residual and what a pooling and an activation read."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 40, 1)
        self.second = nn.Conv2d(20, 20, 1)

    def forward(self, x):
        a, b = self.first(x).chunk(2, 1)
        y = F.max_pool2d(a, 2, 1).sigmoid()
        return F.relu(self.second(b) + b), torch.cat((y, b[:, :, 1:, 1:]), 1), b


def test_readers_of_gathers():
    model = Reads().eval()
    x = torch.randn(2, 4, 6, 5)
    optimized = blocked(model, x)
    for i in range(3):
        assert_exact(Output(model, i), Output(optimized, i), x)


class Growing(nn.Module):
    """As YOLO's C2f: the halves of one value, and what follows from the last, side by side."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(3, 2 * channels, 1)
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(4 * channels, 8, 1)

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for layer in self.layers:
            parts.append(layer(parts[-1]))
        return self.last(torch.cat(parts, 1))


@pytest.mark.parametrize("channels", [16, 12])
def test_halves_that_come_together_again(channels):
    model = Growing(channels).eval()
    x = torch.randn(1, 3, 9, 8)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    plan = optimized.plan()
    assert plan.count("aten::chunk") == 1  # the last half; both halves are what they come from
    assert sum(line.startswith("aten::cat ") for line in plan.splitlines()) == 1
