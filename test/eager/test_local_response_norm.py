"""Local response norms beyond the rows of the table of problems: what autograd and torch.compile do
with the function, and what `optimize` takes for one."""

import pytest
import torch
from helpers.nets import Between, Op
from helpers.optimized import BY_US, assert_exact, blocked, step
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import torch_blocked as tb

pytestmark = [pytest.mark.usefixtures("cache_folder"), pytest.mark.any_isa]

WINDOW = (5, 1.5, 0.75, 0.5)


def image(*dims, **arguments):
    return torch.randn(
        dims or (2, 18, 5, 4), generator=torch.Generator().manual_seed(0), **arguments
    )


def test_dense_tensors_go_to_torch():
    x = image()
    assert torch.equal(tb.local_response_norm(x, *WINDOW), F.local_response_norm(x, *WINDOW))
    assert tb.local_response_norm(x.double(), 3).dtype == torch.float64


def test_other_types_stay_blocked():
    x = image().double()
    result = tb.local_response_norm(x.to_blocked(), *WINDOW)
    assert tb.is_blocked(result) and result.dtype == torch.float64
    torch.testing.assert_close(result.to_dense(), F.local_response_norm(x, *WINDOW))


def test_one_kernel_each_way():
    x = image().to_blocked("nChw8c").requires_grad_()
    with torch.profiler.profile() as p:
        tb.local_response_norm(x, *WINDOW).backward(x.detach())
    ran = {event.key for event in p.key_averages()}
    name = "torch_blocked::local_response_norm"
    assert {name, f"{name}_backward"} <= ran
    assert not ran & {"aten::avg_pool3d", "aten::pow", "aten::div", "aten::avg_pool3d_backward"}


def test_a_dense_gradient():
    x, gradient = image(), image() + 1
    results = []
    for input in (x, x.to_blocked()):
        input.requires_grad_()
        output = tb.local_response_norm(input, *WINDOW)
        results += torch.autograd.grad(output, input, gradient)
    torch.testing.assert_close(results[1].to_dense(), results[0])


def test_second_gradients():
    x = image()
    results = []
    for input in (x, x.to_blocked("nChw8c")):
        input.requires_grad_()
        output = tb.local_response_norm(input, *WINDOW)
        (first,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
        results += torch.autograd.grad(first.square().sum(), input)
    torch.testing.assert_close(results[1].to_dense(), results[0], rtol=1e-4, atol=1e-4)


def test_forward_mode():
    x, tangent = image(), image() + 1
    results = []
    for convert in (torch.clone, tb.to_blocked):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(convert(x), convert(tangent))
            output = forward_ad.unpack_dual(tb.local_response_norm(dual, *WINDOW))
            results.append([tb.to_dense(each) for each in output])
    torch.testing.assert_close(results[1], results[0])


def test_compiled():
    def loss(x):
        return tb.local_response_norm(x.to_blocked("nChw8c"), *WINDOW).square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = image().requires_grad_()
        value = function(x)
        results.append([value.detach(), *torch.autograd.grad(value, x)])
    torch.testing.assert_close(*results)


def test_no_window_is_refused():
    physical = image().to_blocked("nChw8c")._physical
    sentence = r"torch_blocked::local_response_norm: expected a window of 1 channel or more, got 0"
    with pytest.raises(ValueError, match=sentence):
        torch.ops.torch_blocked.local_response_norm(physical, 18, 0, 1.0, 0.75, 1.0)


def test_the_tail_stays_zero_where_zeros_are_divided():
    x = image(1, 9, 3, 2).to_blocked("nChw8c")
    result = tb.local_response_norm(x * 0, 3, 1.0, 0.75, 0.0)
    assert result.to_dense().isnan().all() and tb.tensor.tail_is_zero(result)


def mean_of_squares(x, size=5, **arguments):
    return F.avg_pool3d((x * x).unsqueeze(1), (size, 1, 1), 1, **arguments).squeeze(1)


PADDED = {"padding": (2, 0, 0)}


def in_place(x):
    divisor = mean_of_squares(x, **PADDED)
    divisor.mul_(0.1).add_(1).pow_(0.75)
    return x.div_(divisor)


# Forms of local response norms, and what is none.
WRITTEN_OUT = {
    "inverse power": lambda x: (mean_of_squares(x, **PADDED) * 0.5 + 1).pow(-0.75) * x,
    "in place": in_place,
    "root": lambda x: x / torch.sqrt(1 + mean_of_squares(x, **PADDED) / 3),
    "inverse root": lambda x: x * torch.rsqrt(mean_of_squares(x, **PADDED) + 0.5 + 0.5),
    "no power": lambda x: x / (1 + mean_of_squares(x, **PADDED)),
    "padded": lambda x: x / (
        1 + F.avg_pool3d(F.pad(x.square()[:, None], (0, 0, 0, 0, 1, 1)), (3, 1, 1), 1)[:, 0]
    ),
    "views": lambda x: x / (
        1 + F.avg_pool2d(x.flatten(2)[:, None].pow(2), (3, 1), 1, (1, 0)).view(x.shape)
    ) ** 0.6,
}  # fmt: skip
OTHERS = {
    "inverted": lambda x: (1 + mean_of_squares(x, **PADDED)) ** 0.75 / x.abs().add(1),
    "other image": lambda x: (x * 2) / (1 + mean_of_squares(x, **PADDED)),
    "mean of those there": lambda x: x / (
        1 + mean_of_squares(x, **PADDED, count_include_pad=False)
    ),
    "divisor": lambda x: x / (1 + mean_of_squares(x, **PADDED, divisor_override=3)),
    "rows": lambda x: x / (1 + F.avg_pool3d((x * x)[:, None], (1, 3, 1), 1, (0, 1, 0))[:, 0]),
    "window to one side": lambda x: x / (
        1 + F.avg_pool3d(F.pad((x * x)[:, None], (0, 0, 0, 0, 0, 2)), (3, 1, 1), 1)[:, 0]
    ),
    "ones around": lambda x: x / (
        1 + F.avg_pool3d(F.pad((x * x)[:, None], (0,) * 4 + (1, 1), value=1.0), (3, 1, 1), 1)[:, 0]
    ),
    "mean": lambda x: x / (9 + F.avg_pool3d(x[:, None], (3, 1, 1), 1, (1, 0, 0))[:, 0]),
    "cube": lambda x: x / (9 + F.avg_pool3d((x**3)[:, None], (3, 1, 1), 1, (1, 0, 0))[:, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRITTEN_OUT, *OTHERS])
def test_local_response_norms_are_found_by_what_they_compute(name):
    model = Between(Op((WRITTEN_OUT | OTHERS)[name]), 18).eval()
    x = torch.randn(2, 5, 9, 7)
    optimized = blocked(model, x)
    assert ("local_response_norm" in optimized.plan()) == (name in WRITTEN_OUT)
    assert_exact(model, optimized, x, tolerance=8)


@pytest.mark.parametrize("dims", [(2, 18, 11), (2, 18, 9, 7), (1, 18, 3, 9, 7), (3, 2, 9, 7)])
def test_local_response_norms_alone(dims):
    """Of plain and channels-last inputs, and where others read what they are made of."""
    model = nn.LocalResponseNorm(4, alpha=2.0, k=0.5).eval()
    x = torch.randn(dims)
    optimized = blocked(model, x)
    assert f" {BY_US} " in step(optimized.plan(), "local_response_norm")
    assert_exact(model, optimized, x, tolerance=8)
    if x.dim() == 4:
        assert_exact(model, optimized, x.to(memory_format=torch.channels_last), tolerance=8)
        both = Op(lambda x: (model(x), mean_of_squares(x, 2), model(model(x)))).eval()
        for ours, expected in zip(blocked(both, x)(x), both(x), strict=True):
            torch.testing.assert_close(ours, expected)
