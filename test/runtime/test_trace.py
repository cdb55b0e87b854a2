"""What costs time without computing is counted: reorders, weight packs, dense fallbacks and `ref`
kernels, which are refused and never run."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torch_blocked
from torch_blocked import _C
from torch_blocked.tensor import format_name

pytestmark = pytest.mark.filterwarnings("ignore:torch_blocked")

DIMS = (2, 17, 6, 5)


def dense(*dims):
    return torch.randn(dims or DIMS, generator=torch.Generator().manual_seed(0))


def counts(p):
    return {"reorders": p.reorders, "packs": p.packs, "fallbacks": p.fallbacks, "refs": p.refs}


def only(**counted):
    return {"reorders": 0, "packs": 0, "fallbacks": 0, "refs": 0} | counted


def test_a_reorder_is_counted():
    x = dense()
    with torch_blocked.profile() as p:
        blocked = x.to_blocked("nChw8c")
    assert counts(p) == only(reorders=1)
    (event,) = p.events
    assert event.kind == _C.Kind.reorder
    assert event.op == "to_blocked"
    assert event.detail == "nchw -> nChw8c [2, 17, 6, 5]"
    assert event.bytes == x.nbytes + blocked._physical.nbytes
    assert event.time_ns > 0
    assert p.reorder_ms == event.time_ns / 1e6


def test_a_fallback_is_counted():
    x = dense().to_blocked("nChw8c")
    with torch_blocked.profile() as p:
        x.renorm(2, 1, 1)
    assert counts(p) == only(fallbacks=1, reorders=1)
    fallback, reorder = p.events
    assert (fallback.kind, fallback.op) == (_C.Kind.fallback, "aten.renorm.default")
    assert fallback.detail == "nChw8c (2, 17, 6, 5): no blocked kernel for this op"
    assert (reorder.op, reorder.detail) == ("to_dense", "nChw8c -> nchw [2, 17, 6, 5]")


def test_a_pack_is_counted_once():
    x, weight = dense().to_blocked("nChw8c"), dense(8, 17, 3, 3)
    with torch_blocked.profile() as p:
        F.conv2d(x, weight)
    assert counts(p) == only(packs=1)
    assert p.events[0].op == "convolution"
    assert p.events[0].bytes > weight.nbytes
    with torch_blocked.profile() as p:
        F.conv2d(x, weight)
    assert counts(p) == only()


@pytest.mark.parametrize("block", (4, 32))
def test_a_ref_kernel_is_counted_and_refused(block):
    """On every ISA oneDNN has only ref:any for this in 4c and 32c, and we have nothing faster."""
    x, weight = dense(1, 32, 9, 9), dense(32, 32, 3, 3)
    blocked = x.to_blocked(format_name(4, block))
    with torch_blocked.profile() as p:
        result = F.conv2d(blocked, weight, dilation=4)
    assert p.refs >= 1
    assert {event.detail.partition(":")[0] for event in p._of(_C.Kind.ref)} == {"ref"}
    expected = F.conv2d(x, weight, dilation=4)
    torch.testing.assert_close(result.to_dense(), expected, rtol=1e-4, atol=1e-4)
    with torch_blocked.profile() as p:
        F.conv2d(blocked, weight, dilation=4)
    assert p.refs == 0, "the refusal was not remembered"


def test_nothing_is_recorded_outside():
    with torch_blocked.profile() as p:
        pass
    x = dense().to_blocked()
    x.renorm(2, 1, 1)
    assert p.events == []
    assert counts(p) == only()


def test_totals_always_count():
    before = _C.trace_totals()
    dense().to_blocked().renorm(2, 1, 1)
    after = _C.trace_totals()
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 0, 1, 0]


def test_profiles_nest():
    x = dense()
    with torch_blocked.profile() as outer:
        blocked = x.to_blocked()
        with torch_blocked.profile() as inner:
            blocked.to_dense()
        with torch_blocked.profile() as second:
            pass
        blocked.to_dense()
    assert (outer.reorders, inner.reorders, second.reorders) == (3, 1, 0)
    assert [event.op for event in outer.events] == ["to_blocked", "to_dense", "to_dense"]


def test_a_profile_ends_with_its_block_when_that_raises():
    with pytest.raises(ValueError, match="stop"), torch_blocked.profile() as p:
        dense().to_blocked()
        raise ValueError("stop")
    assert p.reorders == 1
    dense().to_blocked()
    assert p.reorders == 1


def test_profiles_end_in_any_order():
    outer, inner = torch_blocked.profile(), torch_blocked.profile()
    outer.__enter__()
    inner.__enter__()
    dense().to_blocked()
    outer.__exit__(None, None, None)
    dense().to_blocked()
    inner.__exit__(None, None, None)
    assert (outer.reorders, inner.reorders) == (1, 2)


def test_all_threads_are_recorded():
    def work():
        for _ in range(50):
            dense().to_blocked().renorm(2, 1, 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with torch_blocked.profile() as p:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts(p) == only(reorders=400, fallbacks=200)


def test_profiles_of_threads_do_not_disturb_each_other():
    failures = []

    def work():
        for _ in range(50):
            with torch_blocked.profile() as p:
                dense().to_blocked()
            if p.reorders < 1:
                failures.append(p.table())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_blocked_network_reorders_at_its_ends_only():
    x = dense(2, 16, 14, 14)
    weights = [dense(16, 16, 3, 3) / 12 for _ in range(3)]
    with torch.no_grad(), torch_blocked.profile() as p:
        y = x.to_blocked()
        for weight in weights:
            y = F.relu(F.conv2d(y, weight, padding=1)) + y
        F.max_pool2d(y, 2).to_dense()
    assert (p.reorders, p.fallbacks, p.refs) == (2, 0, 0), p.table()


# --- ref kernels never run

RUN_PROBLEMS = """
import warnings
import torch
import torch_blocked
from torch_blocked.tensor import format_name
from helpers.problems import PROBLEMS, dims_of, make_tensors

warnings.simplefilter("ignore")
with torch.no_grad():
    for problem in PROBLEMS:
        for channels in (3, 16, 17):
            for block in (4, 8, 16, 32):
                dense, *operands = make_tensors(problem, dims_of(problem, 2, channels))
                problem.run(dense.to_blocked(format_name(dense.dim(), block)), *operands)
    for dims in ((2, 17, 9), (2, 17, 9, 7), (2, 17, 3, 4, 5)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8):
            for block in (4, 8, 16, 32):
                dense = torch.ones(dims, dtype=dtype)
                blocked = dense.to_blocked(format_name(len(dims), block))
                for other in (4, 8, 16, 32):
                    blocked.to_blocked(format_name(len(dims), other), torch.float32)
                    blocked.to_blocked(format_name(len(dims), other)).to_dense()
    for groups in (2, 4, 8, 16, 32):
        for block in (8, 16):
            x = torch.ones(1, 32, 9, 9).to_blocked(format_name(4, block))
            torch.nn.functional.conv2d(x, torch.ones(64, 32 // groups, 3, 3), groups=groups)
"""


def test_no_ref_kernel_ever_runs():
    """oneDNN itself says which implementations it executed."""
    result = subprocess.run(
        [sys.executable, "-c", RUN_PROBLEMS],
        env=os.environ | {"ONEDNN_VERBOSE": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split(",") for line in result.stdout.splitlines() if ",exec,cpu," in line]
    # onednn_verbose,exec,cpu,<primitive>,<implementation>,...
    executed = {(primitive, name) for _, _, _, primitive, name, *_ in lines}
    assert {"convolution", "reorder"} <= {primitive for primitive, _ in executed}
    assert len(lines) > 100
    # A name may have parts: "conv:any+ref:any".
    slow = {row for row in executed if re.search(r"\b(ref|simple)\b", row[1])}
    assert not slow
