"""Attention in torch_blocked.optimize: the op, and what is written out, as one step."""

import math

import pytest
import torch
from helpers.optimized import blocked
from helpers.problems import threads
from torch import nn
from torch.nn import functional as F

from torch_blocked.capture import capture

pytestmark = pytest.mark.usefixtures("cache_folder")

# B, H, T, S, D, E; H = 0: tensors of three dims.
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 5, 3, 9),
    (1, 2, 15, 16, 16, 8),
    (2, 1, 29, 33, 17, 33),
    (1, 3, 197, 197, 64, 64),
    (1, 2, 20, 600, 40, 40),
    (3, 0, 50, 49, 32, 24),
]


class Attention(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v, *bias):
        return self.function(q, k, v, *bias)


def turned(x):
    return x.permute(*range(x.dim() - 2), -1, -2)


FORMS = {
    "op": F.scaled_dot_product_attention,
    "op with a scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "matmul": lambda q, k, v: (0.3 * q @ k.transpose(-1, -2)).softmax(-1) @ v,
    "mul": lambda q, k, v: ((q @ k.mT) * 0.3).softmax(dim=-1) @ v,
    "values on the left": lambda q, k, v: (v.mT @ (q @ k.mT).softmax(-1).mT).mT,
    "permuted": lambda q, k, v: turned(turned(v) @ turned((0.3 * q @ turned(k)).softmax(-1))),
    "div": lambda q, k, v: F.softmax(q @ k.mT / math.sqrt(q.shape[-1]), v.dim() - 1) @ v,
}


def heads(size, seed=0):
    """query, key and value with the strides that a layer for all three leaves, or ordinary ones."""
    b, h, t, s, d, e = size
    generator = torch.Generator().manual_seed(seed)
    sizes = [(b, n, max(h, 1), c) for n, c in ((t, d), (s, d), (s, e))]
    made = [torch.randn(each, generator=generator).transpose(1, 2) for each in sizes]
    return [x if h else x.squeeze(1) for x in made]


def close(result, own, expected):
    error = (result - expected).abs().max()
    assert error <= 2 * (own - expected).abs().max() + 2e-6 * expected.abs().max()


def is_one_step(optimized):
    rows = [line for line in optimized.plan().splitlines() if "torch_blocked  " in line]
    ops = ("aten::scaled_dot_product_attention", "aten::matmul")
    return sum(line.startswith(ops) for line in rows) == 1 and "softmax" not in optimized.plan()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_attention(form, size):
    model, inputs = Attention(FORMS[form]).eval(), heads(size)
    optimized = blocked(model, *inputs)
    assert is_one_step(optimized)
    for seed in (0, 1):
        inputs = heads(size, seed)
        result = optimized(*inputs)
        close(result, model(*inputs), model(*(x.double() for x in inputs)))
        assert torch.equal(result, optimized(*inputs))
        with threads(1):
            assert torch.equal(result, optimized(*inputs))
    inputs[1].select(-2, 0)[..., :1] = torch.nan
    if size[3] > 1:  # ATen's op makes a zero of the one score that is NaN
        assert torch.equal(optimized(*inputs).isnan(), model(*inputs).isnan())


@pytest.mark.parametrize("dims", [(1, 3, 20, 33), (3, 20, 33), (20, 33), (2, 1, 20, 33), (1, 33)])
@torch.no_grad()
def test_bias_of_scores(dims):
    def function(q, k, v, bias):
        return ((q @ k.mT) * 0.25 + bias).softmax(-1) @ v

    model = Attention(function).eval()
    inputs = [*heads((2, 3, 20, 33, 16, 16)), torch.randn(dims)]
    optimized = blocked(model, *inputs)
    assert is_one_step(optimized)
    inputs[3][..., 5] = -torch.inf  # hidden
    close(optimized(*inputs), model(*inputs), model(*(x.double() for x in inputs)))


# All but the first key hidden from the first query, and so on: a mask that shows each query some.
SEEN = torch.ones(20, 33, dtype=torch.bool).tril()
MASKS = {
    "numbers": torch.randn(20, 33),
    "infinities": torch.zeros(20, 33).masked_fill(~SEEN, -torch.inf),
    "per head": torch.randn(1, 3, 20, 33),
    "bool": SEEN,
    "bool per head": torch.stack([SEEN, SEEN.flip(0), ~SEEN.flip(1)]),
}


@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_a_constant_mask(name):
    def function(q, k, v):
        mask = MASKS[name] if MASKS[name].dtype == torch.bool else MASKS[name].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask)

    model = Attention(function).eval()
    inputs = heads((2, 3, 20, 33, 16, 16))
    optimized = blocked(model, *inputs)
    assert is_one_step(optimized)
    close(optimized(*inputs), model(*inputs), model(*(x.double() for x in inputs)))


@pytest.mark.parametrize("queries, keys", ((20, 20), (7, 33), (33, 7)))
@torch.no_grad()
def test_causal(queries, keys):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Attention(function).eval()
    inputs = heads((2, 3, queries, keys, 16, 9))
    optimized = blocked(model, *inputs)
    assert is_one_step(optimized)
    close(optimized(*inputs), model(*inputs), model(*(x.double() for x in inputs)))


@pytest.mark.parametrize(
    "form, dims", [*((form, (2, 3, 4)) for form in FORMS), ("op", (1, 2, 1, 3, 2))]
)
@torch.no_grad()
def test_more_dims(form, dims):
    """Heads and windows, as of images cut into parts; results of the same strides as ATen's may be
    viewed."""

    def function(q, k, v):
        return FORMS[form](q, k, v).flatten(0, -3) + 1

    model = Attention(function).eval()
    shapes = ((20, 16), (33, 16), (33, 9))
    inputs = [torch.randn(*dims[1:], *shape, dims[0]).movedim(-1, 0) for shape in shapes]
    optimized = blocked(model, *inputs)
    assert is_one_step(optimized)
    close(optimized(*inputs), model(*inputs), model(*(x.double() for x in inputs)))


def windows(q, k, v):
    """Two windows of three heads: a bias for each head, a mask for each window."""
    scores = q * 0.25 @ k.mT + HEAD_BIAS.to(q.dtype)
    scores = scores.view(-1, 2, 3, 20, 33) + WINDOW_MASK.to(q.dtype)[None, :, None]
    return scores.view(-1, 3, 20, 33).softmax(-1) @ v


def cosines(q, k, v):
    """A factor for each head between two biases, and a number."""
    scores = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT + HEAD_BIAS.to(q.dtype)) / 0.7
    return (HEAD_FACTOR.to(q.dtype) * scores + HEAD_BIAS.to(q.dtype)).softmax(-1) @ v


HEAD_BIAS, WINDOW_MASK = torch.randn(3, 20, 33), torch.randn(2, 20, 33)
HEAD_FACTOR = torch.tensor([0.5, 3, -2]).view(3, 1, 1)


@pytest.mark.parametrize("function", (windows, cosines))
@torch.no_grad()
def test_what_stands_between_product_and_softmax(function):
    model = Attention(function).eval()
    inputs = heads((4, 3, 20, 33, 16, 16))
    optimized = blocked(model, *inputs)
    assert is_one_step(optimized)
    close(optimized(*inputs), model(*inputs), model(*(x.double() for x in inputs)))


def hidden(q, k, v):
    mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
    mask[0] = -torch.inf
    return F.scaled_dot_product_attention(q, k, v, mask)


def read_twice(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True)


# What is ATen's: other formulas, rows that a mask hides whole, heads that broadcast.
OTHERS = {
    "a hidden row": hidden,
    "over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "read twice": read_twice,
    "one head of keys": lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v,
    "scaled after the bias": lambda q, k, v: ((q @ k.mT + 1) * 0.5).softmax(-1) @ v,
    "less than zero": lambda q, k, v: (q @ k.mT * -0.5).softmax(-1) @ v,
    "log": lambda q, k, v: (q @ k.mT).log_softmax(-1) @ v,
    "windows with a computed bias": lambda q, k, v: (
        ((q @ k.mT).view(1, 2, 3, 20, 20) + v.sum()[None, None]).view(2, 3, 20, 20).softmax(-1) @ v
    ),
    "empty": lambda q, k, v: (q[..., :0, :] @ k.mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_what_is_left_as_written(name):
    model, inputs = Attention(OTHERS[name]).eval(), heads((2, 3, 20, 20, 16, 16))
    optimized = blocked(model, *inputs)
    assert not is_one_step(optimized)
    torch.testing.assert_close(optimized(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout, is_random", ((0.0, False), (0.5, True)))
def test_only_dropout_draws_numbers(dropout, is_random):
    """The op's tag says that it may; what it is told decides whether results are compared."""

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    captured = capture(Attention(attention).eval(), tuple(torch.randn(3, 1, 2, 5, 8)))
    assert captured.is_random() == is_random


def test_what_is_all_but_hidden_weighs_nothing():
    """Powers below the least normal number are 0: Intel's cores multiply denormal ones slowly."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = nn.Buffer(torch.tensor([0.0] * 20 + [-100.0] * 29))

        def forward(self, q, k, v):
            return (q @ k.mT + self.mask.expand(49, 49)).softmax(-1) @ v

    q = torch.zeros(2, 3, 49, 32)
    v = torch.ones(2, 3, 49, 32)
    v[:, :, :20] = 0
    fast = blocked(Masked().eval(), q, q, v)
    assert torch.equal(fast(q, q, v), torch.zeros_like(v))
