"""Reorders against memcpy: bytes read and written per second, and the ratio to a plain copy.

    python benchmarks/reorder.py [--megabytes 100] [--threads 1] [--rounds 15]

Copy and reorders run in interleaved rounds on the same sizes; results are verified first."""

import ctypes
import sys

import harness
import torch

import torch_blocked
from torch_blocked.bench.measure import on_threads, time_interleaved

SPATIAL = (56, 56)
CHANNELS = (64, 256, 252, 3)  # whole blocks, more of them, a tail, a picture


def rows(x, channels_last, block):
    """Name, bytes read and written, and call of each reorder of x [N, C, H, W]."""
    ops, channels = torch.ops.torch_blocked, x.shape[1]
    blocked = ops.to_blocked(x, block)
    other = 24 - block  # 16 <-> 8
    size = x.nbytes + blocked.nbytes
    both = blocked.nbytes + ops.to_blocked(x, other).nbytes
    tag = f"nChw{block}c"
    return {
        f"nchw -> {tag}": (size, lambda: ops.to_blocked(x, block)),
        f"{tag} -> nchw": (size, lambda: ops.to_dense(blocked, channels)),
        f"nhwc -> {tag}": (size, lambda: ops.to_blocked(channels_last, block)),
        f"{tag} -> nhwc": (size, lambda: ops.to_dense(blocked, channels, channels_last=True)),
        f"{tag} -> nChw{other}c": (both, lambda: ops.reblock(blocked, channels, other)),
    }


def verify(x):
    for block in torch_blocked.native_blocks():
        y = x.to_blocked(f"nChw{block}c")
        assert torch.equal(y.to_dense(), x)
        assert torch.equal(y.to_dense(memory_format=torch.channels_last), x)
        channels_last = x.to(memory_format=torch.channels_last)
        assert torch.equal(channels_last.to_blocked(y.format).to_dense(), x)


def keep_freed_memory():
    """Fresh memory costs a page fault each 4 KB, as much as the copy and the same for all: glibc is
    told to keep what is freed (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, -1)


def speeds(channels, megabytes, rounds):
    """Rows of the table."""
    batch = max(1, round(megabytes * 1e6 / (4 * channels * SPATIAL[0] * SPATIAL[1])))
    x = torch.randn(batch, channels, *SPATIAL)
    verify(x)
    channels_last = x.to(memory_format=torch.channels_last)
    calls = {"memcpy": (2 * x.nbytes, x.clone)}
    for block in torch_blocked.native_blocks():
        calls |= rows(x, channels_last, block)
    times = time_interleaved({name: call for name, (_, call) in calls.items()}, rounds)
    found = {name: calls[name][0] / times[name].median_ms / 1e6 for name in calls}
    return [
        [str(channels), name, f"{speed:.1f}", f"{speed / found['memcpy']:.2f}"]
        for name, speed in found.items()
    ]


def main(argv=None):
    parser = harness.parser(__doc__, rounds=15)
    parser.add_argument("--megabytes", type=float, default=100, help="default: 100")
    args = parser.parse_args(argv)
    keep_freed_memory()
    with on_threads(args.threads):
        cells = [row for each in CHANNELS for row in speeds(each, args.megabytes, args.rounds)]
    header = ("C", "reorder", "GB/s read + written", "of memcpy")
    table = harness.Table("", header, cells, text_columns=2)
    harness.finish(args, [table], dtype="float32", megabytes=args.megabytes, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
