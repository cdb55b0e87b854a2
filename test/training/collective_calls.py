"""Collectives of two processes on blocked tensors, compared with the same on dense ones.

python collective_calls.py FILE RANK: run by test_collectives.py once for each rank. Prints a line
for each call: its name and "right", "wrong" or the error."""

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

import torch_blocked  # noqa: F401

RANK = 0


def values(seed: int = 0, channels: int = 17, images: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + RANK)
    return torch.randn(images, channels, 2, 3, generator=generator)


def wait(work):
    work.wait()


def poll(work):
    while not work.is_completed():
        pass


def by_future(work):
    work.get_future().wait()


def all_gather(make, size=2):
    into = [make(i) for i in range(size)]
    dist.all_gather(into, make(5))
    return into


def all_gather_from_dense(make):
    into = [make(i) for i in range(2)]
    dist.all_gather(into, values(5))
    return into


def gather(make):
    into = [make(i) for i in range(2)] if RANK == 0 else None
    x = make(5)
    dist.gather(x, into, dst=0)
    return [*(into or []), x]


def scatter(make, source=None):
    x, given = make(5), [(source or make)(i) for i in range(2)]
    dist.scatter(x, given if RANK == 0 else None, src=0)
    return [x, *given]


def reduce_scatter(make):
    x, given = make(5), [make(i) for i in range(2)]
    dist.reduce_scatter(x, given)
    return [x, *given]


def all_to_all(make):
    into, given = [make(7), make(8)], [make(i) for i in range(2)]
    dist.all_to_all(into, given)
    return [*into, *given]


def pairwise(make, finish):
    """Both receive first: neither may wait in irecv."""
    x, y = make(1), make(2)
    works = [dist.irecv(x, 1 - RANK), dist.isend(y, 1 - RANK)]
    for work in works:
        finish(work)
    return [x, y]


def send_and_receive(make, source):
    x = make(1)
    if RANK == 0:
        dist.send(x, 1)
        return [x]
    sender = dist.recv(x, source)
    return [x, torch.tensor(float(sender))]


def batched(make):
    x, y = make(1), make(2)
    operations = [dist.P2POp(dist.irecv, x, 1 - RANK), dist.P2POp(dist.isend, y, 1 - RANK)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [x, y]


def crossed(make):
    """The ranks wait in another order than they began."""
    x, y = make(1), make(2)
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    for work in (first, second) if RANK else (second, first):
        work.wait()
    return [x, y]


def with_others(make):
    """A send between the begin of a collective and the wait for it."""
    x, y = make(1), make(2)
    if RANK == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(y, 1)
    else:
        dist.recv(y, 0)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    return [x, y]


def into_tensor(make, finish=None):
    x, y = make(1, images=4), make(2)
    work = dist.all_gather_into_tensor(x, y, async_op=finish is not None)
    if finish:
        finish(work)
    return [x, y]


def scatter_tensor(make):
    x, y = make(1), make(2, images=4)
    dist.reduce_scatter_tensor(x, y)
    return [x, y]


def all_to_all_single(make):
    x, y = make(1), make(2)
    dist.all_to_all_single(x, y)
    return [x, y]


def in_place(call):
    def run(make):
        x = make(1)
        call(x)
        return [x]

    return run


def of_part(part, images=2):
    def run(make):
        x = make(1, images=images)
        other, shown = x[0, 1], part(x)
        dist.all_reduce(shown)
        return [x, shown, other]

    return run


def coalesced(make):
    xs = [make(1), make(2, channels=3)]
    dist.all_reduce_coalesced(xs)
    return xs


def functionals(make):
    x = make(1)
    return [
        functional.all_reduce(x, "sum", dist.group.WORLD) + 0,
        functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0,
        functional.broadcast(x, 1, dist.group.WORLD) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0,
        x,
    ]


def functional_in_place(make):
    x, name = make(1), dist.group.WORLD.group_name
    y = torch.ops._c10d_functional.all_reduce_(x, "sum", name)
    z = torch.ops._c10d_functional.wait_tensor(y)
    return [x, y, z]


def with_gradient(make):
    x = make(1).requires_grad_()
    y = differentiable.all_reduce(x * 2)
    (y * y).sum().backward()
    return [y.detach(), x.grad]


def in_parallel(make):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(17, 5, 1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 1))
    net = nn.parallel.DistributedDataParallel(net)
    x = make(1).requires_grad_()
    net(x).square().sum().backward()
    return [x.grad, *(each.grad for each in net.parameters())]


def complex_values(make):
    x = make(1)
    x = torch.complex(x.to_dense(), -x.to_dense())
    x = x.to_blocked() if make is blocked else x
    dist.all_reduce(x)
    return [torch.view_as_real(x.to_dense())]


CALLS = {
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce max": in_place(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)),
    "all_reduce, waited for": in_place(lambda x: wait(dist.all_reduce(x, async_op=True))),
    "all_reduce, polled": in_place(lambda x: poll(dist.all_reduce(x, async_op=True))),
    "all_reduce, by its future": in_place(lambda x: by_future(dist.all_reduce(x, async_op=True))),
    "all_reduce of channels": of_part(lambda x: x[:, 3:12], images=1),
    "all_reduce of an image": of_part(lambda x: x[1:]),
    "all_reduce of a view": of_part(lambda x: x[1]),
    "all_reduce of a permuted view": of_part(lambda x: x.permute(1, 0, 2, 3), images=1),
    "all_reduce of complex values": complex_values,
    "all_reduce_coalesced": coalesced,
    "broadcast": in_place(lambda x: dist.broadcast(x, 1)),
    "reduce": in_place(lambda x: dist.reduce(x, 0)),
    "crossed": crossed,
    "between": with_others,
    "send, recv": lambda make: send_and_receive(make, 0),
    "send, recv from any": lambda make: send_and_receive(make, None),
    "isend, irecv": lambda make: pairwise(make, wait),
    "batch_isend_irecv": batched,
    "all_gather": all_gather,
    "all_gather of dense": all_gather_from_dense,
    "gather": gather,
    "scatter": scatter,
    "scatter of dense": lambda make: scatter(make, values),
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_gather_into_tensor": into_tensor,
    "all_gather_into_tensor, waited for": lambda make: into_tensor(make, wait),
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": scatter_tensor,
    "functional": functionals,
    "functional in place": functional_in_place,
    "differentiable": with_gradient,
    "DistributedDataParallel": in_parallel,
}


# PyTorch's dispatcher does not look into lists of lists: without another blocked argument these end
# at the memory, which is refused.
REFUSED = {
    "scatter into dense": lambda x, group: dist.scatter(x, [blocked()], group=group, src=RANK),
    "reduce_scatter into dense": lambda x, group: dist.reduce_scatter(x, [blocked()], group=group),
}


def blocked(seed: int = 0, **sizes: int) -> Tensor:
    return values(seed, **sizes).to_blocked("nChw8c")


def outcome(call) -> str:
    torch.manual_seed(RANK)
    try:
        expected = call(values)
    except RuntimeError as error:  # gloo lacks it
        expected = error
    dist.barrier()
    try:
        got = call(blocked)
    except RuntimeError as error:
        if isinstance(expected, RuntimeError) and type(error) is type(expected):
            return "right"
        return f"{type(error).__name__} {str(error).splitlines()[0]}"
    if isinstance(expected, RuntimeError):
        return f"no error, though dense gives {expected}"
    close = [torch.allclose(a.to_dense(), b, atol=1e-5) for a, b in zip(got, expected, strict=True)]
    return "right" if all(close) else f"wrong {close}"


def main(file: str, rank: int) -> None:
    global RANK
    RANK = rank
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{file}", timeout=timedelta(seconds=120), rank=rank, world_size=2
    )
    for name, call in CALLS.items():
        dist.barrier()
        print(f"{name}: {outcome(call)}", flush=True)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    for name, call in REFUSED.items():
        try:
            x = torch.zeros(2, 17, 2, 3)
            call(x, alone)
        except RuntimeError as error:
            print(f"{name}: {'refused' if 'to_dense()' in str(error) else error}", flush=True)
        else:
            print(f"{name}: {'right' if x.equal(values()) else 'wrong'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
