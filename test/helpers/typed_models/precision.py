"""Models whose numbers need more digits than bfloat16 has: 8 of them are too few for times, pixels,
indices and numbers near 1."""

import torch
from torch import nn

from .table import typed


class _Linear(nn.Module):
    def __init__(self, inputs=24):
        super().__init__()
        self.linear = nn.Linear(inputs, 17)


@typed((1, 300, 8))
class SinesOfArange(_Linear):
    """Whole numbers above 256 in the type of x."""

    def __init__(self):
        super().__init__(8)

    def forward(self, x):
        at = torch.arange(x.shape[1], dtype=x.dtype)
        return self.linear(x + 2 * (at[:, None] * torch.linspace(0.5, 1, 8, dtype=x.dtype)).sin())


@typed((1, 300, 8), torch.ones(1, 300, dtype=torch.int64))
class SinesOfCount(_Linear):
    """A sum of ones along a mask counts the tokens."""

    def __init__(self):
        super().__init__(8)

    def forward(self, x, mask):
        at = mask.to(x.dtype).cumsum(1)[..., None]
        return self.linear(x + 2 * (at * torch.linspace(0.5, 1, 8).to(x.dtype)).sin())


@typed(torch.tensor([[301.0, 0.5], [302, -1.5], [998, 2], [999, 0.25]]))
class IndicesInFloat(_Linear):
    """Numbers of rows beside other numbers, all float32."""

    def __init__(self):
        super().__init__(8)
        self.table = nn.Embedding(1000, 8)

    def forward(self, x):
        rows = x[:, 0].long()
        return self.linear(self.table(rows) * x[:, 1:]), rows


@typed((4, 24), torch.tensor([1000.25, 1001.5, 1001.75, 1004]))
class TimesBetween(_Linear):
    """States decay with the time since the one before."""

    def forward(self, x, times):
        apart = torch.cat((times.new_zeros(1), times[1:] - times[:-1]))
        return self.linear(x) * torch.exp(-apart)[:, None]


BOXES = torch.tensor([[900.0, 905, 911, 917], [903, 903, 914, 915], [897, 909, 905, 919]])


@typed((3, 24), BOXES)
class OverlapsOfBoxes(_Linear):
    """Small boxes far from the origin; shares of their union."""

    def forward(self, x, boxes):
        low = torch.max(boxes[:, None, :2], boxes[None, :, :2])
        high = torch.min(boxes[:, None, 2:], boxes[None, :, 2:])
        shared = (high - low).clamp(min=0).prod(2)
        sizes = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        overlaps = shared / (sizes[:, None] + sizes - shared)
        return overlaps, overlaps @ self.linear(x)


@typed(BOXES + 0.5, (3, 24))
class PixelsOfBoxes(_Linear):
    """Whole pixels, as integers."""

    def forward(self, boxes, x):
        pixels = boxes.floor().to(torch.int64)
        return pixels, self.linear(x) * (boxes - pixels).sum(1, keepdim=True)


@typed((2, 5, 8, 6), torch.tensor([3, 60]))
class DiffusionStep(nn.Module):
    """The first shares of the image are so near to 1 that bfloat16 leaves no noise."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shares", torch.cumprod(1 - torch.linspace(1e-4, 2e-2, 100), 0))
        self.conv = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x, times):
        share = self.shares[times].view(-1, 1, 1, 1)
        noise = self.conv(x)
        return (x - torch.sqrt(1 - share) * noise) / share.sqrt(), noise * torch.sqrt(1 - share)


@typed(20 + torch.linspace(-1, 1, 72).view(3, 24).mul(9).sin())
class VarianceBySquares(_Linear):
    """The mean of squares less the square of the mean."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        var = x.square().mean(1, keepdim=True) - mean.square()
        return self.linear((x - mean) * torch.rsqrt(var + 1e-5))


@typed((3, 24))
class SmallBesideOne(_Linear):
    """A logarithm of 1 + a small number, in float32."""

    def forward(self, x):
        return torch.log(1 + self.linear(x).float().sigmoid() * 1e-3) * 1e3


@typed((3, 24))
class SlowAverage(_Linear):
    """A running average whose decay bfloat16 rounds to 1."""

    def __init__(self):
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.999))
        self.register_buffer("average", torch.randn(24))

    def forward(self, x):
        average = self.average * self.decay + x.mean(0) * (1 - self.decay)
        return self.linear((average - self.average) * 1000)


@typed(torch.tensor([[0.25, 12.0], [0.75, 300.0], [0.5, 7000.5]]), (3, 24))
class Offsets(_Linear):
    """Numbers around a large one, which is taken away."""

    def forward(self, x, y):
        x = (x + 1000.0) * 2 - 2000.0
        return self.linear(y) * x[:, :1], x[:, 1:] - x[:, 1:].floor()
