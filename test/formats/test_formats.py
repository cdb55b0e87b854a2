"""Formats by their tags: names, every order of dims and back, and a tensor's descriptor."""

import itertools
import math
import re

import pytest
import torch
from helpers.problems import SPATIAL

import torch_blocked
from torch_blocked import _C, Descriptor
from torch_blocked.formats import CHANNELS_LAST, CONTIGUOUS
from torch_blocked.tensor import format_name

SIZES = (2, 3, 4, 5, 6, 7)  # all different, so that strides tell the order
ALL_ORDERS = ["".join(order) for n in range(1, 5) for order in itertools.permutations("abcd"[:n])]
SOME_ORDERS = ("abcde", "edcba", "acdeb", "bcdea", "abcdef", "fedcba", "acdefb", "badcfe")


def sequence(*dims, **options):
    return torch.arange(math.prod(dims), dtype=torch.float32, **options).reshape(dims)


# --- the names

NAMES = {
    _C.Format.PLAIN: ("ncw", "nchw", "ncdhw"),
    _C.Format.CHANNELS_LAST: ("nwc", "nhwc", "ndhwc"),
    **{
        _C.Format.blocked(block): tuple(f"nC{spatial}{block}c" for spatial in ("w", "hw", "dhw"))
        for block in (4, 8, 16, 32)
    },
}


@pytest.mark.parametrize("format", NAMES)
def test_a_format_has_a_name_for_each_rank(format):
    for ndims, name in enumerate(NAMES[format], start=3):
        assert format.name(ndims) == name
        same = _C.Format.of(torch_blocked.canonical_tag(name), ndims)
        assert same.name(ndims) == name and same.block == format.block
        assert _C.Format.of(name, ndims + 1) is None
    assert [format.name(ndims) for ndims in (0, 2, 6)] == ["strided"] * 3


@pytest.mark.parametrize("tag", ["any", "undef", "nc", "chwn", "aBcd64b", "aBcd2b4b", "Abcd8a",
                                 "aBdc8b", "aB8b", "aBcdef8b", "NChw16n16c"])  # fmt: skip
def test_other_tags_are_of_no_format(tag):
    assert all(_C.Format.of(tag, ndims) is None for ndims in range(7))


def test_blocks():
    assert _C.Format.BLOCKS == (4, 8, 16, 32)
    assert [_C.Format.blocked(block).block for block in _C.Format.BLOCKS] == [4, 8, 16, 32]
    assert _C.Format.PLAIN.block == _C.Format.CHANNELS_LAST.block == 0
    for block in (-8, 0, 1, 12, 64):
        with pytest.raises(ValueError, match="^torch_blocked::Format: expected a block, one of"):
            _C.Format.blocked(block)


@pytest.mark.parametrize(
    "tag, name",
    [
        *((name, name) for name in "nc cn ncw nwc nchw nhwc chwn ncdhw ndhwc nChw8c".split()),
        ("oihw", "nchw"),
        # No name that oneDNN does not have.
        *((tag, tag) for tag in ("ABcd16b16a", "adbc", "aBcd64b", "abcdef", "a")),
    ],
)
def test_the_name_of_a_descriptor(tag, name):
    ndims = sum(letter.isalpha() for letter in re.split(r"\d", tag)[0])
    assert Descriptor(SIZES[:ndims], "u8", tag)._desc.activation_name() == name


def test_descriptors_without_a_name():
    for desc in (
        Descriptor(),
        Descriptor((2, 3), "f32", "any"),
        Descriptor.of(sequence(4, 4)[::2]),
    ):
        assert desc._desc.activation_name() is None


# --- to_format


@pytest.mark.parametrize("tag", [*ALL_ORDERS, *SOME_ORDERS])
def test_every_order_of_dims(tag):
    dense = sequence(*SIZES[: len(tag)])
    ordered = torch_blocked.to_format(dense, tag)
    assert torch.equal(ordered, dense)
    assert sorted(tag, key=lambda letter: -ordered.stride(ord(letter) - ord("a"))) == list(tag)
    assert (
        ordered.is_contiguous() or ordered.permute([ord(x) - ord("a") for x in tag]).is_contiguous()
    )
    assert torch_blocked.canonical_tag(torch_blocked.format_of(ordered)) == tag
    assert Descriptor.of(ordered) == Descriptor(dense.shape, dense.dtype, tag)
    assert torch_blocked.to_format(ordered, tag) is ordered
    assert torch.equal(torch_blocked.to_format(ordered, "abcdefghijkl"[: len(tag)]), dense)


def test_twelve_dims():
    dense = sequence(*(2,) * 12)
    assert torch_blocked.to_format(dense, "lkjihgfedcba").stride() == dense.stride()[::-1]


@pytest.mark.parametrize("tag", ["chwn", "abdc", "dcba", "oihw"])
def test_every_order_of_a_blocked_tensor(tag):
    dense = sequence(2, 17, 4, 5)
    with torch_blocked.profile() as p:
        ordered = torch_blocked.to_format(dense.to_blocked("nChw8c"), tag)
    assert p.reorders == 2 and not torch_blocked.is_blocked(ordered)
    assert torch.equal(ordered, dense)
    assert Descriptor.of(ordered) == Descriptor(dense.shape, dense.dtype, tag)
    assert torch.equal(torch_blocked.to_format(ordered, "nChw8c").to_dense(), dense)


@pytest.mark.parametrize("block", [None, "nChw8c"])
def test_the_gradient_goes_through_any_order(block):
    leaf = sequence(2, 9, 4, 5).requires_grad_()
    factors = sequence(2, 9, 4, 5).sin()
    input = leaf if block is None else leaf.to_blocked(block)
    (torch_blocked.to_format(input, "chwn") * factors).sum().backward()
    assert torch.equal(leaf.grad, factors)


OTHER_TAGS = (
    "torch_blocked::to_format: expected a tag of {} dims in some order, or of 3 to 5 dims with "
    "channels in blocks of 4, 8, 16 or 32, got {} for {} dims; a Descriptor describes other formats"
)


@pytest.mark.parametrize(
    "ndim, tag",
    [
        *((4, tag) for tag in ("nwc", "nCw8c", "ncdhw", "OIhw16i16o", "aBcd64b", "aBdc8b", "any")),
        *((4, tag) for tag in ("undef", "a", "abcde", "Abcd8a", "NChw16n16c")),
        *((ndim, "nChw8c") for ndim in (0, 1, 2, 3, 5, 6)),
        (2, "aB8b"),
        (6, "aBcdef8b"),
        (0, "a"),
    ],
)
def test_other_tags_are_refused(ndim, tag):
    sentence = OTHER_TAGS.format(ndim, tag, ndim)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        torch_blocked.to_format(sequence(*SIZES[:ndim]), tag)


# --- Descriptor.of


@pytest.mark.parametrize(
    "tensor",
    [
        sequence(2, 3, 4, 5),
        sequence(2, 3, 4, 5).to(memory_format=torch.channels_last),
        sequence(2, 3, 4, 5)[:, 1:, ::2],
        sequence(2, 3, 1, 1).expand(2, 3, 4, 5),
        sequence(7).to(torch.uint8),
        sequence(3, 4).to(torch.bfloat16).t(),
        torch.empty(0, 3),
        torch_blocked.to_channels_last_1d(sequence(2, 3, 4)),
    ],
)
def test_the_descriptor_of_a_strided_tensor(tensor):
    desc = Descriptor.of(tensor)
    assert desc == Descriptor(tensor.shape, tensor.dtype, strides=tensor.stride())
    assert (desc.dims(), desc.data_type()) == (tuple(tensor.shape), tensor.dtype)
    if tensor.numel():
        last = [size - 1 for size in tensor.shape]
        storage = tensor.as_strided((desc.offset(last) + 1,), (1,))
        assert storage[-1] == tensor[tuple(last)]


@pytest.mark.parametrize("block", [4, 8, 16, 32])
@pytest.mark.parametrize("ndim", [3, 4, 5])
def test_the_descriptor_of_a_blocked_tensor(ndim, block):
    tag = format_name(ndim, block)
    dense = sequence(2, 17, *SPATIAL[ndim])
    blocked = dense.to_blocked(tag)
    desc = Descriptor.of(blocked)
    assert desc == Descriptor(dense.shape, dense.dtype, tag) and desc.matches_tag(tag)
    assert desc.get_size() == blocked._physical.nbytes
    assert desc.physical_shape() == tuple(blocked.physical_shape)
    flat = blocked._physical.flatten()
    for index in [(0,) * ndim, (1, 16, *(size - 1 for size in SPATIAL[ndim]))]:
        assert flat[desc.offset(index)] == dense[index]
    assert Descriptor.of(torch_blocked.to_format(blocked, CHANNELS_LAST[ndim])) == Descriptor(
        dense.shape, dense.dtype, CHANNELS_LAST[ndim]
    )
    assert Descriptor.of(blocked.to_dense()).matches_tag(CONTIGUOUS[ndim])


def test_the_descriptor_of_a_part_of_a_blocked_tensor():
    blocked = sequence(3, 17, 4, 5).to_blocked("nChw8c")
    assert Descriptor.of(blocked[1:]) == Descriptor((2, 17, 4, 5), torch.float32, "nChw8c")
    apart = Descriptor.of(blocked[::2])
    assert apart.strides() == (960, 160, 40, 8) and apart.padded_dims() == (2, 24, 4, 5)


def test_the_stride_of_an_only_block_says_nothing():
    physical = torch.zeros(160).as_strided((1, 1, 4, 5, 8), (7, 3, 40, 8, 1))
    desc = Descriptor.of(torch_blocked.BlockedTensor(physical, 5))
    assert desc == Descriptor((1, 5, 4, 5), torch.float32, "nChw8c")


def test_blocks_whose_channels_lie_apart_have_no_descriptor():
    physical = torch.zeros(1, 1, 8, 4, 5).movedim(2, -1)
    with pytest.raises(ValueError, match="Descriptor.of: expected the channels of a block side by"):
        Descriptor.of(torch_blocked.BlockedTensor(physical, 8))


@pytest.mark.parametrize(
    "value, error, words",
    [
        (sequence(2, 3).to_sparse(), TypeError, "strided or blocked tensor, got torch.sparse_coo"),
        (sequence(2, 3).to_mkldnn(), TypeError, "strided or blocked tensor, got torch._mkldnn"),
        ([1, 2], TypeError, "strided or blocked tensor, got list"),
        (sequence(2, 3).to(torch.int64), TypeError, "a dtype that oneDNN has"),
        (torch.tensor(1.0), ValueError, "a tensor with dims, got a scalar"),
        (torch.empty((1,) * 13), ValueError, "at most 12 dims"),
        (sequence(6).as_strided((2, 3), (1, 1)), ValueError, "a stride of at least 2"),
        (sequence(2, 3, 4)[:, ::2], ValueError, "a stride of at least 16 for dim 0"),
    ],
)
def test_what_has_no_descriptor(value, error, words):
    with pytest.raises(
        error, match=rf"^torch_blocked::Descriptor(\.of)?: expected .*{re.escape(words)}"
    ):
        Descriptor.of(value)
