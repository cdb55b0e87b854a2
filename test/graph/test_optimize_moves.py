"""Batch norms and activations in torch_blocked.optimize find their layer over views and concats."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked, randomized
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cache_folder")


class Mixed(nn.Module):
    """As MixNet has it: kernels of several sizes, then one batch norm and one activation."""

    def __init__(self, other=None):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Conv2d(c, c, k, padding=k // 2, groups=c) for c, k in ((5, 3), (16, 5), (9, 7))
        )
        self.up = nn.ConvTranspose2d(30, 8, 1)
        self.norm, self.other = nn.BatchNorm2d(30 + 8), other

    def forward(self, x):
        parts = [conv(part) for conv, part in zip(self.parts, x.split((5, 16, 9), 1), strict=True)]
        parts.append(self.up(x))
        if self.other:
            parts = self.other(parts)
        return F.silu(self.norm(torch.cat(parts, 1)))


def test_over_a_concat():
    model, x = randomized(Mixed()), torch.randn(2, 30, 9, 7)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    plan = optimized.plan()
    assert plan.count("aten::conv2d + batch_norm + silu") == 3
    assert "aten::conv_transpose2d + batch_norm + silu" in plan
    assert "\naten::batch_norm" not in plan and "\naten::silu" not in plan


OTHERS = {
    "not a layer": lambda parts: [*parts[:3], F.max_pool2d(parts[3], 3, 1, 1)],
    "read twice": lambda parts: [*parts[:3], parts[3] + parts[3].sigmoid()],
    "twice in it": lambda parts: [parts[0], parts[1][:, :7], parts[2], parts[2], parts[3]],
}


@pytest.mark.parametrize("name", OTHERS)
def test_not_over_a_concat(name):
    model, x = randomized(Mixed(OTHERS[name])), torch.randn(1, 30, 9, 7)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert "\naten::batch_norm + silu" in optimized.plan()


class Empty(nn.Module):
    """torch.cat takes [0] among tensors of any rank."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.norm(torch.cat((x.new_zeros(0), self.convolution(x)), 1)))


def test_nothing_in_a_concat():
    model, x = randomized(Empty()), torch.randn(2, 3, 5, 4)
    assert_exact(model, blocked(model, x), x)


class Tokens(nn.Module):
    """As LeViT has it: the batch norm sees rows, all else has tokens."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 20, bias=False), nn.BatchNorm1d(20)
        self.more = nn.Linear(20, 7)

    def forward(self, x):
        x = self.linear(x)
        x = F.hardswish(self.norm(x.flatten(0, 1)).reshape_as(x))
        return F.gelu(self.more(x).transpose(1, 2).unflatten(2, (3, 5)))


def test_over_views():
    model, x = randomized(Tokens()), torch.randn(2, 15, 12)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    plan = optimized.plan()
    assert "aten::linear + batch_norm + hardswish" in plan and "aten::linear + gelu" in plan
    assert "aten::flatten" not in plan and "aten::reshape" not in plan
    assert_exact(model, optimized, torch.randn(3, 15, 12))


def test_over_pixel_shuffle():
    model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.PixelShuffle(2), nn.LeakyReLU(0.1))
    model, x = randomized(model), torch.randn(1, 3, 8, 9)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert "aten::conv2d + leaky_relu" in optimized.plan()


def test_what_others_read_stays():
    class Read(Tokens):
        def forward(self, x):
            x = self.linear(x)
            rows = x.flatten(0, 1)
            return self.norm(rows), F.relu(rows)[0] + x[0, 0]

    model, x = randomized(Read()), torch.randn(2, 15, 12)
    optimized = blocked(model, x)
    with torch.no_grad():
        for own, wanted in zip(optimized(x), model(x), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
