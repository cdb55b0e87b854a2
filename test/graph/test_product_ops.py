"""Products of matrices in every spelling: layers where one side is a parameter, else our matmul."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked, steps
from helpers.problems import CHANNELS
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cache_folder")


class Net(nn.Module):
    """forward(*tensors) of parameters w [C, 24], b [24]."""

    def __init__(self, forward, channels=17):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(channels, 24)), nn.Parameter(torch.randn(24))
        self.heads = nn.Parameter(torch.randn(4, 6, channels))
        self.function = forward

    def forward(self, *tensors):
        return self.function(self, *tensors)


# Of x [2, 10, C]: what is computed, and the op it becomes.
WITH_PARAMETERS = {
    "matmul": (lambda s, x: x @ s.w, "aten::linear"),
    "biased": (lambda s, x: x @ s.w + s.b, "aten::linear"),
    "mm": (lambda s, x: torch.mm(x[0], s.w), "aten::linear"),
    "addmm": (lambda s, x: torch.addmm(s.b, x.flatten(0, 1), s.w), "aten::linear"),
    "addmm-scaled": (
        lambda s, x: torch.addmm(s.b, x.flatten(0, 1), s.w, beta=0.5, alpha=3),
        "aten::linear",
    ),
    "addmm-alone": (
        lambda s, x: torch.addmm(s.b * torch.inf, x.flatten(0, 1), s.w, beta=0),
        "aten::linear",
    ),
    "einsum": (lambda s, x: torch.einsum("bnc,co->bno", x, s.w), "aten::linear"),
    "einsum-dots": (lambda s, x: torch.einsum("...c,co->...o", x, s.w), "aten::linear"),
    "einsum-parameter-first": (lambda s, x: torch.einsum("co,bnc->bon", s.w, x), "aten::linear"),
    "einsum-implicit": (lambda s, x: torch.einsum("bnc, co", x, s.w), "aten::linear"),
    "einsum-heads": (lambda s, x: torch.einsum("bnc,hdc->bhnd", x, s.heads), "aten::linear"),
    "einsum-two-summed": (
        lambda s, x: torch.einsum(
            "bhnd,hdc->bnc", x[:, None, :, :6].expand(-1, 4, -1, -1), s.heads
        ),
        "aten::linear",
    ),
    "left": (lambda s, x: s.w.t() @ x.transpose(1, 2), "aten::conv1d"),
    "activated": (lambda s, x: F.relu(x @ s.w), "aten::linear + relu"),
}


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("case", WITH_PARAMETERS)
def test_layers_in_other_words(case, channels):
    forward, name = WITH_PARAMETERS[case]
    if case == "einsum-two-summed" and channels < 6:
        channels = 6
    torch.manual_seed(channels)
    net = Net(forward, channels).eval()
    x = torch.randn(2, 10, channels)
    fast = blocked(net, x)
    assert len(steps(fast, name)) == 1, fast.plan()
    assert not steps(fast, "einsum") and not steps(fast, "matmul"), fast.plan()
    assert_exact(net, fast, x)


@pytest.mark.parametrize("n", [1, 3])
def test_a_bias_is_the_layers(n):
    net = Net(lambda s, x: x @ s.w + s.b).eval()
    x = torch.randn(n, 10, 17)
    fast = blocked(net, x)
    assert len(fast.steps()) == 1, fast.plan()
    assert_exact(net, fast, x)


# Of x [2, 10, C], y [2, 12, C]; and how many steps of ATen are left.
OF_VALUES = {
    "transposed": lambda s, x, y: x @ y.transpose(1, 2),
    "bmm": lambda s, x, y: torch.bmm(x, y.mT),
    "left-transposed": lambda s, x, y: x.mT @ y[:, :10],
    "both-transposed": lambda s, x, y: x.mT @ y[..., :10].mT[:, :, :10].mT.reshape(2, 10, -1),
    "result-transposed": lambda s, x, y: (x @ y.mT).mT.contiguous(),
    "one-for-all": lambda s, x, y: x @ y[:1].mT,
    "one-for-all-left": lambda s, x, y: x[:1] @ y.mT,
    "more-dims": lambda s, x, y: x[:, None] @ y[None].mT,
    "vectors-of-views": lambda s, x, y: x[..., ::2] @ y[..., ::2].mT,
    "einsum": lambda s, x, y: torch.einsum("bic,bjc->bij", x, y),
    "einsum-order": lambda s, x, y: torch.einsum("bic,bjc->jbi", x, y),
    "einsum-no-rows": lambda s, x, y: torch.einsum("bc,bjc->bj", x[:, 0], y),
    "einsum-two-summed": lambda s, x, y: torch.einsum("bic,aic->ba", x, y[:, :10]),
    "einsum-no-batch": lambda s, x, y: torch.einsum("ic,jc->ij", x[0], y[0]),
    "einsum-dots": lambda s, x, y: torch.einsum("...ic,...jc->...ij", x, y),
    "heads": lambda s, x, y: torch.einsum(
        "bihc,bjhc->bhij", torch.stack((x, x * 2), 2), torch.stack((y, y + 1), 2)
    ),
    "baddbmm": lambda s, x, y: torch.baddbmm(y[:, :10, :1], x, y.mT, beta=2, alpha=0.5),
    "baddbmm-alone": lambda s, x, y: torch.baddbmm(y.new_empty(1), x, y.mT, beta=0, alpha=0.5),
    "linear": lambda s, x, y: F.linear(x, y[0], y[0, :, 0]),
    "linear-of-changed-weight": lambda s, x, y: F.linear(x, y[0].mul(2)),
}


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("case", OF_VALUES)
def test_products_of_values(case, channels):
    torch.manual_seed(channels)
    net = Net(OF_VALUES[case], channels).eval()
    x, y = torch.randn(2, 10, channels), torch.randn(2, 12, channels)
    fast = blocked(net, x, y)
    assert [step.implementation for step in steps(fast, "matmul")] == ["torch_blocked"], fast.plan()
    assert not steps(fast, "einsum"), fast.plan()
    assert_exact(net, fast, x, y)


@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (197, 64, 197), (33, 700, 100), (500, 31, 3)])
@pytest.mark.parametrize("transposed", ["", "left", "right", "result"])
def test_sizes(m, k, n, transposed):
    """Units of rows, parts of sums, groups of columns with a rest and without."""

    def forward(s, x, y):
        product = (x.mT if transposed == "left" else x) @ (y.mT if transposed == "right" else y)
        return product.mT * 1 if transposed == "result" else product

    x = torch.randn(3, k, m) if transposed == "left" else torch.randn(3, m, k)
    y = torch.randn(3, n, k) if transposed == "right" else torch.randn(3, k, n)
    net = Net(forward).eval()
    fast = blocked(net, x, y)
    assert len(steps(fast, "matmul")) == 1, fast.plan()
    assert_exact(net, fast, x, y)


def test_empty():
    net = Net(lambda s, x, y: x @ y.mT).eval()
    for dims in ((0, 10, 17), (2, 0, 17), (2, 10, 0)):
        x = torch.randn(dims)
        assert torch.equal(blocked(net, x, x)(x, x), net(x, x))


def test_what_is_no_product_of_matrices_stays():
    for equation in ("bic,bjc->b", "bii,bic->bc", "bic,bjd->bijcd", "bic,bic->bic"):
        x = torch.randn(2, 5, 5)
        net = Net(lambda s, x, e=equation: torch.einsum(e, x, x)).eval()
        assert_exact(net, blocked(net, x), x)


def test_integers_stay():
    net = Net(lambda s, x: x @ x.mT).eval()
    x = torch.arange(24).reshape(2, 3, 4)
    assert torch.equal(blocked(net, x)(x), net(x))


def test_attention_in_einsums():
    """A transformer's attention as it is written with einsum is attention."""

    def forward(s, x):
        q, k, v = (x * i for i in (1, 2, 3))
        scores = torch.einsum("b i d, b j d -> b i j", q, k) * 0.1
        return torch.einsum("b i j, b j d -> b i d", scores.softmax(dim=-1), v)

    net = Net(forward).eval()
    x = torch.randn(2, 10, 24)
    fast = blocked(net, x)
    assert not steps(fast, "softmax"), fast.plan()
    assert_exact(net, fast, x)
