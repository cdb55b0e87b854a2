"""Ops and functions of somebody else: some take float32 alone."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .table import between_convolutions, between_linears, typed

# Twice, if two names import this file.
if not hasattr(torch.ops.typed_models, "swish"):
    _library = torch.library.Library("typed_models", "DEF")
    _library.define("swish(Tensor x, float beta) -> Tensor")
    _library.define("moments(Tensor x) -> (Tensor, Tensor)")
    _library.define("scaled_(Tensor(a!) x, Tensor scale) -> ()")

    def _only_float(x: Tensor) -> None:
        if x.dtype != torch.float32:
            raise RuntimeError(f"typed_models: expected float32, got {x.dtype}")

    def _swish(x: Tensor, beta: float) -> Tensor:
        _only_float(x)
        return x * torch.sigmoid(beta * x)

    def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
        _only_float(x)
        values = x.detach().numpy()
        return torch.from_numpy(values.mean(-1)), torch.from_numpy(values.std(-1))

    def _scaled(x: Tensor, scale: Tensor) -> None:
        _only_float(x)
        _only_float(scale)
        x.mul_(scale)

    _library.impl("swish", _swish, "CPU")
    _library.impl("moments", _moments, "CPU")
    _library.impl("scaled_", _scaled, "CPU")
    torch.library.register_fake("typed_models::swish", lambda x, beta: torch.empty_like(x))
    torch.library.register_fake(
        "typed_models::moments", lambda x: (x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1]))
    )
    torch.library.register_fake("typed_models::scaled_", lambda x, scale: None)

    @torch.library.custom_op("typed_models::softplus", mutates_args=())
    def _softplus(x: Tensor) -> Tensor:
        _only_float(x)
        return torch.from_numpy(np.log1p(np.exp(x.detach().numpy())))

    @_softplus.register_fake
    def _(x):
        return torch.empty_like(x)


OPS = torch.ops.typed_models


def _standardized(x):
    mean, std = OPS.moments(x)
    return (x - mean[..., None]) / (std[..., None] + 1e-3)


def _scaled_in_place(x):
    x = x.clone()
    OPS.scaled_(x, torch.linspace(0.5, 1.5, x.shape[-1]))
    return x


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class _Checked(torch.autograd.Function):
    """Takes float32 alone, as a kernel in C++ may."""

    @staticmethod
    def forward(ctx, x, scale):
        assert x.dtype == torch.float32, x.dtype
        return x * scale.float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@torch.jit.script
def _scripted(x: Tensor, scale: float) -> Tensor:
    half = x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
    return half * torch.full((1,), scale)


@torch.jit.script
def _scripted_cast(x: Tensor) -> Tensor:
    y = x.to(torch.float32)
    if y.dim() > 1:
        y = y - y.amax(-1, keepdim=True)
    return y.exp().to(x.dtype)


def _vmapped(x):
    return torch.func.vmap(lambda row: row * torch.linspace(0, 1, 24) / row.norm())(x)


def _fake_quantized(x):
    return torch.fake_quantize_per_tensor_affine(x, 0.01, 0, -512, 511)


between_linears(
    {
        "custom_op": lambda x: OPS.swish(x, 1.5),
        "custom_op_of_two_results": _standardized,
        "custom_op_in_place": _scaled_in_place,
        "custom_op_by_decorator": lambda x: OPS.softplus(x),
        "autograd_function": lambda x: _Swish.apply(x),
        "autograd_function_of_float": lambda x: _Checked.apply(x, torch.linspace(0, 1, 24)),
        "scripted": lambda x: _scripted(x, 0.7),
        "scripted_cast": lambda x: _scripted_cast(x),
        "vmapped": _vmapped,
        "fake_quantized": _fake_quantized,
    },
    *(3, 24),
)

between_convolutions(
    {
        "custom_op_of_images": lambda x: OPS.swish(x, 1.0),
        "custom_op_of_bottom": lambda x: torch.cat((x, OPS.softplus(x[:, :7])), 1),
    },
    *(2, 5, 8, 6),
)


class _Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 17)
        self.register_buffer("shift", torch.randn(17))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.dtype != self.shift.dtype:
            raise ValueError("expected the type of the shift")
        return torch.where(y > 0, y, torch.zeros(1)) + self.shift


@typed((3, 24))
def scripted_module():
    return nn.Sequential(nn.Linear(24, 24), torch.jit.script(_Scripted().eval()), nn.Linear(17, 8))


@typed((2, 5, 8, 6))
def weight_norm():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(5, 17, 3)),
        nn.LeakyReLU(0.1),
        parametrizations.weight_norm(nn.Conv2d(17, 8, 3)),
    )


@typed((3, 24))
def spectral_norm():
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(24, 17)), nn.Softplus(), nn.Linear(17, 8)
    )


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T + torch.eye(weight.shape[0])


@typed((3, 24))
def symmetric_weight():
    """Computed with a float32 factory whenever it is read."""
    linear = nn.Linear(24, 24)
    nn.utils.parametrize.register_parametrization(linear, "weight", _Symmetric())
    return nn.Sequential(linear, nn.Tanh(), nn.Linear(24, 8))


@typed((3, 24))
class Hooked(nn.Module):
    """A hook turns a layer's results to float32, and scales them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 17), nn.Linear(17, 8)
        self.first.register_forward_hook(_to_float)

    def forward(self, x):
        return self.last(self.first(x).relu())


def _to_float(module, args, result):
    return result.float() * torch.linspace(0.5, 1.5, result.shape[-1])


@typed((3, 24))
class OtherWeights(nn.Module):
    """The same layer with weights that are computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x):
        weights = {name: each * 0.5 for name, each in self.linear.named_parameters()}
        return torch.func.functional_call(self.linear, weights, self.linear(x).sigmoid())


@typed((3, 24))
class LowRank(nn.Module):
    """As in LoRA: the small product is computed in the type of its own weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 17)
        self.a, self.b = nn.Linear(24, 4, bias=False), nn.Linear(4, 17, bias=False)

    def forward(self, x):
        result = self.linear(x)
        small = self.b(self.a(x.to(self.a.weight.dtype)))
        return F.relu(result + small.to(result.dtype) * 2.0)
