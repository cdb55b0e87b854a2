"""Channels-last for one spatial dim: the values of contiguous tensors, and strides that stay."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked
from torch_blocked import is_contiguous_channels_last_1d, to_channels_last_1d

pytestmark = pytest.mark.any_isa


def random_rows(*dims, seed=0):
    return torch.randn(dims or (2, 6, 12), generator=torch.Generator().manual_seed(seed))


WEIGHT, DEPTHWISE = random_rows(8, 6, 3, seed=1), random_rows(6, 1, 5, seed=2)
LAYERS = {
    "conv1d": lambda x: F.conv1d(x, WEIGHT, torch.ones(8), stride=2, padding=1),
    "conv1d same": lambda x: F.conv1d(x, WEIGHT, padding="same", dilation=(2,)),
    "depthwise": lambda x: F.conv1d(x, DEPTHWISE, None, (1,), (2,), (1,), 6),
    "transposed": lambda x: F.conv_transpose1d(
        x, WEIGHT.transpose(0, 1), stride=2, output_padding=1
    ),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 2, 1),
    "max_pool1d indices": lambda x: F.max_pool1d(x, 2, return_indices=True)[1],
    "avg_pool1d": lambda x: F.avg_pool1d(x, (3,), 2, padding=1, count_include_pad=False),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 5),
    "linear": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear", align_corners=True),
    "nearest": lambda x: F.interpolate(x, 7),
    "cat channels": lambda x: torch.cat([x, x * 2], 1),
    "cat width": lambda x: torch.cat((x, x.neg()), dim=-1),
    "cat batch": lambda x: torch.concat([x, x]),
    "add": lambda x: x + x.exp(),
    "add channel": lambda x: torch.add(x, torch.arange(6.0)[:, None]),
    "div": lambda x: x / 3,
    "relu": lambda x: F.relu(x),
    "in place": lambda x: x.clone().mul_(2).relu_(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_keep_it(name):
    dense = random_rows().requires_grad_()
    rows = random_rows().requires_grad_()
    expected, output = LAYERS[name](dense), LAYERS[name](to_channels_last_1d(rows))
    assert is_contiguous_channels_last_1d(output)
    assert torch_blocked.format_of(output) == "nwc"
    torch.testing.assert_close(output, expected, check_stride=False)
    if expected.requires_grad:
        expected.square().sum().backward()
        output.square().sum().backward()
        torch.testing.assert_close(rows.grad, dense.grad, check_stride=False)


@pytest.mark.parametrize("dims", ((2, 1, 12), (2, 6, 1), (1, 1, 1), (0, 6, 12), (1, 6, 12)))
def test_corners(dims):
    """Where C or W is 1, contiguous is the same memory; what follows has channels last again."""
    rows = to_channels_last_1d(random_rows(*dims))
    n, c, w = dims
    assert rows.stride() == (w * c, 1, c)
    assert is_contiguous_channels_last_1d(rows)
    weight = random_rows(8, c, 1, seed=1)
    output = F.conv1d(rows, weight)
    assert output.stride() == (w * 8, 1, 8)
    torch.testing.assert_close(output, F.conv1d(random_rows(*dims), weight), check_stride=False)
    assert F.relu(torch.cat([output, output], 1)).shape == (n, 16, w)


def test_what_it_is():
    x = random_rows()
    rows = to_channels_last_1d(x)
    assert rows.stride() == (72, 1, 6) and torch.equal(rows, x)
    assert to_channels_last_1d(rows) is rows
    assert not is_contiguous_channels_last_1d(x)
    assert not is_contiguous_channels_last_1d(random_rows(2, 6, 12, 3))
    assert not is_contiguous_channels_last_1d(rows[:, :3])
    blocked = x.to_blocked("nCw8c")
    assert not is_contiguous_channels_last_1d(blocked)
    assert torch.equal(to_channels_last_1d(blocked), x)
    assert type(rows.sum()) is type(rows.flatten()) is type(rows.contiguous()) is torch.Tensor
    assert rows.contiguous().is_contiguous()
    assert rows.numpy().strides == (288, 4, 24)
    unbatched = F.conv1d(rows[0], WEIGHT)
    torch.testing.assert_close(unbatched, F.conv1d(x[0], WEIGHT))


def test_copies_and_files():
    rows = to_channels_last_1d(random_rows()).requires_grad_()
    again = copy.deepcopy(rows)
    assert type(again) is type(rows) and again.data_ptr() != rows.data_ptr()
    file = io.BytesIO()
    torch.save(rows, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for same in (again, loaded):
        assert same.stride() == rows.stride() and same.requires_grad
        assert torch.equal(same, rows)
    with pytest.raises(RuntimeError, match="expected a leaf"):
        copy.deepcopy(rows * 2)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(6, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.down = nn.Sequential(nn.MaxPool1d(2), nn.Upsample(scale_factor=2, mode="linear"))

    def forward(self, x):
        y = self.first(x)
        return torch.cat([self.down(y + self.second(y)), x / 2], 1)


@pytest.mark.parametrize("mode", ("train", "eval"))
def test_module(mode):
    torch.manual_seed(0)
    dense = getattr(Residual(), mode)()
    model = copy.deepcopy(dense)
    assert to_channels_last_1d(model) is model
    assert is_contiguous_channels_last_1d(model.first[0].weight)
    assert type(model.first[0].weight) is nn.Parameter
    output, expected = model(to_channels_last_1d(random_rows())), dense(random_rows())
    assert is_contiguous_channels_last_1d(output)
    torch.testing.assert_close(output, expected, check_stride=False)
    output.square().mean().backward()
    expected.square().mean().backward()
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor
        torch.testing.assert_close(ours.grad, theirs.grad, check_stride=False)
    torch.testing.assert_close(model(random_rows()), dense(random_rows()), check_stride=False)


def test_refusals():
    with pytest.raises(ValueError, match=r"expected 3 dims \[N, C, W\], got \(2, 6, 12, 1\)"):
        to_channels_last_1d(random_rows(2, 6, 12, 1))
    with pytest.raises(TypeError, match="expected a tensor or a module, got list"):
        to_channels_last_1d([random_rows()])


@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
def test_compiled(backend):
    """aot_eager refuses every subclass of Tensor in its check of custom ops' aliasing, which runs
    once: without that check (torch 2.13)."""
    model = to_channels_last_1d(
        nn.Sequential(nn.Conv1d(16, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU()).eval()
    )
    x = to_channels_last_1d(torch.randn(2, 16, 100))
    expected = model(x)
    torch._dynamo.reset()
    with torch._functorch.config.patch(check_custom_op_aliasing=False):
        result = torch.compile(model, backend=backend)(x)
    assert is_contiguous_channels_last_1d(result)
    torch.testing.assert_close(result, expected, check_stride=True)
    result.sum().backward()
    assert model[0].weight.grad.isfinite().all()
