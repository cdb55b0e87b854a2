"""`any` as a question: which formats a module wants."""

import pytest
import torch
from helpers.implementations import forced
from torch import nn

import torch_blocked as tb
from torch_blocked import _C, Descriptor, Memory, wanted_formats

NAMES = _C.implementations()["convolution"]


def blocked_weights(conv, x, implementation):
    """The weights in the format that is wanted, as a memory with oneDNN's dims."""
    wanted = wanted_formats(conv, x, implementation)
    return wanted, Memory.of(conv.weight.detach()).reorder_to(wanted.weights)


def test_the_choice_is_the_one_that_runs():
    for conv, dims in (
        (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 28, 28)),
        (nn.Conv2d(32, 32, 3, groups=32), (1, 32, 14, 14)),
        (nn.Conv2d(3, 16, 7, stride=2), (1, 3, 32, 32)),
        (nn.Conv1d(16, 24, 3, padding="same"), (2, 16, 20)),
        (nn.ConvTranspose2d(16, 8, 2, stride=2), (1, 16, 7, 7)),
        (nn.Conv3d(16, 16, 1), (1, 16, 3, 4, 5)),
    ):
        x = torch.randn(dims)
        wanted = wanted_formats(conv, x)
        assert wanted.implementation in NAMES
        with torch.no_grad():
            blocked = tb.to_format(x, wanted.src.tag())
            assert Descriptor.of(blocked) == wanted.src
            y = conv(blocked)
            if tb.is_blocked(blocked):
                assert _C.last_implementation("convolution") == wanted.implementation
            assert Descriptor.of(y).dims() == wanted.dst.dims() == tuple(conv(x).shape)


def test_onednn_answers_any():
    conv, x = nn.Conv2d(64, 64, 3, padding=1), torch.randn(1, 64, 28, 28)
    wanted, weights = blocked_weights(conv, x, "onednn")
    assert "ref" not in wanted.implementation
    assert wanted.src.dims() == x.shape and wanted.dst.dims() == (1, 64, 28, 28)
    assert wanted.weights.inner_nblks() >= 1 and Descriptor.of(conv.weight) != wanted.weights
    assert torch.equal(
        weights.reorder_to(Descriptor.of(conv.weight)).tensor(), conv.weight.detach()
    )


@pytest.mark.parametrize(
    "conv, dims",
    [
        (nn.Conv2d(16, 32, 3, groups=2), (2, 16, 8, 3, 3)),
        (nn.ConvTranspose2d(16, 32, 3), (32, 16, 3, 3)),
        (nn.Conv1d(16, 32, 3), (32, 16, 3)),
    ],
)
def test_weights_have_the_dims_of_onednn(conv, dims):
    x = torch.randn(1, 16, *(9,) * (conv.weight.dim() - 2))
    for name in ("onednn", "onednn_blocked"):
        assert wanted_formats(conv, x, name).weights.dims() == dims


def test_winograds_weights_have_no_descriptor():
    conv, x = nn.Conv2d(64, 64, 3, padding=1), torch.randn(1, 64, 28, 28)
    if tb.env()["isa"] != "default":  # which has no Winograd
        wanted = wanted_formats(conv, x, "winograd4")
        assert wanted.weights is None and wanted.src == wanted.dst and wanted.src.inner_nblks() == 1


def test_linear():
    layer, x = nn.Linear(64, 32), torch.randn(2, 5, 64)
    for name in (None, "onednn"):
        wanted = wanted_formats(layer, x, name)
        assert wanted.src == Descriptor((10, 64), "f32", "ab")
        assert wanted.dst == Descriptor((10, 32), "f32", "ab")
    packed = Memory.of(layer.weight.detach()).reorder_to(wanted.weights)
    assert torch.equal(packed.reorder_to(Descriptor.of(layer.weight)).tensor(), layer.weight)


@pytest.mark.parametrize("format", ("nchw", "nhwc", "nChw8c"))
def test_norms_and_poolings_keep(format):
    x = tb.to_format(torch.randn(2, 16, 8, 8), format)
    for module in (nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.MaxPool2d(2), nn.AvgPool2d(3)):
        wanted = wanted_formats(module, x)
        with torch.no_grad():
            y = module(x)
        assert wanted.implementation == "keeps" and wanted.weights is None
        assert wanted.src == Descriptor.of(x) and wanted.dst.dims() == y.shape
        assert wanted.dst.matches_tag(format)


REFUSED = {
    "relu": (nn.ReLU(), torch.randn(1, 8, 4, 4), None, TypeError, "a convolution, linear layer"),
    "dtype": (nn.Conv2d(8, 8, 3), torch.zeros(1, 8, 4, 4).double(), None, TypeError, "dtype"),
    "channels": (nn.Conv2d(8, 8, 3), torch.zeros(1, 9, 4, 4), None, ValueError, "9 input channels"),
    "rank": (nn.Conv2d(8, 8, 3), torch.zeros(8, 4), None, ValueError, "3 to 5 dims"),
    "empty": (nn.Conv2d(8, 8, 3), torch.zeros(0, 8, 4, 4), None, ValueError, "with elements"),
    "kernel": (nn.Conv2d(8, 8, 3), torch.zeros(1, 8, 2, 2), None, ValueError, "fits"),
    "name": (nn.Conv2d(8, 8, 3), torch.zeros(1, 8, 4, 4), "best", ValueError, "expected one of"),
    "other": (nn.Conv2d(8, 8, 3), torch.zeros(1, 8, 4, 4), "depthwise", NotImplementedError, ""),
    "mode": (nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), torch.zeros(1, 8, 4, 4), None,
             NotImplementedError, "padding_mode"),
    "features": (nn.Linear(8, 8), torch.zeros(1, 9), None, ValueError, "8 features"),
    "keeps": (nn.BatchNorm2d(8), torch.zeros(1, 8, 2, 2), "onednn", ValueError, "keeps"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    module, x, implementation, error, words = REFUSED[name]
    with pytest.raises(error, match=f"(?s)torch_blocked::.*{words}"):
        wanted_formats(module, x, implementation)


def test_a_forced_implementation_does_not_hide_the_choice():
    conv, x = nn.Conv2d(64, 64, 3, padding=1), torch.randn(1, 64, 28, 28)
    chosen = wanted_formats(conv, x).implementation
    with forced("onednn_blocked"):
        assert wanted_formats(conv, x).implementation == chosen
