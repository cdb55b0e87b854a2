"""Who asks a blocked tensor, or a view of one, for raw memory gets dense values, or an error that
names the way out: never other values, never a signal."""

import ctypes
import io
import pickle
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch
from torch import Tensor

import torch_blocked as tb
from torch_blocked.tensor import BlockedTensor

pytestmark = pytest.mark.any_isa

CHANNELS = (9, 16, 17)


def pair(channels: int = 17) -> tuple[Tensor, BlockedTensor]:
    dense = torch.arange(2.0 * channels * 6).reshape(2, channels, 2, 3)
    return dense, dense.to_blocked("nChw8c")


def stale_view(x: Tensor) -> Tensor:
    """A view whose base is written after it was made and used."""
    view = x[1].permute(1, 2, 0)
    view.sum()
    x.mul_(-2)
    return view


SHOWN = {
    "blocked": lambda x: x,
    "channels": lambda x: x[:, 1:6],
    "images": lambda x: x[1:],
    "view": lambda x: x[0, 3],
    "stale view": stale_view,
    "requires grad": lambda x: x.clone().detach().requires_grad_(),
}


def from_address(address: int, tensor: Tensor) -> numpy.ndarray:
    """What safetensors, ctypes and any C library do."""
    room = (ctypes.c_uint8 * tensor.nbytes).from_address(address)
    return numpy.frombuffer(room, "float32").reshape(tensor.shape)


def through_file(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READERS = {
    "data_ptr": lambda x: from_address(x.data_ptr(), x),
    "data_ptr in C++": lambda x: from_address(torch.Tensor.data_ptr(x), x),
    "untyped_storage": lambda x: from_address(x.untyped_storage().data_ptr(), x),
    "storage": lambda x: from_address(x.storage().data_ptr(), x),
    "storage in C++": lambda x: from_address(torch.Tensor.untyped_storage(x).data_ptr(), x),
    "storage's items": lambda x: [x.storage()[i] for i in range(x.numel())],
    "storage's list": lambda x: x.storage().tolist(),
    "storage's bytes": lambda x: x.untyped_storage().tolist(),
    "storage's copy": lambda x: torch.tensor([]).set_(x.untyped_storage().clone()),
    "storage's share": lambda x: x.untyped_storage()._share_fd_cpu_(),
    "storage's file": lambda x: x.untyped_storage()._share_filename_cpu_(),
    "a dense tensor's storage": lambda x: torch.tensor([]).set_(x.storage()).view(x.shape).sum(),
    "to_dlpack": lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "from_dlpack": lambda x: torch.from_dlpack(x),
    "NumPy's from_dlpack": lambda x: numpy.from_dlpack(x),
    "numpy": lambda x: x.numpy(),
    "numpy in C++": lambda x: torch.Tensor.numpy(x),
    "numpy(force=True)": lambda x: x.numpy(force=True),
    "asarray": lambda x: numpy.asarray(x),
    "array": lambda x: numpy.array(x),
    "array of another type": lambda x: numpy.asarray(x, dtype="float64"),
    "array of several": lambda x: numpy.stack([x, x])[0],
    "as an argument of NumPy": lambda x: numpy.multiply(x, 1.0),
    "tolist": lambda x: x.tolist(),
    "memoryview": lambda x: memoryview(x),
    "bytes": lambda x: bytes(memoryview(x)),
    "frombuffer": lambda x: torch.frombuffer(x, dtype=torch.float32),
    "array interface": lambda x: numpy.asarray(type("A", (), x.__array_interface__)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": through_file,
    "tensor": lambda x: torch.tensor(x),
    "as_tensor": lambda x: torch.as_tensor(x),
    "item": lambda x: [x.flatten()[i].item() for i in range(x.numel())],
}

# What torch and Python say of any tensor that they do not read.
OTHER_ERRORS = (
    r"not supported for tensor subclasses|a bytes-like object is required|buffer protocol"
    r"|no attribute '__array_interface__'"
)
WITH_GRAPH = "require[s]? grad"


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("reader", READERS)
def test_readers_get_dense_values_or_an_error(reader, shown):
    for channels in CHANNELS:
        dense, blocked = (SHOWN[shown](x) for x in pair(channels))
        try:
            got = READERS[reader](blocked)
        except Exception as error:
            expected = r"\.to_dense\(\)|" + OTHER_ERRORS
            expected += "|" + WITH_GRAPH if blocked.requires_grad else ""
            with pytest.raises(type(error), match=expected):
                raise
            continue
        got = got.detach().to_dense() if isinstance(got, Tensor) else torch.tensor(numpy.array(got))
        assert got.reshape(dense.shape).equal(dense.detach().to(got.dtype))


WRITERS = {
    "numpy": lambda x: x.numpy().fill(5),
    "asarray": lambda x: numpy.asarray(x).fill(5),
    "asarray of an inner view": lambda x: numpy.asarray(x)[0][...].fill(5),
    "data_ptr": lambda x: from_address(x.data_ptr(), x).fill(5),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "storage's items": lambda x: x.storage().__setitem__(0, 5.0),
    "storage's copy_": lambda x: x.untyped_storage().copy_(
        torch.UntypedStorage(x.untyped_storage().nbytes())
    ),
    "set_ of the storage": lambda x: torch.tensor([]).set_(x.untyped_storage()).fill_(5),
    "dlpack without a copy": lambda x: x.__dlpack__(copy=False),
    "asarray without a copy": lambda x: numpy.asarray(x, copy=False),
    "apply_": lambda x: x.apply_(lambda value: 5.0),
    "map_": lambda x: x.map_(torch.zeros(x.shape), lambda value, other: 5.0),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("shown", ("blocked", "channels", "view", "stale view"))
@pytest.mark.parametrize("writer", WRITERS)
def test_writers_reach_the_tensor_or_get_an_error(writer, shown):
    dense, blocked = pair()
    there, here = SHOWN[shown](dense), SHOWN[shown](blocked)
    try:
        WRITERS[writer](here)
    except (RuntimeError, ValueError, BufferError) as error:
        assert "to_dense()" in str(error) or "read-only" in str(error)
    else:
        WRITERS[writer](there)
    assert here.to_dense().equal(there) and blocked.to_dense().equal(dense)


def test_what_may_be_written_is_the_callers_own():
    dense, blocked = pair()
    for array in (blocked.numpy(force=True), numpy.array(blocked), blocked.to_dense().numpy()):
        array.fill(5)
        assert blocked.to_dense().equal(dense)


def test_a_storage_that_blocked_memory_was_set_to_is_refused_too():
    """And whoever asks whether tensors share memory gets an answer where both are views of one."""
    _, blocked = pair()
    with pytest.raises(RuntimeError, match=r"^torch_blocked::data_ptr: .*to_dense"):
        torch.tensor([]).set_(blocked.untyped_storage()).sum()
    assert torch._C._is_alias_of(blocked, blocked[0, 1])
    assert torch._C._is_alias_of(blocked[0, 1], blocked[1, 2])


def test_the_way_out_of_the_message():
    dense, blocked = pair()
    memory = tb.Memory.of(blocked)
    lanes = (ctypes.c_float * 8).from_address(memory.data_handle)
    assert list(lanes) == dense[0, :8, 0, 0].tolist()
    assert from_address(blocked.to_dense().data_ptr(), blocked).tolist() == dense.tolist()


PROCESS = """
import torch, torch_blocked, sys
import torch.multiprocessing as mp

def write(queue, done):
    x, y = queue.get()
    x.mul_(2)
    y.add_(1)
    done.put(x.sum().item())

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = mp.get_context(method)
        x = torch.ones(1, 17, 2, 2).to_blocked()
        y = torch.zeros(1, 3, 2, 2).to_blocked().share_memory_()
        queue, done = context.Queue(), context.Queue()
        process = context.Process(target=write, args=(queue, done))
        process.start()
        queue.put((x, y))
        print(done.get(timeout=200), x.sum().item(), y.sum().item(), x.is_shared(), method)
        process.join()
"""


def test_another_process_sees_the_memory(tmp_path):
    script = tmp_path / "processes.py"
    script.write_text(textwrap.dedent(PROCESS))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=400
    )
    lines = [f"136.0 136.0 12.0 True {method}" for method in ("fork", "spawn")]
    assert done.stdout.splitlines() == lines, done.stderr
