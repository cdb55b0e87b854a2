"""Models whose weights, buffers or inputs are of other types than float32."""

import torch
from torch import nn
from torch.nn import functional as F

from .table import register, typed


class Dequantized(nn.Module):
    """Weights are stored in another type, and cast to what x is where they are used."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(24, 24)
        weight = torch.randn(9, 24)
        scale = 1.0 if dtype.is_floating_point else weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round(decimals=2).to(dtype))
        self.register_buffer("scale", torch.as_tensor(scale))

    def forward(self, x):
        x = self.first(x).relu()
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


for _dtype in (torch.int8, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
    _name = "weights_of_" + str(_dtype).removeprefix("torch.")
    register(_name, lambda dtype=_dtype: Dequantized(dtype), (3, 24))


@typed((3, 24))
class WeightsOfNibbles(nn.Module):
    """Two weights of 4 bits in a byte, and a scale for each 8 of a row."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.randint(0, 256, (17, 12), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(17, 3).half())

    def forward(self, x):
        low, high = self.packed & 15, self.packed >> 4
        weight = torch.stack((low, high), -1).flatten(1).to(torch.int8) - 8
        scales = self.scales.repeat_interleave(8, 1).to(x.dtype)
        return x @ (weight.to(x.dtype) * scales).T


@typed((3, 24))
class PartInBfloat16(nn.Module):
    """The layers in the middle are of bfloat16 already."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 17), nn.Linear(17, 8)
        self.middle = nn.Sequential(nn.Linear(17, 17), nn.GELU()).to(torch.bfloat16)

    def forward(self, x):
        return self.last(self.middle(self.first(x).to(torch.bfloat16)).float())


@typed((3, 24))
class PartInDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 17), nn.Linear(17, 8)
        self.middle = nn.Linear(17, 17).double()

    def forward(self, x):
        y = self.middle(self.first(x).to(self.middle.weight.dtype))
        return self.last(y.tanh().to(self.last.weight.dtype))


@typed((2, 5, 8, 6))
class BuffersInDouble(nn.Module):
    """Statistics of an image that are float64, and turn the result to it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, 17, 3)
        self.register_buffer("mean", torch.rand(1, 5, 1, 1, dtype=torch.float64))
        self.register_buffer("std", 1 + torch.rand(1, 5, 1, 1, dtype=torch.float64))

    def forward(self, x):
        return self.conv(((x - self.mean) / self.std).float()).double() * 2


@typed((2, 5, 8, 6))
class FrozenNorm(nn.Module):
    """A batch norm by hand, as in detectors."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(5, 17, 3, bias=False), nn.Conv2d(17, 8, 1)
        for name in ("weight", "bias", "running_mean"):
            self.register_buffer(name, torch.randn(17))
        self.register_buffer("running_var", 0.5 + torch.rand(17))

    def forward(self, x):
        w, b, mean, var = (
            each.reshape(1, -1, 1, 1)
            for each in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = w * (var + 1e-5).rsqrt()
        return self.last(F.relu(self.conv(x) * scale + (b - mean * scale)))


@typed((2, 24), torch.tensor(0.75), torch.tensor(2))
class NumbersAsTensors(nn.Module):
    """A scale and a count without dims, and a scale that a Python number comes of."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 17)
        self.register_buffer("gain", torch.tensor(1.5))

    def forward(self, x, scale, count):
        return self.linear(x * scale) / count * self.gain + 1 / count


INPUTS = {
    "input_in_half": torch.linspace(-2, 2, 48).view(2, 24).half(),
    "input_in_bfloat16": torch.linspace(-2, 2, 48).view(2, 24).bfloat16(),
    "input_in_double": torch.linspace(-2, 2, 48, dtype=torch.float64).view(2, 24),
    "input_of_integers": torch.arange(-24, 24).view(2, 24),
    "input_of_bools": torch.arange(48).view(2, 24) % 3 == 0,
}


class Cast(nn.Module):
    """Of whatever comes in, and back to it if that has fractions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 17)

    def forward(self, x):
        y = self.linear(x.to(self.linear.weight.dtype))
        return y.to(x.dtype) if x.is_floating_point() else y


for _name, _input in INPUTS.items():
    register(_name, Cast, _input)


@typed(torch.tensor([[1, 5, 2, 0], [7, 3, 3, 6]]))
class EmbeddingInHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 24).half(), nn.Linear(24, 17)

    def forward(self, tokens):
        return self.linear(self.table(tokens).to(self.linear.weight.dtype))


@typed(torch.tensor([[1, 5, 2, 0], [7, 3, 3, 6]]))
class EmbeddingAndLinear(nn.Module):
    """The table is the last layer's weight, too."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 24, padding_idx=0), nn.LayerNorm(24)

    def forward(self, tokens):
        return F.linear(self.norm(self.table(tokens)), self.table.weight)


@typed(torch.tensor([1, 5, 2, 0, 7, 3, 3]), torch.tensor([0, 2, 5]))
class EmbeddingBag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.linear = nn.EmbeddingBag(11, 24, mode="mean"), nn.Linear(24, 17)

    def forward(self, tokens, offsets):
        return self.linear(self.bag(tokens, offsets)).relu()


@typed(torch.tensor([[1, 5, 2], [7, 3, 3]]), torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.9]]))
class EmbeddingBagWeighted(nn.Module):
    """Each row has a weight, which must be of the table's type."""

    def __init__(self):
        super().__init__()
        self.bag, self.linear = nn.EmbeddingBag(11, 24, mode="sum"), nn.Linear(24, 17)

    def forward(self, tokens, weights):
        return self.linear(self.bag(tokens, per_sample_weights=weights))


@typed((3, 7), torch.tensor([[1, 0], [4, 2], [3, 3]]))
class NumbersAndCategories(nn.Module):
    """As in recommender networks: a bottom of numbers, tables, and products of pairs."""

    def __init__(self):
        super().__init__()
        self.bottom, self.top = nn.Linear(7, 16), nn.Linear(16 + 3, 8)
        self.tables = nn.ModuleList(nn.Embedding(5, 16) for _ in range(2))

    def forward(self, x, categories):
        dense = self.bottom(torch.log1p(x.clamp(min=0)))
        each = [dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        each = torch.stack(each, 1)
        rows, columns = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat((dense, torch.bmm(each, each.mT)[:, rows, columns]), 1))
