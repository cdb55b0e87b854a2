"""Models that cast what they compute with, or that look at its type."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .table import between_linears, typed


def _required(x):
    if x.dtype != torch.float32:
        raise TypeError(f"expected float32, got {x.dtype}")
    return x.tanh()


def _same_type(x):
    scale = torch.linspace(0.5, 1.5, x.shape[-1])
    if scale.dtype != x.dtype:
        raise TypeError(f"expected {scale.dtype}, got {x.dtype}")
    return x * scale


def _not_autocast(x):
    with torch.autocast("cpu", enabled=False):
        return x.float().softmax(-1) @ torch.ones(x.shape[-1], 5)


def _autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ torch.ones(x.shape[-1], 11).tril()).float()


def _clamped_if_half(x):
    """As in T5, and something else for other types, which shows that none was changed."""
    return x.clamp(-1, 1) if x.dtype in (torch.float16, torch.bfloat16) else x.exp()


def _by_bits(x):
    """The absolute value: without the sign bit."""
    return x.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF).view(torch.float32)


between_linears(
    {
        "float_and_back": lambda x: x.float().softmax(-1).to(x.dtype),
        "float_and_stays": lambda x: x.float().sigmoid(),
        "type_as": lambda x: x * torch.arange(x.shape[-1]).type_as(x) / 24,
        "to_other_tensor": lambda x: x + torch.arange(x.shape[-1]).to(x) / 8,
        "double_and_back": lambda x: x.to(torch.float64).exp().log1p().to(x.dtype),
        "double_and_float": lambda x: x.double().cumsum(-1).float(),
        "double_product": lambda x: (x.double() @ torch.eye(24, dtype=torch.float64)).to(x.dtype),
        "half_and_float": lambda x: x.half().float().sin(),
        "bfloat16_and_float": lambda x: x.bfloat16().float().cos(),
        "type_by_name": lambda x: x.type("torch.FloatTensor") * 2,
        "type_by_dtype": lambda x: x.type(torch.float32).exp(),
        "promote_types": lambda x: x.to(torch.promote_types(x.dtype, torch.float16)).exp(),
        "result_type": lambda x: torch.ones(24, dtype=torch.result_type(x, 1.0)) @ x.T @ x,
        "default_type": lambda x: x.to(torch.get_default_dtype()).relu(),
        "integers_and_back": lambda x: (x * 16).to(torch.int32).to(x.dtype) / 16,
        "bools_to_type": lambda x: (x > 0).to(x.dtype) * x,
        "bools_to_float": lambda x: (x > 0).float() * x,
        "bools_times": lambda x: x * (x > 0),
        "required_float32": _required,
        "required_same_type": _same_type,
        "epsilon_of_type": lambda x: x / (x.norm(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps),
        "softmax_with_type": lambda x: F.softmax(x, -1, dtype=torch.float32),
        "log_softmax_in_double": lambda x: F.log_softmax(x, -1, dtype=torch.float64).to(x.dtype),
        "sum_with_type": lambda x: x - x.sum(-1, keepdim=True, dtype=torch.float64).float() / 24,
        "mean_with_type": lambda x: x - x.mean(-1, keepdim=True, dtype=torch.float32),
        "cumsum_with_type": lambda x: x.cumsum(-1, dtype=torch.float64).to(x.dtype),
        "double_number": lambda x: x * torch.tensor(0.3, dtype=torch.float64),
        "numpy_number": lambda x: x * np.float64(0.3),
        "numpy_array": lambda x: (x + torch.from_numpy(np.arange(24) / 24)).float(),
        "tensor_of_list": lambda x: x[:, :3] * torch.tensor([0.5, 1.5, -0.5]),
        "integer_division": lambda x: x * (torch.arange(24) / 24),
        "autocast_disabled_inside": _not_autocast,
        "autocast_inside": _autocast,
        "bits": _by_bits,
        "clamp_of_half": _clamped_if_half,
    },
    *(3, 24),
)


@typed((2, 5, 24))
class LlamaNorm(nn.Module):
    """The root mean square in float32, the weight in the type of x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(24))
        self.linear = nn.Linear(24, 17, bias=False)

    def norm(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        return self.linear(self.weight * self.norm(x).to(x.dtype))


@typed((2, 5, 24))
class GemmaNorm(LlamaNorm):
    """The weight is float32, too, and its offset is 1."""

    def forward(self, x):
        return self.linear((self.norm(x) * (1 + self.weight.float())).type_as(x))


class _LayerNormOfFloat(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.type(torch.float32)).type(x.dtype)


@typed((2, 5, 24))
def layer_norm_of_float():
    """As in CLIP."""
    return nn.Sequential(nn.Linear(24, 17), _LayerNormOfFloat(17), nn.GELU(), nn.Linear(17, 8))


@typed((2, 5, 24))
class LayerNormOfFloatWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 17)

    def forward(self, x):
        weight, bias = self.norm.weight.float(), self.norm.bias.float()
        x = F.layer_norm(x.float(), (24,), weight, bias, self.norm.eps).to(x.dtype)
        return self.linear(x)


class _GroupNormOfFloat(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


@typed((2, 5, 8, 6))
def group_norm_of_float():
    """As in diffusion models."""
    return nn.Sequential(
        nn.Conv2d(5, 24, 3), _GroupNormOfFloat(8, 24), nn.SiLU(), nn.Conv2d(24, 9, 3)
    )


@typed(torch.arange(120, dtype=torch.uint8).reshape(1, 3, 8, 5))
class BytesToTypeOfWeight(nn.Module):
    """An image of bytes becomes what the first weight is."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 17, 3)

    def forward(self, x):
        return self.conv(x.to(self.conv.weight.dtype) / 255)


@typed((2, 24))
class TypeOfFirstParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 17)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, x):
        mask = torch.ones(x.shape, dtype=self.dtype)
        mask[:, ::3] = 0
        return self.linear(x.to(self.dtype) * mask)


@typed((2, 24), torch.tensor([[3, 0, 2], [1, 1, 0]]))
class CountsToType(nn.Module):
    """Integers and bools become what x is."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 17), nn.Linear(20, 8)

    def forward(self, x, counts):
        known = (counts != 0).to(x.dtype)
        shares = counts.to(x.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
        return self.last(torch.cat((self.first(x), shares * known), 1))


@typed((2, 24))
class ResidualInFloat(nn.Module):
    """The sum is kept in float32, as in Mamba."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))

    def forward(self, x):
        residual = x.to(torch.float32)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            residual = residual + layer(norm(residual.to(norm.weight.dtype)))
        return residual.to(x.dtype)


@typed((3, 24))
class Router(nn.Module):
    """Experts weighted by a float32 softmax of a float32 product, as in mixtures of experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(24, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(24, 17) for _ in range(4))

    def forward(self, x):
        scores = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        each = torch.stack([expert(x) for expert in self.experts], 1)
        return (each * scores[..., None].to(each.dtype)).sum(1), scores
