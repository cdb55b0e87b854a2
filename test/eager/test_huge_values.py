"""Values at the ends of float32's range: what ATen computes in float64, or divides before it sums,
is not to overflow here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked

pytestmark = pytest.mark.any_isa

CHANNELS, SIZE = 17, (9, 11)
LARGE = [1e17, 1e19, 1e20, 1e30, 1e36]


def scaled(scale, mean=0.0, channels=CHANNELS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, *SIZE, generator=generator).clamp(-3, 3)
    return (scale * (x + mean)).to(dtype)


def weight_and_bias():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(CHANNELS, generator=generator) + 0.5, torch.randn(
        CHANNELS, generator=generator
    )


NORMS = {
    "batch norm": lambda x: F.batch_norm(x, None, None, *weight_and_bias(), training=True),
    "instance norm": F.instance_norm,
    "group norm": lambda x: F.group_norm(x, 1, *weight_and_bias()),
    "group norm of channels": lambda x: F.group_norm(x, CHANNELS, *weight_and_bias()),
    "layer norm": lambda x: F.layer_norm(x, [CHANNELS, *SIZE]),
    "channels' layer norm": lambda x: F.layer_norm(x.movedim(1, -1), [CHANNELS]).movedim(-1, 1),
    "local response norm": lambda x: F.local_response_norm(x, 5),
    "std": lambda x: x.std((2, 3), keepdim=True),
    "std over channels": lambda x: x.std(1, keepdim=True),
    "std over all": lambda x: x.std((0, 1, 2, 3), keepdim=True),
    "var over channels": lambda x: x.var((1, 2), keepdim=True),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean over channels": lambda x: x.mean(1, keepdim=True),
    "norm": lambda x: x.norm(dim=(2, 3), keepdim=True),
    "norm over channels": lambda x: x.norm(dim=1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True),
    "pooled": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "pooled to one": lambda x: F.adaptive_avg_pool2d(x, 1),
}


ONE_VALUE = ["mean", "pooled to one", "norm", "channels' layer norm", "batch norm"]


def close(result, expected, scale=1e-5):
    assert torch.equal(result.isfinite(), expected.isfinite()), "not finite elsewhere"
    assert torch.equal(result.isnan(), expected.isnan())
    finite = expected.isfinite()
    infinite = ~finite & ~expected.isnan()
    assert torch.equal(result[infinite], expected[infinite])
    if finite.any():
        # In float64: the bound may be no float32.
        apart = (result[finite].double() - expected[finite].double()).abs().max()
        assert apart <= scale * expected[finite].double().abs().max() + 1e-45


@pytest.mark.parametrize("scale", LARGE)
@pytest.mark.parametrize("name", NORMS)
def test_large_values(name, scale):
    x, f = scaled(scale), NORMS[name]
    close(f(x.to_blocked("nChw8c")).to_dense(), f(x), 2e-5)


# ATen has no local response norm of bfloat16.
@pytest.mark.parametrize("name", [name for name in NORMS if "local" not in name])
def test_large_values_of_bfloat16(name):
    x, f = scaled(1e20, dtype=torch.bfloat16), NORMS[name]
    close(f(x.to_blocked("nChw16c")).to_dense().float(), f(x).float(), 2e-2)


@pytest.mark.parametrize("scale", LARGE)
@pytest.mark.parametrize("name", NORMS)
def test_large_values_optimized(name, scale):
    class Model(nn.Module):
        def forward(self, x):
            return NORMS[name](x + 0)

    x = scaled(scale)
    fast = torch_blocked.optimize(Model().eval(), x, verify=False, tune=False)
    with torch.no_grad():
        close(fast(x), Model()(x), 2e-5)
        close(fast(x.to_blocked("nChw16c")), Model()(x), 2e-5)


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-30, 1e-20])
@pytest.mark.parametrize("name", NORMS)
def test_small_values(name, scale):
    x, f = scaled(scale), NORMS[name]
    close(f(x.to_blocked("nChw8c")).to_dense(), f(x), 1e-4 if scale > 1e-38 else 1e-2)


@pytest.mark.parametrize("scale", [1.0, 1e18, 1e25])
@pytest.mark.parametrize("name", [name for name in NORMS if "norm" in name and "local" not in name])
def test_a_mean_far_from_zero(name, scale):
    """Whose squares cancel: as good as ATen in float32, both against float64."""
    x, f = scaled(scale, mean=100.0), NORMS[name]
    if scale > 1e17:
        close(f(x.to_blocked()).to_dense(), f(x))  # zeros, or infinities
        return
    weight, bias = weight_and_bias()
    exact = {
        "batch norm": lambda x: F.batch_norm(
            x, None, None, weight.double(), bias.double(), training=True
        ),
        "group norm": lambda x: F.group_norm(x, 1, weight.double(), bias.double()),
        "group norm of channels": lambda x: F.group_norm(
            x, CHANNELS, weight.double(), bias.double()
        ),
    }.get(name, f)(x.double())
    error = (f(x.to_blocked()).to_dense() - exact).abs().max()
    assert error <= 2 * (f(x) - exact).abs().max() + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("name", ["batch norm", "instance norm", "group norm"])
def test_gradients_at_large_values(name):
    f, gradients = NORMS[name], []
    for blocks in (False, True):
        leaf = scaled(1e20).requires_grad_()
        y = f(leaf.to_blocked("nChw8c")).to_dense() if blocks else f(leaf)
        y.backward(scaled(1.0))
        gradients.append(leaf.grad)
    close(gradients[1], gradients[0], 1e-4)


def test_running_statistics_of_large_values():
    x, results = scaled(1e20), []
    for blocks in (False, True):
        norm = nn.BatchNorm2d(CHANNELS).train()
        norm(x.to_blocked() if blocks else x)
        results.append((norm.running_mean, norm.running_var))
    close(results[1][0], results[0][0])
    assert torch.equal(results[1][1].isinf(), results[0][1].isinf())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38, -3e38])
@pytest.mark.parametrize("name", ONE_VALUE)
def test_one_value_that_no_sum_takes(name, value):
    """Among finite ones: the other rows are as ever, and sums are infinite where ATen's are."""
    x, f = scaled(1.0), NORMS[name]
    x[0, 3, 4, 5] = value
    close(f(x.to_blocked("nChw8c")).to_dense(), f(x), 1e-5)

    class Model(nn.Module):
        def forward(self, x):
            return f(x + 0)

    fast = torch_blocked.optimize(Model().eval(), torch.randn(2, CHANNELS, *SIZE), verify=False)
    with torch.no_grad():
        close(fast(x), f(x), 1e-5)
