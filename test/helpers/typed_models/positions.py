"""Models with positions, coordinates, times and boxes."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from .table import typed


def _heads(x, count):
    """As (batch, head, token, channel)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _half_turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class _Attention(nn.Module):
    """turn() changes queries and keys, bias() the scores."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 17)

    def turn(self, x, *positions):
        return x

    def bias(self, scores):
        return scores

    def forward(self, x, *positions):
        q, k, v = (_heads(each, self.heads) for each in self.qkv(x).chunk(3, -1))
        q, k = self.turn(q, *positions), self.turn(k, *positions)
        scores = self.bias(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))
        mixed = scores.softmax(-1).to(v.dtype) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


@typed((2, 7, 24))
class RotaryOfHalves(_Attention):
    """As in Llama: angles in float32, sines in the type of x."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inverse", 1 / 10000 ** (torch.arange(0, 12, 2).float() / 12))

    def turn(self, x):
        angles = torch.outer(torch.arange(x.shape[2], device=x.device).float(), self.inverse)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return x * cos + _half_turned(x) * sin


@typed((2, 7, 24))
class RotaryOfPairs(_Attention):
    """As in GPT-J, in float32 throughout."""

    def turn(self, x):
        inverse = 1.0 / (10000 ** (torch.arange(0, 12, 2, dtype=torch.float32) / 12))
        angles = torch.einsum("i,j->ij", torch.arange(x.shape[2], dtype=torch.float32), inverse)
        cos, sin = angles.cos(), angles.sin()
        even, odd = x.float()[..., ::2], x.float()[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return turned.flatten(-2).type_as(x)


@typed((2, 7, 24), torch.tensor([[0, 1, 2, 3, 4, 5, 6], [900, 901, 902, 903, 904, 905, 906]]))
class RotaryAtPositions(_Attention):
    """At far positions, which bfloat16 cannot tell apart; their product is a float32 matmul."""

    def turn(self, x, positions):
        inverse = 1 / 10000 ** (torch.arange(0, 12, 2).float() / 12)
        angles = inverse[None, :, None].expand(len(x), -1, 1) @ positions[:, None, :].float()
        angles = torch.cat((angles, angles), 1).transpose(1, 2)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return x * cos + _half_turned(x) * sin


@typed((2, 7, 24))
class BiasBySlope(_Attention):
    """As in ALiBi."""

    def bias(self, scores):
        slopes = torch.tensor([2.0 ** -(8 / self.heads * (i + 1)) for i in range(self.heads)])
        at = torch.arange(scores.shape[-1])
        distance = (at[None] - at[:, None]).abs().float()
        return scores - slopes[:, None, None] * distance


@typed((2, 7, 24))
class BiasByBucket(_Attention):
    """As in T5: buckets of logarithms, of which each has a bias."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 2)

    def bias(self, scores):
        at = torch.arange(scores.shape[-1])
        apart = at[None] - at[:, None]
        side = (apart > 0).to(torch.long) * 4
        apart = apart.abs()
        far = 2 + (torch.log(apart.float().clamp(min=1) / 2) / math.log(8) * 2).to(torch.long)
        bucket = side + torch.where(apart < 2, apart, far.clamp(max=3))
        return scores + self.table(bucket).permute(2, 0, 1)[None]


@typed((2, 6, 24))
class BiasOfWindow(_Attention):
    """As in Swin: a table by relative position, and -100 between two regions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(15, 2))
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None]
        self.register_buffer("index", (apart[0] + 1) * 5 + apart[1] + 2)

    def bias(self, scores):
        bias = self.table[self.index.view(-1)].view(6, 6, 2).permute(2, 0, 1).contiguous()
        region = torch.zeros(6)
        region[4:] = 1
        apart = region[None] - region[:, None]
        mask = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
        return scores + bias[None] + mask


@typed(torch.tensor([[1, 5, 2, 0, 4], [7, 3, 3, 6, 1]]))
class SinesOfTable(nn.Module):
    """The table of the first transformer, added to an embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.linear = nn.Embedding(8, 24), nn.Linear(24, 17)
        angles = torch.arange(50.0)[:, None] * torch.exp(
            torch.arange(0, 24, 2) * -math.log(1e4) / 24
        )
        table = torch.zeros(50, 24)
        table[:, ::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("table", table[None])

    def forward(self, tokens):
        x = self.tokens(tokens) * math.sqrt(24)
        return self.linear(x + self.table[:, : x.shape[1]])


@typed((2, 5, 24))
class LearnedPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.linear = nn.Embedding(40, 24), nn.Linear(24, 17)

    def forward(self, x):
        return self.linear(x + self.positions(torch.arange(x.shape[1], device=x.device))[None])


def _sines(times, width):
    """Of a time, at frequencies from 1 down to 1 / 10000, as in diffusion models."""
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2).float() / (width // 2))
    angles = times[:, None].float() * frequencies[None]
    return torch.cat((angles.cos(), angles.sin()), -1)


class _Timed(nn.Module):
    """A convolution to which an embedding of the time is added."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(5, 17, 3, padding=1), nn.Conv2d(17, 8, 3, padding=1)
        self.embed = nn.Sequential(nn.Linear(24, 17), nn.SiLU(), nn.Linear(17, 17))
        self.embed[0].weight.data.mul_(4)

    def forward(self, x, times):
        time = self.embed(_sines(times, 24).to(x.dtype))
        return self.last(F.silu(self.first(x) + time[:, :, None, None]))


@typed((2, 5, 8, 6), torch.tensor([7, 993]))
class TimeOfDiffusion(_Timed):
    """Whole times."""


@typed((2, 5, 8, 6), torch.tensor([518.5, 993.5]))
class TimeOfDiffusionInFloat(_Timed):
    """bfloat16 would round them to 520 and 992."""


@typed((2, 5, 8, 6), torch.tensor([0.03125, 0.75]))
class NoiseLevel(_Timed):
    """Scaled by the logarithm of a noise level, and scaled back, as in EDM."""

    def forward(self, x, sigma):
        kept = sigma.to(torch.float32).reshape(-1, 1, 1, 1)
        y = super().forward((kept.square() + 1).rsqrt() * x, kept.log().flatten() / 4)
        return y.to(torch.float32) * kept / (kept.square() + 1).sqrt()


@typed(torch.linspace(-1, 1, 36).view(12, 3))
class SinesOfCoordinates(nn.Module):
    """As in NeRF: at frequencies up to 32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(39, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, x):
        angles = x[..., None] * 2.0 ** torch.arange(6)
        angles = angles.flatten(1)
        return self.layers(torch.cat((x, angles.sin(), angles.cos()), -1))


@typed(torch.linspace(-1, 1, 24).view(12, 2))
class RandomFourierFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("directions", torch.randn(2, 12))
        self.layers = nn.Sequential(nn.Linear(24, 17), nn.GELU(), nn.Linear(17, 3))

    def forward(self, x):
        x = 2 * torch.pi * x @ self.directions
        return self.layers(torch.cat((x.sin(), x.cos()), -1)).sigmoid()


@typed((2, 5, 8, 6))
class CoordinateConvolution(nn.Module):
    """Rows, columns and radius as further channels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 17, 3, padding=1), nn.Conv2d(17, 8, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h)[:, None].expand(b, 1, h, w)
        columns = torch.arange(w, dtype=torch.float32).expand(b, 1, h, w) / (w - 1) * 2 - 1
        radius = torch.sqrt(rows.square() + columns.square())
        return self.last(self.first(torch.cat((x, rows, columns, radius), 1)).relu())


@typed((2, 5, 6, 4))
class SinesOfPixels(nn.Module):
    """As in DETR: sums of a mask count rows and columns."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(5, 24, 3, padding=1), nn.Linear(24, 8)

    def forward(self, x):
        inside = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)
        at = torch.arange(12, dtype=torch.float32)
        scale = 10000 ** (2 * torch.div(at, 2, rounding_mode="floor") / 12)
        parts = []
        for dim in (1, 2):
            count = inside.cumsum(dim, dtype=torch.float32)
            share = count / (count.select(dim, -1).unsqueeze(dim) + 1e-6) * 2 * math.pi
            turned = share[..., None] / scale
            parts.append(
                torch.stack((turned[..., ::2].sin(), turned[..., 1::2].cos()), 4).flatten(3)
            )
        positions = torch.cat(parts, 3)
        return self.last((self.first(x) + positions.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))


@typed((2, 24, 5, 3))
class PositionsResized(nn.Module):
    """Learned for 4 x 4 patches, interpolated in float32, as in vision transformers."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(24, 17, 1)
        self.positions = nn.Parameter(torch.randn(1, 17, 4, 4))

    def forward(self, x):
        x = self.patch(x)
        size = x.shape[2:]
        at = F.interpolate(self.positions.float(), size=size, mode="bicubic", align_corners=False)
        return (x + at.to(x.dtype)).flatten(2).transpose(1, 2)


def _grid(h, w, dtype=torch.float32):
    """Of cells, as (1, 1, h, w, 2)."""
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack((columns, rows), 2).view(1, 1, h, w, 2).to(dtype)


@typed((2, 16, 6, 4))
class BoxesOfYolo(nn.Module):
    """The grid and the anchors are float32; a box is (sigmoid + cell) * stride."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 14, 1)
        self.register_buffer("anchors", torch.tensor([[10.0, 13.0], [33.0, 23.0]]))

    def forward(self, x):
        b, _, h, w = x.shape
        y = self.conv(x).view(b, 2, 7, h, w).permute(0, 1, 3, 4, 2).contiguous().sigmoid()
        middle, size, rest = y.split((2, 2, 3), 4)
        middle = (middle * 2 - 0.5 + _grid(h, w)) * torch.tensor(8.0)
        size = (size * 2) ** 2 * self.anchors.view(1, 2, 1, 1, 2)
        return torch.cat((middle, size, rest), 4).view(b, -1, 7)


@typed((2, 16, 6, 4))
class BoxesOfBins(nn.Module):
    """The distance to each side is a mean over bins, as in later YOLOs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 1)
        self.project = nn.Conv2d(8, 1, 1, bias=False).requires_grad_(False)
        self.project.weight.data[:] = torch.arange(8, dtype=torch.float).view(1, 8, 1, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        bins = self.conv(x).view(b, 4, 8, h * w).transpose(2, 1).softmax(1)
        first, second = self.project(bins).view(b, 4, h * w).chunk(2, 1)
        middle = (_grid(h, w, x.dtype).view(-1, 2) + 0.5).T
        left, right = middle - first, middle + second
        return torch.cat(((left + right) / 2, right - left), 1) * 16.0


@typed((3, 24), torch.tensor([[2.0, 3, 30, 23], [100, 50, 140, 90], [400, 310, 463, 501]]))
class BoxesOfDeltas(nn.Module):
    """A width is exp(delta) times the anchor's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 8)

    def forward(self, x, boxes):
        boxes = boxes.to(x.dtype)
        widths, heights = (boxes[:, 2:] - boxes[:, :2]).unbind(1)
        left, top = boxes[:, :2].unbind(1)
        dx, dy, dw, dh = self.linear(x).view(-1, 2, 4).unbind(2)
        dw, dh = (each.clamp(max=math.log(1000.0 / 16)) for each in (dw, dh))
        w, h = dw.exp() * widths[:, None], dh.exp() * heights[:, None]
        cx = dx / 10 * widths[:, None] + (left + 0.5 * widths)[:, None]
        cy = dy / 10 * heights[:, None] + (top + 0.5 * heights)[:, None]
        half = torch.tensor(0.5, dtype=cx.dtype) * w
        return torch.stack((cx - half, cy - h / 2, cx + half, cy + h / 2), 2).flatten(1)


@typed((1, 16, 4, 3))
class Anchors(nn.Module):
    """Made in the type of the features, with int32 shifts, and returned beside the scores."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x):
        scores = self.conv(x)
        scales = torch.as_tensor([16.0, 32.0, 64.0], dtype=x.dtype)
        ratios = torch.sqrt(torch.as_tensor([0.5, 1.0, 2.0], dtype=x.dtype))
        sizes = torch.stack(
            (-scales / ratios, -scales * ratios, scales / ratios, scales * ratios), 1
        )
        h, w = x.shape[2:]
        ys, xs = torch.arange(h, dtype=torch.int32) * 8, torch.arange(w, dtype=torch.int32) * 8
        ys, xs = torch.meshgrid(ys, xs, indexing="ij")
        shifts = torch.stack((xs, ys, xs, ys), -1).view(-1, 1, 4)
        anchors = (shifts + (sizes / 2).round()[None]).reshape(-1, 4)
        return scores.permute(0, 2, 3, 1).reshape(len(x), -1), anchors


@typed((2, 16, 6, 4))
class CentersOfHeatmaps(nn.Module):
    """The mean position by softmax, as in key point networks."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 5, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        heat = self.conv(x).flatten(2).mul(3).softmax(-1).view(b, 5, h, w)
        xs, ys = torch.arange(w, dtype=torch.float32), torch.linspace(0, h - 1, h)
        return torch.stack(((heat.sum(2) * xs).sum(-1), (heat.sum(3) * ys).sum(-1)), -1)


@typed((2, 6, 24))
class Decay(nn.Module):
    """The weight of a token falls with its distance, as in RetNet."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 16) for _ in range(3))

    def forward(self, x):
        at = torch.arange(x.shape[1]).float()
        apart = at[:, None] - at[None]
        gamma = torch.log(1 - torch.tensor(2.0**-4))
        decay = torch.where(apart >= 0, torch.exp(apart * gamma), torch.zeros(()))
        return (self.q(x) @ self.k(x).mT / 4 * decay) @ self.v(x)
