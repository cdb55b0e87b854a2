"""Sizes that could crash are refused or computed, in a process of its own.

It may use 8 GiB of address space beyond what importing took, so that what cannot be allocated fails
at once."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]

HUGE_CALLS = """
    stride-huge: convolution(stride=(HUGE, HUGE))
    padding-huge: convolution(padding=(HUGE, HUGE))
    padding-2**40: convolution(padding=(2**40, 0))
    padding-2**31: convolution(padding=(2**31, 0))
    padding-2**20: convolution(padding=(2**20, 2**20))
    dilation-huge: convolution(dilation=(HUGE, HUGE))
    dilation-2**61: convolution(dilation=(2**61, 1))
    dilation-2**62: convolution(dilation=(2**62, 2**62))
    dilation-and-padding-2**60: convolution(dilation=(2**60, 1), padding=(2**61, 1))
    dilation-and-padding-2**31: convolution(dilation=(2**31, 1), padding=(2**31, 1))
    transposed-stride-huge: convolution(weight=TRANSPOSED, transposed=True, stride=(HUGE, HUGE))
    transposed-stride-2**40: convolution(weight=TRANSPOSED, transposed=True, stride=(2**40, 1))
    transposed-dilation-huge: convolution(weight=TRANSPOSED, transposed=True, dilation=(HUGE, 1))
    groups-huge-transposed: convolution(weight=TRANSPOSED, transposed=True, groups=HUGE)
    expanded-to-2**47-bytes: ONE.expand(2**15, 2**15, 2**10, 2**5).to_blocked()
    expanded-to-2**53-bytes: ONE.expand(2**31, 2**20, 1, 1).to_blocked()
    expanded-beyond-int64: ONE.expand(2**31, 2**31, 2**31, 1).to_blocked()
    blocks-beyond-memory: ONE.expand(2**20, 1, 2**10, 2**10).to_blocked("nChw32c")
    factory: torch_blocked.zeros(2**20, 2**20, 2**10, 2**10)
    factory-beyond-int64: torch_blocked.zeros(2**40, 2**40, 2**40, 1)
    factory-negative: torch_blocked.zeros(2, -16, 9, 9)
    adaptive-huge: F.adaptive_avg_pool2d(BLOCKED, 2**31)
    interpolate-huge: F.interpolate(BLOCKED, scale_factor=2.0**40)
    interpolate-2**24: F.interpolate(BLOCKED, (2**24, 2**24))
    pad-huge: F.pad(BLOCKED, (HUGE, HUGE))
    pad-2**40: F.pad(BLOCKED, (2**40, 0))
    crop-huge: F.pad(BLOCKED, (-HUGE, -HUGE))
    max-pool-huge: F.max_pool2d(BLOCKED, 2, stride=2**62)
    max-pool-padding: F.max_pool2d(BLOCKED, 2**31, padding=2**30)
    concat-many: torch.cat([BLOCKED] * 3000, 1).sum().item()
    repeat-huge: BLOCKED.repeat(2**20, 2**20, 2**20, 1)
    transpose-huge: BLOCKED.transpose(0, 1250999896764)
    data-pointer: BLOCKED.data_ptr()
    nan-strides: torch.full((2, 16, 3, 3), float("nan")).to_blocked().to(torch.uint8)
    int8-of-inf: torch.full((2, 16, 3, 3), float("inf")).to_blocked("nChw8c", torch.int8)
"""

HARNESS = """
import faulthandler, json, os, resource, sys, warnings

faulthandler.enable()
sys.path.insert(0, "test")
import torch.nn.functional as F
from helpers.direct_calls import *
import torch_blocked

warnings.simplefilter("ignore")
BLOCKED, ONE = X.to_blocked("nChw8c"), torch.ones(1, 1, 1, 1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (8 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name, call in json.loads(sys.stdin.read()):
    print(name, end=" ", flush=True)
    try:
        eval(call)
        print("computed", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).partition(chr(10))[0], flush=True)
"""


def run_apart(calls):
    """{name: outcome}; a signal fails the test and names the call."""
    result = subprocess.run(
        [sys.executable, "-c", HARNESS],
        input=json.dumps(calls),
        env=os.environ | {"TORCH_BLOCKED_CHECK": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, f"ended in {lines[-1:]}: {result.stderr[-2000:]}"
    return dict(line.partition(" ")[::2] for line in lines)


def test_huge_sizes_are_refused_or_computed():
    rows = [row.split(": ", 1) for row in textwrap.dedent(HUGE_CALLS).split("\n") if row]
    outcomes = run_apart(rows)
    assert set(outcomes) == {name for name, _ in rows}
    kinds = {name: outcome.partition(" ")[0] for name, outcome in outcomes.items()}
    allowed = {"computed", "ValueError", "RuntimeError", "TypeError", "IndexError", "OverflowError"}
    assert set(kinds.values()) <= allowed, outcomes
    assert not [o for o in outcomes.values() if "INTERNAL ASSERT" in o], outcomes
    for name in ("expanded-to-2**47-bytes", "factory", "pad-2**40"):
        assert kinds[name] == "RuntimeError", outcomes[name]
    for name in ("padding-2**40", "padding-huge", "dilation-huge", "dilation-2**62"):
        assert kinds[name] == "ValueError", outcomes[name]
    assert kinds["concat-many"] == "computed"


def test_the_process_apart_notices_a_signal():
    with pytest.raises(AssertionError, match="ended in .'death '"):
        run_apart([("fine", "X + 1"), ("death", "os.kill(os.getpid(), 11)")])
