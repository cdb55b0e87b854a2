"""A training step on blocked tensors, shared among processes: the gradients of a single process.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py

Each process takes its part of the batch, first through DistributedDataParallel, then through FSDP2,
and compares its gradients with those of the whole batch in one process. Exits with 1 if they
differ, if a gradient is blocked, or if an op ran on a dense copy."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_blocked

BATCH = 8
TOLERANCE = 1e-4  # of a gradient's norm


def build() -> nn.Module:
    """Without batch norm, whose statistics depend on how the batch is shared."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1, groups=24),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 40, 3, padding=1),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(40, 10),
    )


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FSDP2": sharded,
}


def step(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Forward and backward on a blocked input."""
    nn.functional.cross_entropy(model(images.to_blocked()), labels).backward()


def whole(gradient: Tensor) -> Tensor:
    """A gradient of FSDP2 is a DTensor, of which each process holds a part."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def error(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of a gradient, relative to its norm; infinite if one is blocked."""
    errors = []
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        gradient, expected = whole(ours_p.grad), theirs_p.grad
        if torch_blocked.is_blocked(gradient):
            return float("inf")
        errors.append(((gradient - expected).norm() / expected.norm()).item())
    return max(errors)


def main() -> int:
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 24, 24, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    single = build()
    step(single, images, labels)
    all_good = True
    for name, parallel in WAYS.items():
        model = build()
        with torch_blocked.profile() as p:
            step(parallel(model), images.chunk(count)[rank], labels.chunk(count)[rank])
        largest = error(model, single)
        good = largest < TOLERANCE and p.fallbacks == 0
        all_good &= good
        print(
            f"{name}, process {rank} of {count}: gradients within {largest:.0e} of one process, "
            f"{p.fallbacks} dense copies: {'good' if good else 'WRONG'}",
            flush=True,
        )
    return 0 if all_good else 1


def leave(status: int) -> None:
    """Ends the process: all processes together, and without torch's own clean-up.

    The models hold the process group and go first. Nobody leaves while another still waits for it.
    Then os._exit: on the gloo backend torch 2.13 may abort while the interpreter ends, dense
    models too, because threads of the process group outlive what they use."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
