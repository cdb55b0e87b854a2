"""Memory descriptors of ours beside oneDNN's: random tags and dims, and what must be equal."""

import itertools
import re

import torch
from hypothesis import settings
from hypothesis import strategies as st

from helpers.onednn_oracle import OracleError
from torch_blocked.descriptor import Descriptor, canonical_tag

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)
DTYPES = {
    torch.float16: ("f16", 2),
    torch.bfloat16: ("bf16", 2),
    torch.float32: ("f32", 4),
    torch.int32: ("s32", 4),
    torch.int8: ("s8", 1),
    torch.uint8: ("u8", 1),
    torch.float64: ("f64", 8),
}
INVALID, UNIMPLEMENTED = 2, 3  # dnnl_status_t
REFUSALS = (ValueError, NotImplementedError)


def indices(dims):
    return itertools.product(*map(range, dims))


def relevant(strides, padded_dims):
    """Strides without those of dims of size 1, which carry no information."""
    return [s for s, dim in zip(strides, padded_dims, strict=True) if dim != 1]


def fields(desc):
    """What describes a descriptor, ours or oneDNN's."""
    if isinstance(desc, Descriptor):
        strides, values = desc.strides(), [
            desc.dims(), desc.padded_dims(), desc.padded_offsets(), desc.submemory_offset(),
            desc.inner_blks(), desc.inner_idxs(),
        ]  # fmt: skip
    else:
        strides, values = desc.strides, [
            desc.dims, desc.padded_dims, desc.padded_offsets, desc.submemory_offset,
            desc.inner_blks, desc.inner_idxs,
        ]  # fmt: skip
    return [*values, relevant(strides, values[1])]


def attempt(make):
    """(result, exception) of a call that may be refused."""
    try:
        return make(), None
    except (*REFUSALS, OracleError) as error:
        return None, error


def agree(ours, theirs):
    """Both accept with the same descriptor, or both refuse. -> (our descriptor, oneDNN's)."""
    mine, my_error = attempt(ours)
    their, their_error = attempt(theirs)
    assert (my_error is None) == (their_error is None), (my_error, their_error)
    if mine is not None:
        assert fields(mine) == fields(their)
    return mine, their


def rank(tag):
    return len(re.match("[A-Za-z]*", canonical_tag(tag))[0])


@st.composite
def agnostic_tags(draw, ndims=None):
    letters = "abcdefghijkl"[: ndims or draw(st.integers(1, 6))]
    inner = draw(st.lists(st.tuples(st.sampled_from([2, 3, 4, 8, 16]), st.sampled_from(letters)),
                          max_size=3))  # fmt: skip
    blocked = {letter for _, letter in inner}
    outer = "".join(c.upper() if c in blocked else c for c in draw(st.permutations(letters)))
    return outer + "".join(f"{size}{letter}" for size, letter in inner)


@st.composite
def tagged(draw, smallest=1, largest=20):
    tag = draw(agnostic_tags())
    size = st.integers(smallest, largest)
    return tuple(draw(st.lists(size, min_size=rank(tag), max_size=rank(tag)))), tag
