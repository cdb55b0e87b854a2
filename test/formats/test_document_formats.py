"""oneDNN, "Understanding Memory Formats" (v3): each promise of the page, shown."""

import itertools

import pytest
import torch

import torch_blocked as tb
from torch_blocked import Descriptor

pytestmark = pytest.mark.any_isa

N, C, H, W = DIMS = (2, 16, 5, 4)
INDICES = list(itertools.product(*map(range, DIMS)))
FORMULAS = {
    "nchw": lambda n, c, h, w: n * C * H * W + c * H * W + h * W + w,
    "nhwc": lambda n, c, h, w: n * H * W * C + h * W * C + w * C + c,
    "chwn": lambda n, c, h, w: c * H * W * N + h * W * N + w * N + n,
    "nChw8c": lambda n, c, h, w: n * C * H * W + c // 8 * H * W * 8 + h * W * 8 + w * 8 + c % 8,
}


@pytest.mark.parametrize("tag", FORMULAS)
def test_offsets(tag):
    desc = Descriptor(DIMS, "f32", tag)
    assert all(desc.offset(index) == FORMULAS[tag](*index) for index in INDICES)


def test_the_worked_example_in_memory():
    """Values that are their own offsets in nchw lie where each format says."""
    x = torch.arange(float(N * C * H * W)).reshape(DIMS)
    for tag, formula in FORMULAS.items():
        y = tb.to_format(x, tag)
        line = (y._physical if tb.is_blocked(y) else y).as_strided((x.numel(),), (1,))
        assert all(line[formula(*index)] == x[index] for index in INDICES[::7])


def test_plain_formats_are_strides():
    for tag, strides in (
        ("nchw", (C * H * W, H * W, W, 1)),
        ("nhwc", (H * W * C, 1, W * C, C)),
        ("chwn", (1, H * W * N, W * N, N)),
    ):
        assert Descriptor(DIMS, "f32", tag).strides() == strides
        assert Descriptor(DIMS, "f32", strides=strides) == Descriptor(DIMS, "f32", tag)


def test_strides_say_sub_tensors_and_leading_dimensions():
    assert Descriptor((3, 4), "f32", strides=(10, 1)).offset((2, 3)) == 23
    whole = torch.randn(2, 32, 5, 4)
    assert Descriptor.of(whole[:, 8:24]).strides() == (32 * 20, 20, 4, 1)


def test_upper_case_is_the_outer_dim_and_a_number_the_block():
    assert tb.canonical_tag("nChw8c") == "aBcd8b" and tb.canonical_tag("nCw16c") == "aBc16b"
    for wrong in ("NCHW16c", "nChw8", "nhwc8c"):
        with pytest.raises(ValueError):
            tb.canonical_tag(wrong)


def test_walk_of_nChw8c():
    """8 channels of a pixel, the next pixel, the plane, the next 8 channels, the next image."""
    assert Descriptor(DIMS, "f32", "nChw8c").strides() == (C * H * W, H * W * 8, W * 8, 8)
    assert tb.physical_shape(DIMS, "nChw8c") == (2, 2, 5, 4, 8)


def test_several_dims_may_be_blocked():
    desc = Descriptor((32, 32, 3, 3), "f32", "OIhw4i16o4i")
    assert (desc.inner_blks(), desc.inner_idxs()) == ((4, 16, 4), (1, 0, 1))


@pytest.mark.parametrize("spatial", ("w", "hw", "dhw"))
@pytest.mark.parametrize("block", (4, 8, 16, 32))
def test_blocks_of_activations(spatial, block):
    x = torch.randn(2, 17, *(3,) * len(spatial))
    y = x.to_blocked(f"nC{spatial}{block}c")
    assert torch.equal(y.to_dense(), x)


def test_17_channels():
    desc = Descriptor((N, 17, H, W), "f32", "nChw8c")
    assert desc.dims() == (N, 17, H, W) and desc.padded_dims() == (N, 24, H, W)
    assert desc.strides() == (24 * H * W, H * W * 8, W * 8, 8)
    assert (desc.inner_nblks(), desc.inner_idxs(), desc.inner_blks()) == (1, (1,), (8,))
    assert desc.get_size() == 4 * N * 24 * H * W > 4 * N * 17 * H * W


@pytest.mark.parametrize("name", ("exp", "cos", "sigmoid", "log", "neg", "relu"))
def test_outputs_are_zero_padded(name):
    y = getattr(torch, name)(torch.rand(2, 17, 3, 3).to_blocked("nChw8c"))
    assert tb.is_blocked(y) and not y._physical[:, -1, ..., 1:].any()


def test_queries_of_v3():
    desc = Descriptor(DIMS, "f32", "nChw8c")
    assert desc.get_dims() == desc.dims() and desc.get_strides() == desc.strides()
    assert desc.get_padded_dims() == DIMS and desc.get_padded_offsets() == (0, 0, 0, 0)
    assert desc.get_inner_blks() == (8,) and desc.get_inner_idxs() == (1,)
    assert desc.get_data_type() == torch.float32 and desc.get_format_kind() == "blocked"


def test_memory_formats_of_the_code():
    """The page's C++: memory with a descriptor and a handle, and reorders between formats."""
    x = torch.randn(DIMS)
    memory = tb.Memory.of(x).reorder_to(Descriptor(DIMS, "f32", "nChw8c"))
    assert torch.equal(memory.tensor(), x.to_blocked("nChw8c"))
