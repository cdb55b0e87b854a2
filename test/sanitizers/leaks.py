"""Looks for memory that the extension allocates and nobody can reach any more.

Runs under AddressSanitizer (run.py). Python, torch and oneDNN leave blocks of their own behind, so
only those count that were allocated by a call from our module."""

import ctypes
import gc
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_blocked as tb

ROUNDS = 3
PLANTED = 77777  # bytes that are lost on purpose, to see that leaks are found
# A frame of our module, of whose lines most are known: the build has made their paths relative.
OURS = re.compile(r"/_C\.| (csrc|torch/include)/")
NEAR = 3  # frames from malloc that are surely right: libraries without frame pointers end a stack


def layers():
    """Models whose layers have kernels of each kind, with their inputs."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 24, 3, padding=1, stride=2)
            self.norm = nn.BatchNorm2d(24)
            self.depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)
            self.gate = nn.Conv2d(24, 24, 1)

        def forward(self, x):
            x = torch.relu(self.norm(self.first(x)))
            x = self.depthwise(x) + x
            return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
            self.states = nn.LSTM(32, 16, batch_first=True)

        def forward(self, x):
            return self.states(self.layer(x))[0]

    yield Gated().eval(), torch.randn(2, 3, 17, 19)
    yield Tokens().eval(), torch.randn(2, 9, 32)


def optimized():
    for model, x in layers():
        fast = tb.optimize(model, x)
        fast(x)
        fast(x[:1])
        fast.plan()
        with tempfile.TemporaryDirectory() as folder:
            fast.save(Path(folder, "model.pt"))
            tb.load(Path(folder, "model.pt"))(x)
        tb.explain(model, x)
        fast.release()
        fast(x)


def eager():
    for tag in ("nChw8c", "nChw16c"):
        x = torch.randn(2, 17, 9, 11).to_blocked(tag).requires_grad_()
        weight = torch.randn(9, 17, 3, 3, requires_grad=True)
        y = torch.nn.functional.conv2d(x, weight, padding=1)
        y = torch.nn.functional.max_pool2d(torch.nn.functional.silu(y), 2)
        y = torch.nn.functional.interpolate(y, scale_factor=2.0, mode="bilinear")
        torch.softmax(y, 1).square().sum().backward()
        torch.cat([x, x], 1).permute(0, 2, 3, 1).contiguous()
        tb.clear_packed_weights()


def refused():
    """An exception leaves nothing behind either."""
    x = torch.randn(1, 8, 5, 5).to_blocked()
    calls = (
        lambda: tb.Descriptor((1, 8, 4, 4), "f32", "nChw8x"),
        lambda: torch.randn(1, 8).to_blocked("nChw8c"),
        lambda: torch.nn.functional.conv2d(x, torch.randn(4, 7, 3, 3)),
        lambda: torch.ops.torch_blocked.to_dense(torch.randn(3), 5),
        lambda: tb.optimize(torch.nn.Conv2d(8, 8, 3), torch.randn(1, 7, 5, 5)),
        lambda: tb.load(io.BytesIO(b"no model")),
    )
    for call in calls:
        try:
            call()
        except (ValueError, TypeError, RuntimeError):
            continue
        raise AssertionError("expected an exception, got a result")


def described():
    descriptor = tb.Descriptor((2, 17, 5, 6), "f32", "nChw16c")
    repr(descriptor), descriptor.physical_shape
    tb.canonical_tag("aBcd8b")


def shows_frames_of_ours() -> bool:
    """Whether a frame of our module is recognized, as reports of this build show it."""
    function = ctypes.CDLL(tb._C.__file__).PyInit__C
    address = ctypes.cast(function, ctypes.c_void_p).value
    shown = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).__sanitizer_symbolize_pc(
        ctypes.c_void_p(address + 1), b"#1 %p in %F %L", shown, len(shown)
    )
    return bool(OURS.search(shown.value.decode()))


def work():
    """In a process of its own: LeakSanitizer must have been on from its beginning."""
    if not shows_frames_of_ours():
        sys.exit("leaks.py: expected a frame of the module to be recognized; see OURS")
    torch.manual_seed(0)
    for _ in range(ROUNDS):
        for activity in (optimized, eager, refused, described):
            activity()
    gc.collect()
    ctypes.CDLL(None).malloc(PLANTED)
    ctypes.CDLL(None).__lsan_do_recoverable_leak_check()


def leaks(report: str) -> list[str]:
    """Those of our module: it is in one of the first frames."""
    blocks = re.split(r"\n(?=Direct leak|Indirect leak|SUMMARY)", report)
    return [block for block in blocks if any(map(OURS.search, block.splitlines()[1 : 1 + NEAR]))]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "leaks")
        options = os.environ["ASAN_OPTIONS"] + (
            f":detect_leaks=1:leak_check_at_exit=0:log_path={log}"
        )
        # Python's own allocator holds pointers in memory that LeakSanitizer does not read.
        within = os.environ | {"ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}
        subprocess.run([sys.executable, __file__, "work"], env=within, check=True)
        reports = "".join(each.read_text() for each in Path(folder).iterdir())
    if f"leak of {PLANTED} byte" not in reports:
        sys.exit("leaks.py: expected a report of the planted leak, got none; is ptrace allowed?")
    ours = leaks(reports)
    print(*ours, f"--- {len(ours)} leaks of the extension", sep="\n")
    return bool(ours)


if __name__ == "__main__":
    sys.exit(work() if sys.argv[1:] else main())
