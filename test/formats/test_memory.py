"""Memory objects, and reorders between any two descriptors."""

import ctypes
import itertools
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import onednn_oracle as oracle
from helpers.descriptor_cases import SETTINGS, agnostic_tags, indices, tagged
from helpers.implementations import forced
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_blocked as tb
from torch_blocked import _C, Descriptor, Memory

DIMS = (2, 17, 3, 4)


def values_of(memory):
    """What lies at each logical index, and all that lies elsewhere within the padding."""
    desc = memory.descriptor
    line = memory._bytes[: memory._bytes.numel() // desc.data_type().itemsize
                         * desc.data_type().itemsize].view(desc.data_type())  # fmt: skip
    at = [desc.offset(index) for index in itertools.product(*map(range, desc.dims()))]
    padded = itertools.product(*map(range, desc.padded_dims()))
    rest = set(desc.offset(index, padded=True) for index in padded) - set(at)
    return line[at].reshape(desc.dims()), line[sorted(rest)]


def filled(desc, seed=0):
    """Random values in a format, written one by one where the descriptor says."""
    dense = torch.randn(desc.dims(), generator=torch.Generator().manual_seed(seed)) * 40
    dense = dense.to(desc.data_type())
    memory = Memory(desc)
    line = memory._bytes.view(desc.data_type())
    for index in itertools.product(*map(range, desc.dims())):
        line[desc.offset(index)] = dense[index]
    return memory, dense


# --- memory objects


def test_new_memory_is_zero_and_as_large_as_the_descriptor_says():
    memory = Memory(Descriptor(DIMS, "f32", "nChw8c"))
    assert memory._bytes.numel() == 4 * 2 * 24 * 12 and not memory._bytes.any()
    y = memory.tensor()
    assert y.format == "nChw8c" and y.shape == DIMS and y._physical.data_ptr() == memory.data_handle
    assert memory.get_desc() is memory.descriptor
    assert memory.get_data_handle() == memory.data_handle
    assert repr(memory) == f"Memory({memory.descriptor}, {hex(memory.data_handle)})"


def test_a_tensor_of_a_memory_shares_it():
    x = torch.randn(DIMS)
    for tensor in (
        x,
        x.to_blocked("nChw16c"),
        x.to_blocked("nChw8c")[:, 8:16],
        tb.to_format(x, "chwn"),
        x[:, 1::2, :, 1:],
    ):
        memory = Memory.of(tensor)
        assert memory.descriptor == Descriptor.of(tensor)
        same = memory.tensor()
        assert type(same) is type(tensor) and torch.equal(same, tensor)
        same[0, 0, 0, 0] = 7
        assert tensor[0, 0, 0, 0] == 7


def test_writes_to_weights_are_seen():
    conv, x = torch.nn.Conv2d(16, 16, 3), torch.randn(1, 16, 5, 5)
    with torch.no_grad():
        conv(x.to_blocked("nChw8c"))
        Memory.of(torch.ones(16, 16, 3, 3)).reorder_into(Memory.of(conv.weight))
        torch.testing.assert_close(
            conv(x.to_blocked("nChw8c")).to_dense(), conv(x), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", ("address", "bytearray", "array", "tensor", "blocked"))
def test_handles(kind):
    desc = Descriptor(DIMS, "f32", "nChw8c")
    owner = {
        "address": lambda: ctypes.create_string_buffer(desc.get_size()),
        "bytearray": lambda: bytearray(desc.get_size()),
        "array": lambda: np.zeros(desc.get_size() // 4, np.float32),
        "tensor": lambda: torch.zeros(desc.physical_shape()),
        "blocked": lambda: tb.zeros(DIMS, format="nChw8c"),
    }[kind]()
    memory = Memory.from_handle(desc, ctypes.addressof(owner) if kind == "address" else owner)
    y = memory.tensor()
    y[1, 16, 2, 3] = 1.0
    seen = torch.frombuffer(owner, dtype=torch.float32) if kind in ("address", "bytearray") else (
        owner._physical if kind == "blocked" else torch.as_tensor(owner))  # fmt: skip
    assert seen.reshape(-1)[desc.offset((1, 16, 2, 3))] == 1 and seen.sum() == 1


def test_no_handle_is_no_memory_yet():
    memory = Memory.from_handle(Descriptor(DIMS, "f32", "nchw"), None)
    assert memory.data_handle is None and "no handle" in repr(memory)
    for call in (memory.tensor, lambda: memory.reorder_to(memory.descriptor)):
        with pytest.raises(ValueError, match=r"give it a handle by set_data_handle\(\)"):
            call()
    memory.set_data_handle(torch.ones(DIMS))
    assert memory.tensor().sum() == 2 * 17 * 12
    memory.set_data_handle(None)
    assert memory.data_handle is None


BAD_HANDLES = {
    "short": (lambda size: bytearray(size - 1), ValueError, "at least 2304 bytes"),
    "read-only": (lambda size: bytes(size), ValueError, "read-only"),
    "strided": (lambda size: np.zeros((2, size))[:, ::2], ValueError, "strided"),
    "gaps": (lambda size: torch.zeros(size, 2)[:, 0], ValueError, "side by side"),
    "null": (lambda size: 0, ValueError, "None stands for no memory yet"),
    "negative": (lambda size: -8, ValueError, "expected an address"),
    "odd": (lambda size: memoryview(bytearray(size + 1))[1:], ValueError, "multiple of 4"),
    "string": (lambda size: "0x1000", TypeError, "got str"),
    "bool": (lambda size: True, TypeError, "got bool"),
    "sparse": (lambda size: torch.zeros(size).to_sparse(), TypeError, "strided or blocked"),
    "meta": (lambda size: torch.zeros(size, device="meta"), TypeError, "memory of the CPU"),
}


@pytest.mark.parametrize("name", BAD_HANDLES)
def test_bad_handles(name):
    make, error, words = BAD_HANDLES[name]
    memory = Memory(Descriptor(DIMS, "f32", "nChw8c"))
    address = memory.data_handle
    with pytest.raises(error, match=f"^torch_blocked::Memory: .*{words}"):
        memory.set_data_handle(make(memory.descriptor.get_size()))
    assert memory.data_handle == address


def test_bad_descriptors():
    with pytest.raises(TypeError, match=r"expected a Descriptor, got Tensor; Memory.of\(tensor\)"):
        Memory(torch.zeros(2))
    with pytest.raises(ValueError, match="ask wanted_formats"):
        Memory(Descriptor(DIMS, "f32", "any"))


def test_what_no_tensor_has():
    with pytest.raises(NotImplementedError, match="expected a format that tensors have"):
        Memory(Descriptor((32, 32, 3, 3), "f32", "OIhw16i16o")).tensor()
    memory = Memory(Descriptor(DIMS, "f32", "nChw8c"))
    memory._bytes.view(torch.float32)[memory.descriptor.offset((0, 17, 0, 0), padded=True)] = 1
    with pytest.raises(ValueError, match="expected a zero tail beyond channel 17"):
        memory.tensor()


def test_zero_volume():
    memory = Memory(Descriptor((0, 17, 3, 4), "f32", "nChw8c"))
    assert memory.tensor().shape == (0, 17, 3, 4)
    assert memory.reorder_to(Descriptor((0, 17, 3, 4), "f32", "nhwc")).tensor().numel() == 0
    assert Memory(Descriptor()).reorder_to(Descriptor()).descriptor.is_zero()


# --- reorders

WEIGHTS, GROUPED = (33, 17, 3, 3), (2, 9, 17, 3, 3)
PAIRS = (
    (WEIGHTS, "oihw", "OIhw16i16o"),
    (WEIGHTS, "OIhw16i16o", "hwio"),
    (WEIGHTS, "hwio", "OIhw4i16o4i"),
    (WEIGHTS, "OIhw8i8o", "OIhw16o16i"),
    (GROUPED, "goihw", "gOIhw8i8o"),
    (GROUPED, "gOIhw16i16o", "giohw"),
    (DIMS, "nchw", "nChw16c"),
    (DIMS, "nChw16c", "nChw8c"),
    (DIMS, "chwn", "nChw4c"),
    (DIMS, "aBcd16b", "ABcd2a8b"),
    ((5, 7), "ab", "BA16a16b"),
    ((3,), "a", "A8a"),
)


@pytest.mark.parametrize("dtype", ("f32", "bf16", "s8", "f64"))
@pytest.mark.parametrize("dims, source, target", PAIRS)
def test_reorders(dims, source, target, dtype):
    if dtype == "f64" and len(dims) > 4:
        dims = (2, 3, 5, 2, 2)
    memory, dense = filled(Descriptor(dims, dtype, source))
    result = memory.reorder_to(Descriptor(dims, dtype, target))
    values, rest = values_of(result)
    assert torch.equal(values, dense) and not rest.any()
    assert torch.equal(values_of(result.reorder_to(memory.descriptor))[0], dense)


@pytest.mark.parametrize("dims, source, target", PAIRS[:7])
def test_what_is_not_onednns_does_as_it_does(dims, source, target):
    memory, _ = filled(Descriptor(dims, "f32", source))
    with forced("aten", "memory_reorder"):
        result = memory.reorder_to(Descriptor(dims, "f32", target))
    theirs = oracle.reorder(
        memory._bytes.view(torch.float32).numpy(),
        *(oracle.OracleDescriptor.with_tag(dims, "f32", tag) for tag in (source, target)),
    )
    assert np.array_equal(result._bytes.view(torch.float32).numpy(), theirs)


@settings(SETTINGS, max_examples=60)
@given(st.data(), st.sampled_from(["f32", "bf16", "s8", "f64"]))
def test_reorders_between_random_formats(data, dtype):
    dims, tag = data.draw(tagged(largest=3))
    other = data.draw(agnostic_tags(ndims=len(dims)))
    dense = torch.arange(1, math.prod(dims) + 1).remainder(100).add(1).reshape(dims)
    source = Memory(Descriptor(dims, dtype, "abcdef"[: len(dims)]))
    source.tensor().copy_(dense)
    for to in (tag, other, "abcdef"[: len(dims)]):
        source = source.reorder_to(Descriptor(dims, dtype, to))
        line = source._bytes.view(source.descriptor.data_type())
        at = [source.descriptor.offset(index) for index in indices(dims)]
        assert line[at].tolist() == dense.flatten().tolist() and line.count_nonzero() == len(at)


def test_no_reorder_is_by_a_ref_kernel():
    """By which implementation: ours, oneDNN's, and ATen where oneDNN has only `ref` or nothing."""
    by = {}
    for dims, source, target, dtype in (
        (DIMS, "nchw", "nChw16c", "f32"),
        (WEIGHTS, "oihw", "OIhw16i16o", "f32"),
        (WEIGHTS, "oihw", "OIhw16i16o", "f64"),
    ):
        Memory(Descriptor(dims, dtype, source)).reorder_to(Descriptor(dims, dtype, target))
        by[source, dtype] = _C.last_implementation("memory_reorder")
    assert by == {
        ("nchw", "f32"): "activations",
        ("oihw", "f32"): "onednn",
        ("oihw", "f64"): "aten",
    }


@pytest.mark.parametrize(
    "implementation", ("onednn", "aten")
)  # ours of activations convert nothing
def test_types_are_converted_as_onednn_does(implementation):
    numbers = [0.5, 1.5, 2.5, -0.5, -2.5, 127.4, 127.6, 300, -300, 1e10, -1e10]
    wanted = {
        "s8": [0, 2, 2, 0, -2, 127, 127, 127, -128, 127, -128],
        "u8": [0, 2, 2, 0, 0, 127, 128, 255, 0, 255, 0],
        "s32": [0, 2, 2, 0, -2, 127, 128, 300, -300, 2147483520, -(2**31)],
    }
    x = torch.tensor(numbers).reshape(1, -1, 1, 1)
    with forced(implementation, "memory_reorder"):
        for dtype, expected in wanted.items():
            result = Memory.of(x).reorder_to(Descriptor(x.shape, dtype, "nhwc")).tensor()
            assert result.flatten().tolist() == expected, dtype


def test_regions_and_rows_with_gaps():
    whole, dense = filled(Descriptor(DIMS, "f32", "nChw8c"))
    region = whole.descriptor.submemory_desc((2, 9, 2, 3), (0, 8, 1, 1))
    part = Memory.from_handle(region, whole._bytes)
    plain = part.reorder_to(Descriptor((2, 9, 2, 3), "f32", "nchw"))
    assert torch.equal(plain.tensor(), dense[:, 8:, 1:, 1:])
    plain.tensor().neg_()
    plain.reorder_into(part)
    dense[:, 8:, 1:, 1:].neg_()
    values, rest = values_of(whole)
    assert torch.equal(values, dense) and not rest.any()
    rows = Memory.of(torch.randn(3, 8)[:, :5])
    assert torch.equal(rows.reorder_to(Descriptor((3, 5), "f32", "ba")).tensor(), rows.tensor())


def test_a_region_within_a_block_leaves_the_other_channels():
    whole, dense = filled(Descriptor(DIMS, "f32", "nChw8c"))
    region = whole.descriptor.submemory_desc((2, 3, 3, 4), (0, 8, 0, 0))
    part = Memory.from_handle(region, whole._bytes)
    Memory.of(torch.ones(2, 3, 3, 4)).reorder_into(part)
    dense[:, 8:11] = 1
    assert torch.equal(values_of(whole)[0], dense)


def test_memory_may_be_reordered_onto_itself():
    x = torch.randn(2, 16, 3, 4)
    memory = Memory.of(x.clone())
    onto = Memory.from_handle(Descriptor(x.shape, "f32", "nChw8c"), memory._bytes)
    assert torch.equal(memory.reorder_into(onto).tensor(), x)


def test_broadcasts_are_read():
    row = Memory.of(torch.arange(5.0).expand(3, 5))
    assert torch.equal(row.reorder_to(Descriptor((3, 5), "f32", "ab")).tensor(), row.tensor())
    with pytest.raises(ValueError, match="elements have memory of their own"):
        row.reorder_into(row)


def test_refused_reorders():
    memory = Memory(Descriptor(DIMS, "f32", "nchw"))
    with pytest.raises(ValueError, match=re.escape("reorder: expected dims [2, 17, 3, 4] on both")):
        memory.reorder_to(Descriptor((2, 17, 12), "f32", "ncw"))
    with pytest.raises(TypeError, match="expected a Memory to write to, got Descriptor"):
        memory.reorder_into(memory.descriptor)


def test_a_reorder_is_counted():
    with tb.profile() as p:
        Memory(Descriptor(WEIGHTS, "f32", "oihw")).reorder_to(
            Descriptor(WEIGHTS, "f32", "OIhw16i16o")
        )
    assert p.reorders == 1
    assert [event.detail for event in p.events] == ["nchw f32 -> ABcd16b16a f32 [33, 17, 3, 3]"]


REORDERS = """
from torch_blocked import Descriptor, Memory
for descriptor in (Descriptor((33, 17, 3, 3), "f32", "oihw"), Descriptor((33, 17), "f32", "ab")):
    for tag in ("BA16a16b", "AB16b16a", "BA16a16b"):
        tag = tag if len(descriptor.dims()) == 2 else tag[:2] + "cd" + tag[2:]
        Memory(descriptor).reorder_to(Descriptor(descriptor.dims(), "f32", tag))
"""


def test_a_pair_of_formats_has_one_primitive():
    """oneDNN tells when it is asked for a primitive, also for one that it still has."""
    environment = os.environ | {"ONEDNN_VERBOSE": "2"}
    command = [sys.executable, "-c", REORDERS]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in out.stdout.splitlines() if ",cpu,reorder," in line]
    assert sum(",exec," in line for line in lines) == 6
    assert sum(",create:cache" in line for line in lines) == 4
