"""The Chinese translation of "Understanding Memory Formats": what it alone has, and its errata."""

from pathlib import Path

import pytest

from torch_blocked import Descriptor

pytestmark = pytest.mark.any_isa

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
SOURCES = " ".join(PAGE.read_text().split())


def test_indices_are_below_the_dims():
    """`0 <= n < n` is `0 <= n < N`."""
    desc = Descriptor((2, 17, 5, 4), "f32", "nchw")
    assert desc.offset((1, 16, 4, 3)) == 679
    with pytest.raises(ValueError, match="expected an index inside dims"):
        desc.offset((2, 0, 0, 0))


def test_blocks_that_are_full_are_counted_by_rounding_down():
    assert 17 // 8 * 8 == 16 and Descriptor((1, 17), "f32", "aB8b").padded_dims() == (1, 24)


def test_the_paper_and_the_readings_are_named():
    for words in (
        "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent",
        "1602.06709",
        "Shapes and Layout",
        "Maximize TensorFlow Performance",
        "Memory Format Propagation",
    ):
        assert words in SOURCES
