"""Memory descriptors against oneDNN itself and against the formulas of the documents."""

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch
from helpers import onednn_oracle as oracle
from helpers.descriptor_cases import (
    DTYPES,
    REFUSALS,
    SETTINGS,
    agree,
    fields,
    indices,
    rank,
    tagged,
)
from helpers.onednn_oracle import OracleDescriptor, OracleError
from hypothesis import given
from hypothesis import strategies as st

from torch_blocked.descriptor import Descriptor, canonical_tag, physical_shape

pytestmark = pytest.mark.any_isa
# --- tags -------------------------------------------------------------------------------------


TAG_DIMS = [
    (2, 17, 5, 4, 3, 2, 1, 2, 1, 2, 1, 2),
    (33, 7, 1, 3, 2, 65, 1, 1, 1, 1, 1, 1),
    (64, 96, 3, 2, 16, 1, 1, 1, 1, 1, 1, 1),
    (1,) * 12,
    (2, 0, 3, 4, 5, 6, 1, 1, 1, 1, 1, 1),
    (0, 3, 0, 4, 0, 6, 1, 1, 1, 1, 1, 1),
]


@pytest.mark.parametrize("dims", TAG_DIMS, ids=lambda dims: "x".join(map(str, dims)))
def test_every_onednn_tag_gives_onednn_memory(dims):
    for tag in oracle.tags():
        sizes = dims[: rank(tag)]
        mine = Descriptor(sizes, torch.float32, tag)
        theirs = OracleDescriptor.with_tag(sizes, "f32", tag)
        assert fields(mine) == fields(theirs), tag
        assert mine.strides() == theirs.strides, tag
        assert mine.get_size() == theirs.size, tag
        assert mine.inner_nblks() == theirs.inner_nblks and mine.ndims() == theirs.ndims
        assert mine.matches_tag(tag)


def test_every_onednn_tag_refuses_another_rank():
    for tag in oracle.tags():
        for sizes in [(2,) * (rank(tag) + 1), (2,) * (rank(tag) - 1)]:
            agree_on_rank(sizes, tag)


def agree_on_rank(sizes, tag):
    if not sizes or len(sizes) > 12:
        return  # no dims give the zero descriptor; oneDNN reads past its array beyond 12
    with pytest.raises(OracleError):
        OracleDescriptor.with_tag(sizes, "f32", tag)
    with pytest.raises(ValueError, match="^torch_blocked::Descriptor: expected . dims|expected 1"):
        Descriptor(sizes, torch.float32, tag)


def test_a_name_does_not_matter():
    for alias, agnostic in oracle.aliases().items():
        dims = TAG_DIMS[0][: rank(alias)]
        one, other = Descriptor(dims, "f32", alias), Descriptor(dims, "f32", agnostic)
        assert one == other and hash(one) == hash(other) and repr(one) == repr(other)


def test_tag_finds_the_tag():
    for tag in oracle.tags():
        dims = (130, 131, 132, 133, 134, 135, 2, 2, 2, 2, 2, 2)[: rank(tag)]
        assert Descriptor(dims, "s8", tag).tag() == canonical_tag(tag)


@SETTINGS
@given(tagged())
def test_any_agnostic_tag_gives_onednn_memory(case):
    dims, tag = case
    mine, theirs = Descriptor(dims, "f32", tag), OracleDescriptor.with_string_tag(dims, "f32", tag)
    assert fields(mine) == fields(theirs)
    assert mine.get_size() == theirs.size
    assert math.prod(physical_shape(dims, tag)) * 4 == mine.get_size()
    found = mine.tag()  # another name where dims of size 1 leave a choice
    assert Descriptor(dims, "f32", found) == mine


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_types(dtype):
    name, size_bytes = DTYPES[dtype]
    desc = Descriptor((2, 17, 5, 4), dtype, "nChw8c")
    assert desc.data_type() is dtype and desc == Descriptor((2, 17, 5, 4), name, "nChw8c")
    assert desc.get_size() == 2 * 24 * 5 * 4 * size_bytes
    assert desc.get_size() == OracleDescriptor.with_tag((2, 17, 5, 4), name, "nChw8c").size


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, None, 3])
def test_types_without_a_onednn_type(dtype):
    with pytest.raises(TypeError, match="^torch_blocked::Descriptor: expected a dtype that oneDNN"):
        Descriptor((2, 3), dtype, "ab")


@pytest.mark.parametrize("name", ["boolean", "float32", ""])
def test_unknown_type_names(name):
    with pytest.raises(ValueError, match="^torch_blocked::data_type: expected one of undef, f16"):
        Descriptor((2, 3), name, "ab")


# --- the examples of the documents ------------------------------------------------------------

N, C, H, W = 2, 16, 5, 4
OFFSETS = {
    "nchw": lambda n, c, h, w: n * C * H * W + c * H * W + h * W + w,
    "nhwc": lambda n, c, h, w: n * H * W * C + h * W * C + w * C + c,
    "chwn": lambda n, c, h, w: c * H * W * N + h * W * N + w * N + n,
    "nChw8c": lambda n, c, h, w: n * C * H * W + c // 8 * H * W * 8 + h * W * 8 + w * 8 + c % 8,
}


@pytest.mark.parametrize("tag", OFFSETS)
def test_offsets_of_the_worked_example(tag):
    desc = Descriptor((N, C, H, W), torch.float32, tag)
    for index in indices((N, C, H, W)):
        assert desc.offset(index) == OFFSETS[tag](*index)


def test_17_channels_in_blocks_of_8():
    """Where C is no multiple of 8, the stride of n counts padded channels, not C."""
    desc = Descriptor((N, 17, H, W), torch.float32, "nChw8c")
    assert desc.dims() == (N, 17, H, W)
    assert desc.padded_dims() == (N, 24, H, W)
    assert desc.strides() == (24 * H * W, H * W * 8, W * 8, 8)
    assert (desc.inner_nblks(), desc.inner_blks(), desc.inner_idxs()) == (1, (8,), (1,))
    assert desc.get_size() == 4 * N * 24 * H * W
    for n, c, h, w in indices((N, 17, H, W)):
        expected = n * 24 * H * W + c // 8 * H * W * 8 + h * W * 8 + w * 8 + c % 8
        assert desc.offset((n, c, h, w)) == expected


def test_walk_order_of_nChw8c():
    """8 channels of a pixel, the next pixel, the whole plane, the next 8 channels, next image."""
    desc = Descriptor((N, 17, H, W), torch.float32, "nChw8c")
    walk = [
        (n, block * 8 + lane, h, w)
        for n, block, h, w, lane in indices((N, 3, H, W, 8))
    ]  # fmt: skip
    assert [desc.offset(index, padded=True) for index in walk] == list(range(N * 24 * H * W))


def test_weights_with_a_dim_blocked_twice():
    desc = Descriptor((20, 40, 3, 3), torch.int8, "OIhw4i16o4i")
    assert (desc.inner_blks(), desc.inner_idxs()) == ((4, 16, 4), (1, 0, 1))
    assert desc.padded_dims() == (32, 48, 3, 3)
    o, i, h, w = 17, 38, 1, 2
    inner = i % 16 // 4 * 64 + o % 16 * 4 + i % 4
    assert desc.offset((o, i, h, w)) == ((((o // 16) * 3 + i // 16) * 3 + h) * 3 + w) * 256 + inner


def test_rows_with_extra_space():
    """A slice n1 wide of rows n1 + n2 long has strides <n1 + n2, 1>."""
    m, n1, n2 = 3, 5, 2
    left = Descriptor((m, n1 + n2), "f32", "ab").submemory_desc((m, n1), (0, 0))
    assert left == Descriptor((m, n1), "f32", strides=(n1 + n2, 1))
    assert left.get_size() == 4 * m * (n1 + n2) and left.tag() is None


@pytest.mark.parametrize("tag", ["nhwc", "chwn", "nChw8c", "nChw16c", "NChw16n16c", "OIhw4i16o4i"])
def test_offsets_are_where_onednn_puts_the_elements(tag):
    dims = (3, 17, 5, 4)
    source = np.arange(1, math.prod(dims) + 1, dtype=np.float32)
    mine = Descriptor(dims, torch.float32, tag)
    physical = oracle.reorder(
        source,
        OracleDescriptor.with_tag(dims, "f32", "nchw"),
        OracleDescriptor.with_tag(dims, "f32", tag),
    )
    for value, index in zip(source, indices(dims), strict=True):
        assert physical[mine.offset(index)] == value
    assert np.count_nonzero(physical) == source.size  # the padding is zero


def test_offsets_of_a_torch_tensor():
    x = torch.arange(2 * 3 * 5 * 4, dtype=torch.int32).reshape(2, 3, 5, 4)
    x = x.to(memory_format=torch.channels_last)
    desc = Descriptor(x.shape, x.dtype, strides=x.stride())
    assert desc == Descriptor(x.shape, x.dtype, "nhwc") and desc.tag() == "acdb"
    flat = x.as_strided((x.numel(),), (1,))
    assert all(flat[desc.offset(index)] == x[index] for index in indices(x.shape))


# --- strides ----------------------------------------------------------------------------------


@st.composite
def strided(draw):
    ndims = draw(st.integers(1, 4))
    dims = tuple(draw(st.lists(st.integers(0, 4), min_size=ndims, max_size=ndims)))
    if draw(st.booleans()):
        return dims, tuple(draw(st.lists(st.integers(-2, 12), min_size=ndims, max_size=ndims)))
    strides, stride = [0] * ndims, 1  # valid ones: dense in some order, with gaps and broadcasts
    for dim in draw(st.permutations(range(ndims))):
        broadcast = draw(st.integers(0, 9)) == 0
        strides[dim] = 0 if broadcast else stride
        stride *= 1 if broadcast else max(dims[dim], 1) + draw(st.integers(0, 1))
    return dims, tuple(strides)


@SETTINGS
@given(strided())
def test_strides_are_accepted_and_refused_as_onednn_does(case):
    dims, strides = case
    mine, theirs = agree(
        lambda: Descriptor(dims, "f32", strides=strides),
        lambda: OracleDescriptor.with_strides(dims, "f32", strides),
    )
    if mine is not None:
        # A tensor that only broadcasts has one element; oneDNN counts none.
        assert mine.get_size() == theirs.size or (theirs.size, mine.get_size()) == (0, 4)
        assert mine.get_size() == 0 or mine.get_size() > 4 * max(map(mine.offset, indices(dims)))


def test_broadcast():
    desc = Descriptor((4, 3), "f32", strides=(0, 1))
    assert desc.get_size() == 12 and desc.offset((3, 2)) == 2
    assert Descriptor((4, 3), "f32", strides=(0, 0)).get_size() == 4


@pytest.mark.parametrize("strides", [(2, 1), (1, 1), (-3, 1), (1, 2), (3, 1, 1), (3,), ()])
def test_impossible_strides(strides):
    with pytest.raises(
        ValueError, match="^torch_blocked::Descriptor: expected (a stride|2 stride)"
    ):
        Descriptor((3, 3), "f32", strides=strides)


@SETTINGS
@given(tagged())
def test_strides_and_inner_blocks_can_say_what_a_tag_says(case):
    dims, tag = case
    desc = Descriptor(dims, "f32", tag)
    by_hand = Descriptor(dims, "f32", strides=desc.strides(), inner_blks=desc.inner_blks(),
                         inner_idxs=desc.inner_idxs())  # fmt: skip
    assert by_hand == desc and hash(by_hand) == hash(desc)


def test_strides_and_inner_blocks_can_say_more():
    """nChw8c with one unused row of blocks after each image: no tag says that."""
    strides = (3 * H * W * 8, H * W * 8, W * 8, 8)
    desc = Descriptor((N, 9, H, W), "f32", strides=strides, inner_blks=(8,), inner_idxs=(1,))
    assert desc.tag() is None and desc.padded_dims() == (N, 16, H, W)
    assert desc.get_size() == 4 * N * strides[0]
    assert desc.offset((1, 8, 0, 0)) == strides[0] + strides[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"strides": (160, 160, 32, 8), "inner_blks": (8,), "inner_idxs": (4,)},
        {"strides": (160, 160, 32, 8), "inner_blks": (8,), "inner_idxs": (-1,)},
        {"strides": (160, 160, 32, 8), "inner_blks": (1,), "inner_idxs": (1,)},
        {"strides": (160, 160, 32, 8), "inner_blks": (8,), "inner_idxs": (1, 1)},
        {"strides": (160, 160, 32, 8), "inner_blks": (2**40, 2**40), "inner_idxs": (1, 1)},
        {"strides": (160, 160, 32, 7), "inner_blks": (8,), "inner_idxs": (1,)},
        {"strides": (160, 160, 32, 8), "inner_blks": (2,) * 13, "inner_idxs": (1,) * 13},
    ],
)
def test_impossible_inner_blocks(arguments):
    with pytest.raises(ValueError, match="^torch_blocked::Descriptor: expected "):
        Descriptor((2, 8, 5, 4), "f32", **arguments)


def test_padding_and_inner_strides_by_hand():
    """All that the structure of MKL-DNN 0.95 had; oneDNN itself describes dense blocks only."""
    blocks = {"strides": (480, 160, 32, 8), "inner_blks": (8,), "inner_idxs": (1,)}
    whole = {**blocks, "padded_dims": (2, 24, 5, 4), "inner_strides": (1,)}
    assert Descriptor((2, 17, 5, 4), "f32", **whole) == Descriptor((2, 17, 5, 4), "f32", "nChw8c")
    more = Descriptor((2, 17, 5, 4), "f32", strides=(640, 160, 32, 8), inner_blks=(8,),
                      inner_idxs=(1,), padded_dims=(2, 32, 5, 4))  # fmt: skip
    assert more.padded_dims() == (2, 32, 5, 4) and more.get_size() == 4 * 2 * 640
    plain = Descriptor((3, 5), "f32", strides=(8, 1), padded_dims=(3, 8))
    assert plain.padded_dims() == (3, 8) and plain.offset((2, 7), padded=True) == 23
    assert Descriptor((1,) * 4, "f32", "OIhw4i16o4i").inner_strides() == (64, 4, 1)
    assert Descriptor((2, 3), "f32", "ab").inner_strides() == ()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (
            {"padded_dims": (2, 17, 5, 4)},
            ValueError,
            "whole blocks of 8 and at least 17 along dim 1",
        ),
        ({"padded_dims": (2, 16, 5, 4)}, ValueError, "along dim 1, got 16; round up to 24"),
        ({"padded_dims": (1, 24, 5, 4)}, ValueError, "at least 2 along dim 0, got 1"),
        ({"padded_dims": (2, 24)}, ValueError, "expected 4 padded_dims"),
        ({"padded_dims": (2, 2**62, 5, 4)}, ValueError, "fits 64 bits"),
        ({"inner_strides": (2,)}, NotImplementedError, "oneDNN describes dense blocks only"),
        ({"inner_strides": (1, 1)}, ValueError, "expected 1 inner_strides"),
    ],
)
def test_impossible_padding_and_inner_strides(arguments, error, words):
    with pytest.raises(error, match=f"^torch_blocked::Descriptor: .*{words}"):
        Descriptor((2, 17, 5, 4), "f32", strides=(480, 160, 32, 8), inner_blks=(8,),
                   inner_idxs=(1,), **arguments)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tag": "ab", "padded_dims": (2, 8)},
        {"tag": "ab", "strides": (3, 1)},
        {"tag": "ab", "inner_blks": (8,), "inner_idxs": (1,)},
        {"tag": (3, 1)},
        {"strides": 3},
        {"strides": (3.0, 1.0)},
    ],
)
def test_arguments_of_the_wrong_kind(arguments):
    with pytest.raises(TypeError, match="^torch_blocked::(Descriptor|format_tag): expected "):
        Descriptor((2, 3), "f32", **arguments)


# --- offsets ----------------------------------------------------------------------------------


@SETTINGS
@given(tagged(largest=5))
def test_offsets_fill_the_memory_once(case):
    dims, tag = case
    desc = Descriptor(dims, "u8", tag)
    if desc.get_size() > 4000:
        desc = Descriptor((2,) * len(dims), "u8", re.match("[A-Za-z]*", tag)[0].lower())
    offsets = [desc.offset(index, padded=True) for index in indices(desc.padded_dims())]
    assert sorted(offsets) == list(range(desc.get_size()))
    strided_array = np.arange(desc.get_size()).reshape(desc.physical_shape())
    assert strided_array.size == desc.get_size()


@pytest.mark.parametrize(
    "index", [(2, 0, 0, 0), (0, 17, 0, 0), (0, -1, 0, 0), (0, 0, 0), (0, 0, 0, 0, 0), ()]
)
def test_offset_of_an_index_out_of_range(index):
    with pytest.raises(ValueError, match=r"expected an index inside dims \[2, 17, 5, 4\]"):
        Descriptor((2, 17, 5, 4), "f32", "nChw8c").offset(index)


def test_padded_index():
    desc = Descriptor((2, 17, 5, 4), "f32", "nChw8c")
    assert desc.offset((1, 23, 4, 3), padded=True) == desc.get_size() // 4 - 1
    with pytest.raises(ValueError, match=r"inside padded dims \[2, 24, 5, 4\]"):
        desc.offset((0, 24, 0, 0), padded=True)


# --- zero volume, zero descriptor, any --------------------------------------------------------


@pytest.mark.parametrize("dims", [(0, 17, 5, 4), (2, 0, 5, 4), (2, 17, 0, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("tag", ["nchw", "nhwc", "nChw8c", "OIhw4i16o4i", "any"])
def test_zero_volume(dims, tag):
    desc = Descriptor(dims, "f32", tag)
    assert desc.get_size() == 0 and not desc.is_zero() and desc.dims() == dims
    with pytest.raises(ValueError, match="^torch_blocked::Descriptor.offset: expected "):
        desc.offset((0, 0, 0, 0))


def test_zero_descriptor():
    zeros = [
        Descriptor(),
        Descriptor((), torch.float32, "nchw"),
        Descriptor((), "f32", strides=()),
        Descriptor((2, 3), torch.float32, "undef"),
        Descriptor((2, 3), torch.float32, "nchw", allow_empty=True),
    ]
    for zero in zeros:
        assert zero.is_zero() and zero == Descriptor() and hash(zero) == hash(Descriptor())
        assert (zero.ndims(), zero.dims(), zero.get_size(), zero.format_kind()) == (
            0,
            (),
            0,
            "undef",
        )
        assert zero.data_type() is None and zero.strides() == () and repr(zero) == "Descriptor()"
        assert zero.tag() == "undef"
    assert OracleDescriptor.with_tag((2, 3), "f32", "undef").ndims == 0
    assert OracleDescriptor.with_tag((), "f32", "nchw").ndims == 0


@pytest.mark.parametrize("zero", [Descriptor(), Descriptor((4, 4), "f32", "any")])
def test_no_format_means_no_addresses(zero):
    for call in (
        lambda: zero.offset((0, 0)),
        lambda: zero.submemory_desc((1, 1), (0, 0)),
        zero.physical_shape,
    ):
        with pytest.raises(ValueError, match="expected a descriptor with a defined format"):
            call()


def test_any():
    desc = Descriptor((2, 17, 5, 4), torch.bfloat16, "any")
    theirs = OracleDescriptor.with_tag((2, 17, 5, 4), "bf16", "any")
    assert (
        desc.format_kind() == "any"
        and theirs.format_kind == oracle.enum("dnnl_format_kind_t")["format_kind_any"]
    )
    assert (desc.dims(), desc.padded_dims()) == (theirs.dims, theirs.padded_dims)
    assert desc.get_size() == theirs.size == 0
    assert desc.strides() == desc.inner_blks() == desc.inner_idxs() == ()
    assert desc != Descriptor((2, 17, 5, 4), torch.bfloat16, "nchw") and desc.tag() == "any"
    assert desc.reshape((2, 17, 20)) == Descriptor((2, 17, 20), torch.bfloat16, "any")
    assert desc.permute_axes((1, 0, 2, 3)) == Descriptor((17, 2, 5, 4), torch.bfloat16, "any")
    with pytest.raises(ValueError, match="Descriptor.reshape"):
        desc.reshape((2, 17, 21))


def test_allow_empty_is_everywhere():
    desc = Descriptor((2, 17, 5, 4), "f32", "nChw8c")
    calls = [
        lambda empty: Descriptor((2, 3), "f32", "nchw", allow_empty=empty),
        lambda empty: Descriptor((2, 3), "undef", "ab", allow_empty=empty),
        lambda empty: Descriptor((2, -3), "f32", "ab", allow_empty=empty),
        lambda empty: Descriptor((2, 3), "f32", strides=(1, 1), allow_empty=empty),
        lambda empty: desc.submemory_desc((2, 3, 5, 4), (0, 4, 0, 0), allow_empty=empty),
        lambda empty: desc.submemory_desc((2, 18, 5, 4), (0, 0, 0, 0), allow_empty=empty),
        lambda empty: desc.reshape((34, 5, 4), allow_empty=empty),
        lambda empty: desc.permute_axes((0, 0, 1, 2), allow_empty=empty),
        lambda empty: Descriptor().reshape((1,), allow_empty=empty),
    ]
    for call in calls:
        assert call(True).is_zero()
        with pytest.raises(REFUSALS):
            call(False)


def test_allow_empty_does_not_hide_a_wrong_name():
    with pytest.raises(ValueError, match="format_tag"):
        Descriptor((2, 3), "f32", "nhcw!", allow_empty=True)


# --- limits -----------------------------------------------------------------------------------


def test_12_dims():
    assert Descriptor((1,) * 12, "f32", "abcdefghijkl").ndims() == 12
    for arguments in ({"tag": "any"}, {"strides": (1,) * 13}):
        with pytest.raises(ValueError, match="expected at most 12 dims, got 13 dims; join"):
            Descriptor((1,) * 13, "f32", **arguments)


@pytest.mark.parametrize(
    "dims, arguments",
    [
        ((2**32, 2**32), {"tag": "ab"}),
        ((2**61,), {"tag": "a"}),
        ((2**63 - 1,), {"tag": "A16a"}),
        ((2, 2), {"strides": (2**62, 1)}),
        ((2, 2, 2), {"strides": (2**62, 2**61, 2**60)}),
        ((3, 2**62), {"strides": (2**62, 1)}),
        ((0, 2**40, 2**40), {"tag": "abc"}),
        ((2**63,), {"tag": "a"}),
        ((2,), {"strides": (2**63,)}),
    ],
)
def test_no_size_overflows(dims, arguments):
    with pytest.raises(ValueError, match="^torch_blocked::Descriptor: expected .* fit"):
        Descriptor(dims, "f32", **arguments)


def test_the_largest_memory():
    assert Descriptor((2**60,), "f64", "a", allow_empty=True).is_zero()
    assert Descriptor((2**60 - 1,), "f64", "a").get_size() == 8 * (2**60 - 1)


@pytest.mark.parametrize("dims", [(-1, 3), (2, -(2**63))])
def test_negative_dims(dims):
    """Among them oneDNN's run-time value: sizes are always known here."""
    with pytest.raises(ValueError, match="expected dims of at least 0"):
        Descriptor(dims, "f32", "ab")


# --- equality and the rest --------------------------------------------------------------------


@SETTINGS
@given(st.lists(st.sampled_from([1, 1, 2, 8, 17]), min_size=4, max_size=4),
       st.lists(st.sampled_from(["nchw", "nhwc", "chwn", "nChw8c", "aBdc8b", "aBcd16b", "any"]),
                min_size=2, max_size=2))  # fmt: skip
def test_equality_is_that_of_onednn(dims, tags):
    one, other = (Descriptor(dims, "f32", tag) for tag in tags)
    theirs = [OracleDescriptor.with_tag(dims, "f32", tag) if tag != "aBdc8b"
              else OracleDescriptor.with_string_tag(dims, "f32", tag) for tag in tags]  # fmt: skip
    assert (one == other) == (theirs[0] == theirs[1])
    assert (one != other) == (not one == other)
    assert one != other or hash(one) == hash(other)


def test_what_makes_descriptors_differ():
    desc = Descriptor((2, 16, 5, 4), "f32", "nChw8c")
    others = [
        Descriptor((2, 15, 5, 4), "f32", "nChw8c"),
        Descriptor((2, 16, 5, 4), "s32", "nChw8c"),
        Descriptor((2, 16, 5, 4), "f32", "nChw16c"),
        Descriptor((2, 16, 5, 4), "f32", "nchw"),
        Descriptor(
            (2, 16, 5, 4), "f32", strides=(640, 160, 32, 8), inner_blks=(8,), inner_idxs=(1,)
        ),
        Descriptor((2, 32, 5, 4), "f32", "nChw8c").submemory_desc((2, 16, 5, 4), (0, 16, 0, 0)),
        Descriptor((2, 16, 5, 4), "f32", "any"),
        Descriptor(),
    ]
    assert len({desc, *others}) == len(others) + 1
    assert desc != "nChw8c" and desc == copy.deepcopy(desc)


def test_strides_of_dims_of_size_1_do_not_matter():
    """PyTorch gives such dims any stride."""
    one = Descriptor((2, 1, 4), "f32", strides=(4, 1, 1))
    other = Descriptor((2, 1, 4), "f32", strides=(4, 999, 1))
    assert one == other == Descriptor((2, 1, 4), "f32", "abc") and hash(one) == hash(other)
    assert one.matches_tag("ncw") and one.matches_tag("nwc") and one.get_size() == other.get_size()


def test_both_spellings_of_the_accessors():
    desc = Descriptor((2, 17, 5, 4), torch.float32, "nChw8c")
    names = (
        "ndims dims data_type format_kind strides padded_dims padded_offsets submemory_offset "
        "inner_nblks inner_blks inner_idxs"
    ).split()
    assert [getattr(desc, name)() for name in names] == [
        getattr(desc, f"get_{name}")() for name in names
    ]


def test_repr():
    desc = Descriptor((2, 17, 5, 4), torch.float32, "nChw8c")
    assert repr(desc) == "Descriptor([2, 17, 5, 4], f32, tag=aBcd8b)"
    region = desc.submemory_desc((2, 9, 5, 4), (0, 8, 0, 0))
    assert repr(region) == (
        "Descriptor([2, 9, 5, 4], f32, strides=[480, 160, 32, 8], inner_blocks=8b, "
        "padded_dims=[2, 16, 5, 4], offset=160)"
    )


def test_a_descriptor_cannot_be_changed():
    with pytest.raises(AttributeError):
        Descriptor((2, 3), "f32", "ab").name = "weights"


def test_copies_and_pickles():
    desc = Descriptor((2, 17, 5, 4), "bf16", "nChw8c")
    region = desc.submemory_desc((2, 3, 5, 4), (0, 8, 0, 0))
    for each in (
        Descriptor(),
        Descriptor((2, 3), "s8", "any"),
        desc,
        region,
        desc.submemory_desc((1, 9, 2, 2), (1, 8, 3, 1)),
        Descriptor((0, 17), "f32", "aB8b"),
        Descriptor((3, 5), "f64", strides=(0, 1)),
        Descriptor((32, 32, 3, 3), "f32", "OIhw4i16o4i").permute_axes((1, 0, 3, 2)),
    ):
        for copied in (
            pickle.loads(pickle.dumps(each)),
            copy.copy(each),
            copy.deepcopy([each])[0],
        ):
            assert copied == each and hash(copied) == hash(each) and repr(copied) == repr(each)
    assert pickle.loads(pickle.dumps(region)).offset((0, 2, 0, 0)) == region.offset((0, 2, 0, 0))


def test_a_tensor_is_no_dims():
    with pytest.raises(TypeError, match=r"got a tensor \(64, 64\); Descriptor.of\(tensor\)") as e:
        Descriptor(torch.zeros(64, 64))
    assert len(str(e.value)) < 200
