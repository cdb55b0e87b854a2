"""The oneAPI specification, "Memory": tags, descriptors, memory objects and zero volume."""

import re

import pytest
import torch
from torch import nn

import torch_blocked as tb
from torch_blocked import Descriptor, Memory

pytestmark = pytest.mark.any_isa

# Agnostic tags with their aliases: all of the specification but `undef` and `any`.
TAGS = {
    "a": "x",
    "ab": "nc tn oi",
    "ba": "cn nt io",
    "abc": "ncw oiw tnc",
    "acb": "nwc owi",
    "bac": "ntc",
    "bca": "iwo",
    "cba": "wio",
    "abcd": "nchw oihw goiw ldnc ldio ldgo",
    "abdc": "ldoi",
    "acdb": "nhwc ohwi",
    "bacd": "iohw",
    "bcda": "chwn ihwo",
    "cdba": "hwio",
    "dcab": "wigo",
    "abcde": "ncdhw oidhw goihw ldigo",
    "abdec": "ldgoi",
    "acbde": "giohw",
    "acdeb": "ndhwc odhwi",
    "bcdea": "idhwo",
    "cdeba": "dhwio",
    "decab": "hwigo",
    "abcdef": "goidhw",
    "acbdef": "giodhw",
    "defcab": "dhwigo",
}


def test_70_tags():
    assert 2 + len(TAGS) + sum(len(names.split()) for names in TAGS.values()) == 70


@pytest.mark.parametrize("tag", TAGS)
def test_an_alias_is_the_tag(tag):
    dims = (2, 3, 4, 5, 6, 7)[: len(tag)]
    desc = Descriptor(dims, "f32", tag)
    x = torch.randn(dims)
    assert Descriptor.of(tb.to_format(x, tag)) == desc
    for alias in TAGS[tag].split():
        assert Descriptor(dims, "f32", alias) == desc and desc.matches_tag(alias)
        assert Memory.of(x).reorder_to(Descriptor(dims, "f32", alias)).tensor().equal(x)


def test_zero_descriptors():
    assert Descriptor().is_zero() and Descriptor().get_size() == 0
    assert Descriptor((2, 3), "f32", "undef").is_zero()
    assert Descriptor((2, 3), "f32", "nchw", allow_empty=True).is_zero()
    with pytest.raises(ValueError):
        Descriptor((2, 3), "f32", "nchw")


@pytest.mark.parametrize("name", ("f16", "bf16", "f32", "s32", "s8", "u8"))
def test_data_types(name):
    desc = Descriptor((2, 3), name, "ab")
    assert Memory(desc).tensor().dtype == desc.data_type()


def test_submemory():
    whole = Descriptor((2, 17, 5, 4), "f32", "nChw8c")
    part = whole.submemory_desc((2, 9, 5, 4), (0, 8, 0, 0))
    assert part.submemory_offset() == 160 and part.padded_dims() == (2, 16, 5, 4)
    with pytest.raises(NotImplementedError):  # not in oneDNN either
        whole.submemory_desc((2, 9, 5, 4), (0, 4, 0, 0))


def test_reshape():
    desc = Descriptor((2, 12, 5), "f32", "abc")
    assert desc.reshape((2, 1, 12, 5)) == Descriptor((2, 1, 12, 5), "f32", "abcd")
    assert desc.reshape((2, 1, 12, 5)).reshape((2, 12, 5)) == desc
    assert desc.reshape((2, 3, 4, 5)) == Descriptor((2, 3, 4, 5), "f32", "abcd")
    assert desc.reshape((24, 5)) == Descriptor((24, 5), "f32", "ab")
    for refused in (Descriptor((2, 12, 5), "f32", "acb"), Descriptor((2, 12, 5), "f32", "aBc8b")):
        assert refused.reshape((2, 60), allow_empty=True).is_zero()
        with pytest.raises(ValueError):
            refused.reshape((2, 60))


def test_permute_axes():
    assert Descriptor((2, 3), "f32", "ab").permute_axes((1, 0)) == Descriptor((3, 2), "f32", "ba")


def test_at_most_12_dims_of_64_bits():
    assert Descriptor((2**40, 1), "s8", "ab").dims() == (2**40, 1)
    with pytest.raises(ValueError, match="at most 12 dims"):
        Descriptor((1,) * 13, "f32", "any")


def test_any_is_asked_compared_and_reordered():
    conv, x = nn.Conv2d(16, 32, 3), torch.randn(1, 16, 8, 8)
    wanted = tb.wanted_formats(conv, x, "onednn")
    weights = Memory.of(conv.weight.detach())
    if weights.descriptor != wanted.weights:
        weights = weights.reorder_to(wanted.weights)
    assert weights.descriptor == wanted.weights
    assert weights.reorder_to(Descriptor.of(conv.weight)).tensor().equal(conv.weight)


def test_memory_objects():
    desc = Descriptor((2, 17, 5, 4), "f32", "nChw8c")
    allocated, absent = Memory(desc), Memory.from_handle(desc, None)
    assert allocated.get_desc() == desc and absent.get_data_handle() is None
    absent.set_data_handle(allocated.get_data_handle())
    absent.tensor().fill_(1)
    assert torch.equal(allocated.tensor(), torch.ones(2, 17, 5, 4))
    with pytest.raises(ValueError, match=re.escape("at least 3840 bytes")):
        absent.set_data_handle(bytearray(2 * 17 * 5 * 4 * 4))  # the product formula


def test_a_handle_is_not_written_to():
    """The specification lets padding be cleared at each call; oneDNN has not done it since 2.1."""
    buffer = bytearray(b"\xff") * Descriptor((1, 1, 1, 1), "u8", "nChw8c").get_size()
    Memory.from_handle(Descriptor((1, 1, 1, 1), "u8", "nChw8c"), buffer)
    assert buffer == b"\xff" * 8


# --- zero volume


def test_zero_volume_is_never_touched():
    desc = Descriptor((2, 0, 5, 4), "f32", "nChw8c")
    assert desc.get_size() == 0 and Memory.from_handle(desc, 1).tensor().numel() == 0


def test_concat_ignores_what_is_empty():
    parts = [torch.randn(2, c, 3, 3).to_blocked("nChw8c") for c in (3, 0, 5)]
    joined = torch.cat(parts, 1)
    assert joined.format == "nChw8c" and joined.shape == (2, 8, 3, 3)


def test_a_convolution_of_no_images():
    y = nn.Conv2d(16, 8, 3)(torch.randn(0, 16, 5, 5).to_blocked("nChw8c"))
    assert y.shape == (0, 8, 3, 3)


def test_a_weight_dim_of_0_is_an_error():
    x = torch.randn(1, 16, 5, 5).to_blocked("nChw8c")
    with pytest.raises((ValueError, RuntimeError)):
        torch.conv2d(x, torch.randn(0, 16, 3, 3))
