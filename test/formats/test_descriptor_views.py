"""Parts, reshapes and permutations of memory descriptors, against oneDNN itself."""

import itertools
import math
import re

import pytest
import torch
from helpers.descriptor_cases import (
    INVALID,
    SETTINGS,
    UNIMPLEMENTED,
    agree,
    attempt,
    fields,
    indices,
    tagged,
)
from helpers.onednn_oracle import OracleDescriptor, OracleError
from hypothesis import given
from hypothesis import strategies as st

from torch_blocked.descriptor import Descriptor, canonical_tag

pytestmark = pytest.mark.any_isa
# --- submemory --------------------------------------------------------------------------------


@st.composite
def regions(draw):
    dims, tag = draw(tagged(smallest=0, largest=20))
    offsets = [draw(st.sampled_from([0, 0, 2, 4, 8, 16, 1, 3])) for _ in dims]
    room = [max(dim - offset, 0) for dim, offset in zip(dims, offsets, strict=True)]
    sizes = [draw(st.sampled_from([left, left, left, 4, 8, 1, 0])) for left in room]
    return dims, tag, tuple(sizes), tuple(offsets)


@SETTINGS
@given(regions())
def test_submemory_is_accepted_and_refused_as_onednn_does(case):
    dims, tag, sizes, offsets = case
    if 0 in dims:
        tag = canonical_tag("abcdef"[: len(dims)])  # both oracles need a tag they can build
    parent = Descriptor(dims, "f32", tag)
    theirs = OracleDescriptor.with_string_tag(dims, "f32", tag)
    if 0 in dims:
        theirs = OracleDescriptor.with_tag(dims, "f32", tag)
    region, _ = agree(
        lambda: parent.submemory_desc(sizes, offsets),
        lambda: theirs.submemory_desc(sizes, offsets),
    )
    if region is None:
        return
    assert region.get_size() <= parent.get_size()
    for index in itertools.islice(indices(sizes), 50):
        whole = tuple(i + offset for i, offset in zip(index, offsets, strict=True))
        assert region.offset(index) == parent.offset(whole)


@pytest.mark.parametrize(
    "sizes, offsets, padded, status",
    [
        ((2, 8, 5, 4), (0, 8, 0, 0), 8, None),
        ((2, 9, 5, 4), (0, 8, 0, 0), 16, None),  # to the right border, with the padding
        ((1, 1, 2, 2), (1, 16, 3, 1), 8, None),
        ((2, 4, 5, 4), (0, 8, 0, 0), 4, None),  # less than a block
        ((0, 8, 5, 4), (2, 8, 0, 0), 8, None),
        ((2, 12, 5, 4), (0, 0, 0, 0), None, UNIMPLEMENTED),
        ((2, 4, 5, 4), (0, 4, 0, 0), None, UNIMPLEMENTED),
        ((2, 1, 5, 4), (0, 3, 0, 0), None, UNIMPLEMENTED),
        ((2, 8, 5, 4), (0, 16, 0, 0), None, INVALID),
        ((2, 8, 5, 4), (0, -8, 0, 0), None, INVALID),
        ((2, 8, 5, -1), (0, 0, 0, 0), None, INVALID),
    ],
)
def test_submemory_of_blocked_channels(sizes, offsets, padded, status):
    parent = Descriptor((2, 17, 5, 4), "f32", "nChw8c")
    theirs = OracleDescriptor.with_tag((2, 17, 5, 4), "f32", "nChw8c")
    region, refusal = attempt(lambda: parent.submemory_desc(sizes, offsets))
    if status is None:
        assert region.padded_dims()[1] == padded
        assert fields(region) == fields(theirs.submemory_desc(sizes, offsets))
        return
    with pytest.raises(OracleError) as their_refusal:
        theirs.submemory_desc(sizes, offsets)
    assert their_refusal.value.status == status
    assert type(refusal) is (NotImplementedError if status == UNIMPLEMENTED else ValueError)


def test_submemory_error_names_the_way_out():
    message = (
        "torch_blocked::Descriptor.submemory_desc: expected whole blocks of 8 along dim 1, "
        "got 4 from 4; align offset and size to the block, or reorder to a plain format first"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        Descriptor((2, 17, 5, 4), "f32", "nChw8c").submemory_desc((2, 4, 5, 4), (0, 4, 0, 0))


def test_size_of_a_submemory_is_that_of_the_buffer_it_needs():
    """oneDNN gives 0 as soon as there is an offset."""
    parent = Descriptor((4, 4), "f32", "ab")
    assert parent.submemory_desc((2, 2), (2, 2)).get_size() == parent.get_size()
    assert parent.submemory_desc((1, 1), (1, 0)).get_size() == 4 * 5
    assert parent.submemory_desc((0, 1), (1, 0)).get_size() == 0


# --- reshape ----------------------------------------------------------------------------------


@st.composite
def reshapes(draw):
    """Dims, a tag, and dims of the same volume: parts of a factor list, some of size 1 or 0."""
    factors = draw(st.lists(st.sampled_from([2, 2, 3, 4, 5]), min_size=1, max_size=4))

    def split():
        sizes, size = [], 1
        for factor in factors:
            size *= factor
            if draw(st.booleans()):
                sizes.append(size)
                size = 1
        sizes.append(size)
        for _ in range(draw(st.integers(0, 2))):
            sizes.insert(draw(st.integers(0, len(sizes))), 1)
        return sizes[:6] if math.prod(sizes[:6]) == math.prod(factors) else [math.prod(factors)]

    dims, new_dims = split(), split()
    if draw(st.integers(0, 7)) == 0:
        dims.insert(draw(st.integers(0, len(dims))), 0)
        new_dims.insert(draw(st.integers(0, len(new_dims))), 0)
    letters = "abcdefgh"[: len(dims)]
    tag = draw(st.one_of(st.just(letters), st.permutations(letters).map("".join)))
    if 0 not in dims and draw(st.integers(0, 2)) == 0:
        letter = draw(st.sampled_from(letters))
        tag = tag.replace(letter, letter.upper()) + f"{draw(st.sampled_from([2, 4, 8]))}{letter}"
    return tuple(dims), tag, tuple(new_dims)


@SETTINGS
@given(reshapes())
def test_reshape_is_accepted_and_refused_as_onednn_does(case):
    dims, tag, new_dims = case
    mine = Descriptor(dims, "f32", tag)
    if 0 in dims:
        theirs = OracleDescriptor.with_strides(dims, "f32", mine.strides())
    else:
        theirs = OracleDescriptor.with_string_tag(dims, "f32", tag)
    result, refusal = attempt(lambda: mine.reshape(new_dims))
    expected, _ = attempt(lambda: theirs.reshape(new_dims))
    if new_dims == dims:
        assert result == mine  # oneDNN may move the padding between dims of size 1
    elif expected is not None and refusal is not None:
        # oneDNN drops a padded dim of size 1 from the middle of a group, and its block with it.
        assert any(d == 1 and p != 1 for d, p in zip(dims, mine.padded_dims(), strict=True))
    elif expected is not None:
        assert fields(result) == fields(expected)
        assert result.get_size() == expected.size
    elif refusal is None:
        # oneDNN insists on the stride of a dim of size 1 inside a group; it means nothing.
        assert 1 in dims
    else:
        assert type(refusal) is ValueError
    if result is not None and 0 not in dims:
        before = [mine.offset(index) for index in indices(dims)]
        assert [result.offset(index) for index in indices(new_dims)] == before


@pytest.mark.parametrize(
    "dims, tag, new_dims, new_tag",
    [
        ((2, 3, 4), "abc", (2, 1, 3, 4), "abcd"),  # add a dim of size 1
        ((2, 1, 3, 4), "acdb", (2, 3, 4), "abc"),  # drop one
        ((6, 4), "ba", (2, 3, 4), "cab"),  # split
        ((2, 3, 4), "cab", (6, 4), "ba"),  # join
        ((2, 17, 5, 4), "nChw8c", (1, 2, 17, 5, 4), "abCde8c"),
        ((2, 17, 5, 4), "nChw8c", (2, 17, 20), "aBc8b"),
        ((2, 3), "ab", (6,), "a"),
        ((3, 0, 4), "abc", (3, 0, 2, 2), "abcd"),
        ((2, 1, 4), "bac", (8,), "a"),
    ],
)
def test_reshape(dims, tag, new_dims, new_tag):
    expected = Descriptor(new_dims, torch.int8, new_tag)
    assert Descriptor(dims, torch.int8, tag).reshape(new_dims) == expected


@pytest.mark.parametrize(
    "dims, tag, new_dims",
    [
        ((2, 3, 4), "abc", (5, 5)),  # another volume
        ((2, 3, 4), "abc", ()),
        ((2, 17, 5, 4), "nChw8c", (34, 5, 4)),  # joins a padded dim
        ((2, 16, 5, 4), "nChw8c", (2, 2, 8, 5, 4)),  # splits a blocked dim
        ((2, 1, 5, 4), "nChw8c", (2, 5, 4)),  # drops a padded dim
        ((1, 4, 1, 2), "abCd2c", (8,)),  # the same inside a group
        ((2, 3, 4), "acb", (2, 12)),  # joins dims in another order
        ((3, 0, 4), "abc", (0,)),
        ((3, 0, 4), "abc", (0, 3, 4)),
    ],
)
def test_impossible_reshapes(dims, tag, new_dims):
    with pytest.raises(ValueError, match="^torch_blocked::Descriptor.reshape: expected "):
        Descriptor(dims, "f32", tag).reshape(new_dims)


def test_join_needs_the_outer_stride_to_be_the_larger():
    """The specification says "stride[i] < stride[j] for i < j", which is the wrong way round."""
    assert Descriptor((2, 3), "f32", strides=(3, 1)).reshape((6,)).strides() == (1,)
    with pytest.raises(ValueError):
        Descriptor((2, 3), "f32", strides=(1, 2)).reshape((6,))
    with pytest.raises(ValueError):
        Descriptor((2, 3), "f32", strides=(4, 1)).reshape((6,))


def test_reshape_to_the_same_dims_changes_nothing():
    """oneDNN moves the block to the last dim of size 1 here."""
    desc = Descriptor((2, 1, 1, 1), "f32", "nChw8c")
    assert desc.reshape((2, 1, 1, 1)) == desc
    assert OracleDescriptor.with_tag((2, 1, 1, 1), "f32", "nChw8c").reshape((2, 1, 1, 1)).inner_idxs


# --- permute_axes -----------------------------------------------------------------------------


def test_permute_axes_example_of_the_specification():
    assert Descriptor((2, 3), "f32", "ab").permute_axes((1, 0)) == Descriptor((3, 2), "f32", "ba")


@SETTINGS
@given(tagged(), st.randoms(use_true_random=False))
def test_permute_axes(case, random):
    dims, tag = case
    permutation = list(range(len(dims)))
    random.shuffle(permutation)
    mine, _ = agree(
        lambda: Descriptor(dims, "f32", tag).permute_axes(permutation),
        lambda: OracleDescriptor.with_string_tag(dims, "f32", tag).permute_axes(permutation),
    )
    assert all(mine.dims()[to] == dims[axis] for axis, to in enumerate(permutation))
    inverse = [permutation.index(axis) for axis in range(len(dims))]
    assert mine.permute_axes(inverse) == Descriptor(dims, "f32", tag)


@pytest.mark.parametrize("permutation", [(0,), (0, 0), (0, 2), (-1, 0), (0, 1, 2), (), (2**31, 0)])
def test_impossible_permutations(permutation):
    with pytest.raises(ValueError, match="^torch_blocked::Descriptor"):
        Descriptor((2, 3), "f32", "ab").permute_axes(permutation)
