"""Reorders against memcpy: bytes read and written per second, and the ratio to a plain copy.

    python benchmarks/reorder.py [--megabytes 100] [--threads 1] [--rounds 15]

Copy and reorders run in interleaved rounds on the same sizes; results are verified first."""

import argparse
import ctypes
import statistics
import time

import torch

import torch_blocked

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


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    env = torch_blocked.env()
    print(f"{env['cpu']}, {env['isa']}, {env['threads']} threads, oneDNN {env['onednn']}; float32")
    print("| C | reorder | GB/s read + written | of memcpy |")
    print("|---|---|---|---|")
    for channels in CHANNELS:
        batch = max(1, round(arguments.megabytes * 1e6 / (4 * channels * SPATIAL[0] * SPATIAL[1])))
        x = torch.randn(batch, channels, *SPATIAL)
        verify(x)
        channels_last = x.to(memory_format=torch.channels_last)
        calls = {"memcpy": (2 * x.nbytes, x.clone)}
        for block in torch_blocked.native_blocks():
            calls |= rows(x, channels_last, block)
        times = {name: [] for name in calls}
        for _ in range(arguments.rounds):
            for name, (_, call) in calls.items():
                times[name].append(seconds(call))
        speeds = {name: calls[name][0] / statistics.median(times[name]) / 1e9 for name in calls}
        for name, speed in speeds.items():
            print(f"| {channels} | {name} | {speed:.1f} | {speed / speeds['memcpy']:.2f} |")


if __name__ == "__main__":
    main()
