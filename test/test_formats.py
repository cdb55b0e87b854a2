"""Formats by their names and tags."""

import re

import pytest

import torch_blocked
from torch_blocked import _C, Descriptor

SIZES = (2, 3, 4, 5, 6, 7)

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
