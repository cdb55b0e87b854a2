"""Intel Extension for PyTorch, "Channels Last": each promise of the page, shown."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked as tb
from torch_blocked import Descriptor

X = (1, 10, 32, 32)


@pytest.fixture(scope="module")
def conv():
    return nn.Conv2d(10, 20, 1).requires_grad_(False)


def test_the_example_stays_blocked(conv):
    x = torch.randn(X)
    with tb.profile() as p:
        y = conv(x.to_blocked("nChw16c"))
    assert y.format == "nChw16c" and y.physical_shape == (1, 2, 32, 32, 16)
    assert p.reorders == 1 and p.fallbacks == 0
    torch.testing.assert_close(y.to_dense(), conv(x), rtol=1e-4, atol=1e-5)


def test_weights_are_prepacked():
    layer = nn.Conv2d(10, 20, 1)
    x = torch.randn(X).to_blocked("nChw16c")
    tb.prepack(layer, x)
    with tb.profile() as p, torch.no_grad():
        layer(x)
    assert p.packs == 0


def test_one_conversion_for_a_chain():
    chain = nn.Sequential(nn.Conv2d(10, 20, 1), nn.ReLU(), nn.Conv2d(20, 10, 1))
    with tb.profile() as p, torch.no_grad():
        chain(torch.randn(X).to_blocked("nChw16c"))
    assert p.reorders == 1


def test_an_unsupported_op_makes_its_dense_copy_itself(conv):
    y = conv(torch.randn(X).to_blocked("nChw16c"))
    with tb.profile() as p:
        values = y.sort(1).values
    assert p.fallbacks == 1 and torch.equal(values, y.to_dense().sort(1).values)


def test_a_fallback_is_not_silent(conv):
    y = conv(torch.randn(X).to_blocked("nChw16c"))
    with tb.strict(), pytest.raises(NotImplementedError, match="sort"):
        y.sort(1)


@pytest.mark.parametrize("dim", (0, 1, 2, (0, 2, 3), -1))
def test_sums_over_dims_need_no_dense_copy(dim):
    x = torch.randn(2, 17, 4, 4)
    y = x.to_blocked("nChw8c")
    with tb.profile() as p:
        result = y.sum(dim)
    assert p.fallbacks == 0
    torch.testing.assert_close(
        result.to_dense() if tb.is_blocked(result) else result, x.sum(dim), rtol=1e-4, atol=1e-5
    )


def test_a_format_is_sizes_and_strides():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert tb.format_of(x) == "nhwc" and x.stride() == (60, 1, 15, 3)
    assert Descriptor.of(x) == Descriptor((2, 3, 4, 5), "f32", strides=(60, 1, 15, 3))


def test_creating_converting_and_checking():
    """torch.empty, .to, .contiguous and .is_contiguous, of blocked tensors with a tag."""
    y = tb.empty(2, 17, 4, 4, format="nChw8c")
    assert y.is_contiguous(memory_format="nChw8c")
    assert y.to(memory_format="nChw16c").format == "nChw16c"
    assert tb.format_of(y.contiguous(memory_format=torch.channels_last)) == "nhwc"
    with pytest.raises(TypeError):
        torch.empty(2, 17, 4, 4, memory_format="nChw8c")  # torch's own take no string


def test_a_model_in_channels_last_takes_blocked_tensors():
    model = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert model(torch.randn(1, 16, 8, 8).to_blocked("nChw8c")).format == "nChw8c"


def test_where_a_model_loses_channels_last():
    class Loses(nn.Module):
        def forward(self, x):
            return x.flatten(2).reshape(x.shape).contiguous()

    x = torch.randn(1, 16, 8, 8).to(memory_format=torch.channels_last)
    assert tb.channels_last_losses(Loses(), x)
    assert not tb.channels_last_losses(nn.ReLU(), x)


def test_formats_are_asked_for():
    """`any` for all three, then queries; NHWC by tag or by strides, dims in NCHW order."""
    layer, x = nn.Conv2d(16, 32, 3), torch.randn(1, 16, 8, 8)
    wanted = tb.wanted_formats(layer, x, "onednn")
    assert wanted.src.dims() == (1, 16, 8, 8) and wanted.weights.dims() == (32, 16, 3, 3)
    by_strides = Descriptor(x.shape, "f32", strides=(1024, 1, 128, 16))
    assert by_strides == Descriptor(x.shape, "f32", "nhwc")


# --- one spatial dim


def test_to_channels_last_1d():
    x = tb.to_channels_last_1d(torch.randn(2, 3, 4))
    assert x.stride() == (12, 1, 3) and tb.is_contiguous_channels_last_1d(x)
    assert tb.to_channels_last_1d(torch.randn(2, 1, 8)).stride() == (8, 1, 1)


def test_the_model_of_the_page():
    model = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)).eval()
    x = torch.randn(2, 3, 4)
    expected = model(x)
    y = tb.to_channels_last_1d(model)(tb.to_channels_last_1d(x))
    assert tb.is_contiguous_channels_last_1d(y)
    torch.testing.assert_close(y, expected, check_stride=False)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: F.max_pool1d(x, 2),
        lambda x: torch.cat([x, x], 1),
        lambda x: x + x,
        lambda x: x / (x.abs() + 1),
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    ],
    ids=("max_pool", "concat", "add", "div", "linear", "nearest"),
)
def test_ops_of_the_page(op):
    assert tb.is_contiguous_channels_last_1d(op(tb.to_channels_last_1d(torch.randn(2, 6, 8))))
