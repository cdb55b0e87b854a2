"""MKL-DNN 0.95, "Understanding Memory Formats": a structure that is filled by hand."""

import pytest

from torch_blocked import Descriptor, Memory

pytestmark = pytest.mark.any_isa

DIMS = (2, 17, 5, 4)


def test_strides_by_hand():
    """`layout_desc.blocking.strides[0]` with `memory_format = mkldnn_blocked`."""
    assert Descriptor(DIMS, "f32", strides=(340, 20, 4, 1)) == Descriptor(DIMS, "f32", "nchw")


def test_blocks_by_hand():
    """`block_dims`, `padding_dims`, `strides[0]` between blocks and `strides[1]` within."""
    desc = Descriptor(
        DIMS,
        "f32",
        strides=(24 * 20, 8 * 20, 8 * 4, 8),
        inner_blks=(8,),
        inner_idxs=(1,),
        padded_dims=(2, 24, 5, 4),
        inner_strides=(1,),
    )
    assert desc == Descriptor(DIMS, "f32", "nChw8c")


def test_the_asserts_of_the_page():
    desc = Descriptor(DIMS, "f32", "nChw8c")
    assert desc.dims() == DIMS and desc.padded_dims() == (2, 24, 5, 4)
    assert desc.strides()[1] == 8 * 20 and desc.inner_strides() == (1,)
    assert desc.inner_blks() == (8,) and desc.inner_idxs() == (1,)


def test_strides_within_a_block_are_dense():
    """What oneDNN has not described since: the error says so."""
    with pytest.raises(NotImplementedError, match="oneDNN describes dense blocks only"):
        Descriptor(DIMS, "f32", strides=(960, 320, 64, 16), inner_blks=(8,), inner_idxs=(1,),
                   inner_strides=(2,))  # fmt: skip


def test_gaps_between_blocks():
    """What strides by hand are for: one more row of blocks after each image."""
    desc = Descriptor(DIMS, "f32", strides=(640, 160, 32, 8), inner_blks=(8,), inner_idxs=(1,))
    assert Memory(desc).tensor().shape == DIMS and desc.tag() is None


def test_the_size_is_asked_for():
    assert Descriptor(DIMS, "f32", "nChw8c").get_size() == 4 * 2 * 24 * 5 * 4
