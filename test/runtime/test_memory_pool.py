"""Memory of large blocked tensors is kept and given to the next ones, within bounds."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import torch_blocked
from torch_blocked import _C

pytestmark = pytest.mark.any_isa

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def empty_pool():
    gc.collect()
    _C.release_pool()
    yield
    _C.release_pool()


def blocked(megabytes, fill=1.0):
    """A physical tensor of that size."""
    like = torch.empty(megabytes * 8, 1, 64, 64, 8)
    return torch.ops.torch_blocked.empty_like(like).fill_(fill)


def test_clones_take_memory_that_is_used_again():
    """Autograd clones what an in-place activation overwrites."""
    source = torch.ones(1, 16, 256, 256).to_blocked()
    gone = torch_blocked.to_blocked(torch.zeros(1, 16, 256, 256))
    address = gone._physical.data_ptr()
    del gone
    clone = source.clone()
    assert clone._physical.data_ptr() == address and torch.equal(clone, source)


def test_large_memory_is_used_again():
    first = blocked(8)
    address = first.data_ptr()
    assert _C.idle_pool_bytes() == 0
    del first
    assert _C.idle_pool_bytes() == 8 * MEGABYTE
    second = blocked(7)  # a little smaller
    assert second.data_ptr() == address
    assert _C.idle_pool_bytes() == 0


def test_parts_of_what_died_are_used_and_joined_again():
    large = blocked(32)
    begin = large.data_ptr()
    del large
    # What is left is more than a quarter above each request, or all of it would be given at once.
    parts = [blocked(megabytes, fill) for fill, megabytes in enumerate((8, 16, 8))]
    assert _C.idle_pool_bytes() == 0
    offsets = sorted(each.data_ptr() - begin for each in parts)
    assert offsets == [0, 8 * MEGABYTE, 24 * MEGABYTE]
    assert all((part == fill).all() for fill, part in enumerate(parts))
    del parts
    idle = _C.idle_pool_bytes()
    joined = blocked(30)
    # Idle memory that lies just below is joined, too.
    assert begin - 30 * MEGABYTE < joined.data_ptr() < begin + 32 * MEGABYTE
    assert _C.idle_pool_bytes() <= idle - 30 * MEGABYTE


def test_small_memory_is_not_pooled():
    tensor = torch_blocked.empty(1, 8, 64, 64, format="nChw8c")
    del tensor
    assert _C.idle_pool_bytes() == 0


def test_what_is_kept_is_bounded():
    """At most one and a quarter of the most that was in use, of sizes that fit no other."""
    for megabytes in (4, 8, 14, 30, 40, 10):
        tensor = blocked(megabytes)
        del tensor
        assert _C.idle_pool_bytes() <= 50 * MEGABYTE
    assert _C.idle_pool_bytes() >= 40 * MEGABYTE
    _C.release_pool()
    assert _C.idle_pool_bytes() == 0


def test_tensors_alive_never_share():
    tensors = [blocked(megabytes, fill) for fill, megabytes in enumerate((2, 4, 2, 8, 2))]
    del tensors[1]
    tensors += [blocked(4, 9.0), blocked(3, 10.0)]
    addresses = {tensor.data_ptr() for tensor in tensors}
    assert len(addresses) == len(tensors)
    for tensor, fill in zip(tensors, (0, 2, 3, 4, 9, 10), strict=True):
        assert (tensor == fill).all()


def test_threads_take_and_give():
    wrong = []

    def work(seed):
        for turn in range(20):
            tensor = blocked(2 + (seed + turn) % 3, seed)
            if not (tensor == seed).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("op", ("add", "mul", "relu", "silu", "hardtanh"))
def test_pooled_results_and_gradients(op):
    """Large ones, broadcasting operands and other dtypes: the values of the dense op."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 17, 64, 72, generator=generator)
    others = [torch.randn(dims, generator=generator) for dims in (x.shape, (1, 17, 1, 1), ())]
    others.append(others[0].double())
    if op not in ("add", "mul"):
        others = [None]
    for other in others:
        function = getattr(torch, op) if other is not None else getattr(F, op)
        for swapped in (False, True) if other is not None else (False,):
            results = []
            for tag in (None, "nChw16c"):
                leaf = x.clone().requires_grad_()
                value = leaf if tag is None else torch_blocked.to_blocked(leaf, tag)
                operands = [value] if other is None else [value, other]
                y = function(*(reversed(operands) if swapped else operands))
                y = y.to_dense() if torch_blocked.is_blocked(y) else y
                y.square().sum().backward()
                results += [y.detach(), leaf.grad]
            torch.testing.assert_close(results[2], results[0])
            torch.testing.assert_close(results[3], results[1])


def test_requests_that_nobody_could_serve_keep_nothing():
    """What the system refused was never in use: no more idle memory is kept for it."""
    code = (
        "import resource, torch, torch_blocked\n"
        "from torch_blocked import _C\n"
        "def empty(megabytes):\n"
        "    like = torch.empty(1).expand(megabytes * 8, 1, 64, 64, 8)\n"
        "    torch.ops.torch_blocked.empty_like(like)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20),) * 2)\n"
        "refused = 0\n"
        "for _ in range(20):\n"
        "    try:\n"
        "        empty(1024)\n"
        "    except RuntimeError:\n"
        "        refused += 1\n"
        "assert refused == 20, refused\n"
        "sizes = [10, 60, 90, 130, 200]\n"
        "for megabytes in sizes:\n"
        "    empty(megabytes)\n"
        "    assert _C.idle_pool_bytes() <= megabytes * 1.25 * 2**20, _C.idle_pool_bytes()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_off_switch():
    code = (
        "import torch_blocked; from torch_blocked import _C\n"
        "x = torch_blocked.empty(64, 8, 64, 64, format='nChw8c'); del x\n"
        "assert _C.idle_pool_bytes() == 0"
    )
    environment = os.environ | {"TORCH_BLOCKED_POOL": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
