"""A trace of a module, and its script, have the plan of the module: the same implementations."""

import pytest
import torch
from helpers import networks as models
from helpers.draws import crossed
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb

pytestmark = [
    pytest.mark.any_isa,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Of(nn.Module):
    """A function of some modules and an input."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x):
        return self.function(x, *self.parts)


def attention(x, qkv, out):
    n, length, c = x.shape
    q, k, v = qkv(x).reshape(n, length, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (q @ k.transpose(-2, -1) * (c // 4) ** -0.5).softmax(-1)
    return out((weights @ v).transpose(1, 2).reshape(n, length, c))


def fused_attention(x, qkv, out):
    n, length, c = x.shape
    q, k, v = qkv(x).view(n, length, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
    return out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, c))


def gated(x, conv, narrow, wide):
    x = conv(x)
    return x * wide(F.silu(narrow(x.mean((2, 3), keepdim=True)))).sigmoid()


def shuffled(x, first, second):
    x = first(x)
    n, c, h, w = x.shape
    return second(x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w))


def padded(x, conv):
    return conv(F.pad(x, (0, 1, 0, 1 + -x.shape[2] % 2)))


def decoded(x, first, second):
    y = F.max_pool2d(first(x), 2)
    y = F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)
    return second(torch.cat([x, y], 1))


def in_order(x, first, norm, second):
    x = F.silu(norm(first(x).contiguous())).contiguous()
    return second(x.contiguous()).contiguous().flatten(1)


def classified(x, conv, linear):
    x = torch.flatten(F.adaptive_avg_pool2d(conv(x), (1, 1)), 1)
    return linear(F.dropout(x, 0.2, False))


def of_tokens(x, embed, norm, head):
    x = embed(x).flatten(2).transpose(1, 2)
    return head(norm(x + x[:, : x.size(1)].type_as(x).to(torch.float32))[:, 0])


def products(x, weight, bias):
    rows = x.flatten(0, 1)
    return torch.addmm(bias.weight[0], rows, weight.weight.t()).relu() + F.linear(
        rows, weight.weight
    )


def block():
    return nn.Sequential(
        nn.Conv2d(16, 64, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU6(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU6(),
        nn.Conv2d(64, 16, 1, bias=False),
        nn.BatchNorm2d(16),
    )


def normalized():
    parts = nn.GroupNorm(4, 16), nn.ReLU(), nn.InstanceNorm2d(16, affine=True), nn.PReLU(16)
    return nn.Sequential(nn.Conv2d(8, 16, 3), *parts, nn.PixelShuffle(2), nn.AvgPool2d(2))


NETS = {
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 16, 5, padding=2), nn.BatchNorm1d(16), nn.GELU(), nn.Conv1d(16, 16, 3)
        ),
        (1, 3, 64),
    ),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3)),
        (1, 3, 16, 16),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU()),
        (1, 3, 8, 8, 8),
    ),
    "padded by a word": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding="same"), nn.BatchNorm2d(16), nn.SiLU()),
        (1, 3, 16, 16),
    ),
    "reflected": (lambda: nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), (1, 3, 16, 16)),
    "strided and dilated": (lambda: nn.Conv2d(8, 16, 3, 2, 2, 2), (1, 8, 16, 16)),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 32, 3, groups=4), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, groups=32)
        ),
        (1, 16, 16, 16),
    ),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 16, 4, 2, 1), (1, 8, 32)),
    "transposed2d": (
        lambda: nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1, 1), nn.ReLU()),
        (1, 8, 8, 8),
    ),
    "transposed3d": (lambda: nn.ConvTranspose3d(8, 16, 2, 2), (1, 8, 4, 4, 4)),
    "lstm": (lambda: nn.LSTM(16, 24, 2, bidirectional=True, batch_first=True), (2, 10, 16)),
    "gru": (lambda: nn.GRU(16, 24), (10, 2, 16)),
    "attention": (lambda: Of(attention, nn.Linear(32, 96), nn.Linear(32, 32)), (2, 16, 32)),
    "fused attention": (
        lambda: Of(fused_attention, nn.Linear(32, 96), nn.Linear(32, 32)),
        (2, 16, 32),
    ),
    "mobilenet": (lambda: Of(lambda x, f: x + f(x), block()), (1, 16, 16, 16)),
    "gated": (
        lambda: Of(gated, nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)),
        (1, 16, 16, 16),
    ),
    "shuffled": (
        lambda: Of(shuffled, nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 1)),
        (1, 16, 16, 16),
    ),
    "padded": (lambda: Of(padded, nn.Conv2d(3, 8, 3, 2)), (1, 3, 15, 16)),
    "decoded": (
        lambda: Of(decoded, nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 3)),
        (1, 8, 16, 16),
    ),
    "in order": (
        lambda: Of(in_order, nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)),
        (1, 8, 16, 16),
    ),
    "classified": (lambda: Of(classified, nn.Conv2d(3, 8, 3), nn.Linear(8, 5)), (1, 3, 16, 16)),
    "tokens": (
        lambda: Of(of_tokens, nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.Linear(8, 4)),
        (1, 3, 32, 32),
    ),
    "products": (lambda: Of(products, nn.Linear(32, 16), nn.Linear(16, 1)), (2, 8, 32)),
    "norms": (normalized, (1, 8, 16, 16)),
    "resnet18": (lambda: models.build_model("resnet18")[0], (1, 3, 64, 64)),
}
FORMS = {
    "traced": lambda model, x: torch.jit.trace(model, x),
    "frozen": lambda model, x: torch.jit.freeze(torch.jit.trace(model, x)),
    "in a module": lambda model, x: nn.Sequential(torch.jit.trace(model, x)).eval(),
}


def implementations(model, x):
    fast = tb.optimize(model, x, tune=False)
    assert fast.choice == "blocked"
    return [step.implementation for step in fast.steps()], fast(x)


@torch.no_grad()
@pytest.mark.parametrize(("name", "form"), crossed(2, NETS, FORMS))
def test_a_trace_has_the_plan_of_its_module(name, form):
    make, dims = NETS[name]
    model, x = make().eval(), torch.randn(dims)
    expected, result = implementations(model, x)
    other = FORMS[form](model, x)
    for _ in range(3):
        other(x)  # TorchScript writes its graph anew after the first runs
    got, same = implementations(other, x)
    assert got == expected
    torch.testing.assert_close(same, result, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["conv1d", "conv3d", "grouped", "transposed2d", "norms"])
def test_a_script_has_the_plan_of_its_module(name):
    make, dims = NETS[name]
    model, x = make().eval(), torch.randn(dims)
    assert implementations(torch.jit.script(model), x)[0] == implementations(model, x)[0]


class Asking(nn.Module):
    """A script asks ops how its tensors are made."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.LocalResponseNorm(5)

    def forward(self, x):
        y = self.norm(self.conv(x))
        if y.numel() > 4096 and y.is_contiguous() and torch.is_floating_point(y):
            y = y * 2
        return y.relu() / y.numel() + y.dim() * y.stride(0) - torch.numel(x)


@torch.no_grad()
def test_a_script_may_ask_how_a_tensor_is_made():
    model = torch.jit.script(Asking().eval())
    fast = tb.optimize(model, torch.randn(1, 3, 16, 16))
    assert fast.choice == "blocked"
    for dims in ((1, 3, 16, 16), (1, 3, 32, 32), (2, 3, 8, 9)):
        x = torch.randn(dims)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


MOVES = {"view", "permute", "select", "transpose", "reshape", "unflatten", "unsqueeze", "squeeze"}


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_layers_of_transformers_that_a_trace_calls_as_one(norm_first, activation):
    """The trace calls ATen's fused layer, whose parts our kernels run as those of the module."""
    model = nn.TransformerEncoderLayer(
        32, 4, 64, batch_first=True, norm_first=norm_first, activation=activation
    ).eval()
    x = torch.randn(2, 16, 32)
    fast = tb.optimize(torch.jit.trace(model, x), x, tune=False)
    assert all("_fwd" not in step.op and "native" not in step.op for step in fast.steps())
    by_aten = {each.op for each in fast.steps() if each.implementation == "aten"}
    assert by_aten <= {f"aten::{each}" for each in MOVES}
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_that_a_trace_calls_as_one():
    parts = nn.MultiheadAttention(32, 4, batch_first=True)
    model = Of(lambda x, layer: layer(x, x, x, need_weights=False)[0], parts).eval()
    x = torch.randn(2, 16, 32)
    fast = tb.optimize(torch.jit.trace(model, x), x, tune=False)
    assert all("native" not in step.op for step in fast.steps())
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
