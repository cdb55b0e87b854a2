"""The short way from an op to its kernel gives what the long way gives."""

import pytest
import torch
import torch.nn.functional as F

import torch_blocked
from torch_blocked import dispatch

aten = torch.ops.aten
DIRECT = [op for op in dispatch.DIRECT if op is not aten.detach.default]


def random_blocked(channels, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(2, channels, 3, 5, generator=generator).to(dtype).to_blocked("nChw8c")


@pytest.mark.parametrize("channels", (1, 7, 8, 17))
@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_ops_run_directly(op, channels, monkeypatch):
    """Same bits, same tail, same gradient; large tensors take the other way."""
    x = random_blocked(channels).requires_grad_()
    results = []
    for most_bytes in (1 << 20, 0):
        monkeypatch.setattr(dispatch, "DIRECT_BYTES", most_bytes)
        y = op(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert y.format == gradient.format == "nChw8c"
        assert torch_blocked.tensor.tail_is_zero(y)
        results.append((y.to_dense(), gradient.to_dense()))
    expected = op(x.detach().to_dense())
    for value, gradient in results:
        torch.testing.assert_close(value, expected)
        assert torch.equal(value, results[0][0]) and torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("mode", (torch.no_grad, torch.enable_grad, torch.inference_mode))
def test_results_are_as_the_mode_makes_them(mode):
    x = random_blocked(17).requires_grad_()
    with mode():
        y = x.relu()
        dense = x.to_dense().relu()
    assert type(y) is torch_blocked.BlockedTensor
    assert y.requires_grad == dense.requires_grad and y.is_inference() == dense.is_inference()
    assert y.stride() == dense.stride() and y.device == dense.device
    assert torch._C._dispatch_keys(y).has(torch._C.DispatchKey.Python)


def test_dtypes_follow_the_op():
    x = random_blocked(17, torch.int32)
    assert x.sqrt().dtype == torch.float32 and x.abs().dtype == torch.int32
    assert torch.equal(x.sqrt().to_dense(), x.to_dense().sqrt())


def test_detach_shares_memory_and_not_the_graph():
    x = random_blocked(17).requires_grad_()
    y = x.relu()
    detached = y.detach()
    assert not detached.requires_grad
    detached.mul_(2)
    assert torch.equal(y.to_dense(), detached.to_dense())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_traced_tensors_keep_to_the_handlers():
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(random_blocked(17))
        y = fake.relu()
    assert type(y._physical) is torch._subclasses.FakeTensor and y.shape == (2, 17, 3, 5)


@pytest.mark.parametrize("dims", ((), (2,), (2, 3, 8), (1, 1, 1, 1, 1, 1, 8)))
def test_what_is_no_physical_tensor_is_refused(dims):
    with pytest.raises(ValueError, match="torch_blocked::BlockedTensor: expected a physical"):
        torch_blocked.BlockedTensor(torch.zeros(dims), 3)


INFERENCE = {
    "conv2d": lambda x: F.conv2d(x, torch.ones(9, 17, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(17, 9, 2, 2), stride=2),
    "batch_norm": lambda x: F.batch_norm(x, torch.ones(17), torch.full((17,), 2.0)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "dropout": lambda x: F.dropout(x, training=False),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "group_norm": lambda x: F.group_norm(x, 1),
    "softmax": lambda x: F.softmax(x, 1),
    "cat": lambda x: torch.cat((x, x), 1),
    "chunk": lambda x: x.chunk(2, 1)[0] + 1,
    "silu": lambda x: F.silu(x, inplace=True),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_mode_does_as_no_grad(name):
    """There, composite ops reach the dispatch whole."""
    results = []
    for mode in (torch.no_grad, torch.inference_mode):
        x = torch.arange(2 * 17 * 6 * 6.0).view(2, 17, 6, 6).sub(500)
        with mode(), torch_blocked.profile() as p:
            results.append((INFERENCE[name](x.to_blocked("nChw8c")), p))
    (expected, before), (result, after) = results
    assert (result.format, after.fallbacks) == (expected.format, before.fallbacks)
    assert after.fallbacks == 0
    assert torch.equal(result.to_dense(), expected.to_dense())


VIEWS = {
    "slice": lambda x: x[:, :3],
    "select": lambda x: x[0],
    "view": lambda x: x.view(2, -1),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "flatten": lambda x: x.flatten(1),
    "unbind": lambda x: x.unbind(1)[16],
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(2, 1)[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_inference_mode_views_what_was_made_outside(name):
    x = random_blocked(17)
    with torch.inference_mode():
        view = VIEWS[name](x)
        result = view + 0
    expected = VIEWS[name](x.to_dense())
    assert torch.equal(result.to_dense() if torch_blocked.is_blocked(result) else result, expected)
    assert not view.is_inference()


def test_inference_mode_keeps_lazy_conjugates():
    """Inside of an op of others: of fft_hfftn, one of ATen's, a conjugate is the last step."""
    x = random_blocked(17)
    with torch.inference_mode():
        assert torch.equal(torch.fft.hfftn(x), torch.fft.hfftn(x.to_dense()))
