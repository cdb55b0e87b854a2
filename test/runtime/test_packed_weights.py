"""Packed weights: kept while the weights do not change, made anew after every write."""

import copy
import gc
import io
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked
from torch_blocked import _C

pytestmark = pytest.mark.any_isa

TAG = "nChw8c"


def random_dense(*dims, seed=0):
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def conv_matches_dense(module, seed=1):
    x = random_dense(2, 17, 7, 7, seed=seed)
    with torch.no_grad():
        torch.testing.assert_close(
            module(x.to_blocked(TAG)).to_dense(), module(x), rtol=1e-4, atol=1e-5
        )


def test_packed_weights_follow_the_optimizer():
    module = nn.Conv2d(17, 24, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        conv_matches_dense(module)
        optimizer.zero_grad()
        module(random_dense(2, 17, 7, 7).to_blocked(TAG)).square().mean().backward()
        optimizer.step()
    conv_matches_dense(module)


CHANGES = {
    "in-place": lambda m: torch.no_grad()(m.weight.mul_)(2),
    "data": lambda m: m.weight.data.mul_(2),
    "data-copy": lambda m: m.weight.data.copy_(torch.randn(24, 17, 3, 3)),
    "new-data": lambda m: setattr(m.weight, "data", torch.randn(24, 17, 3, 3)),
    "load_state_dict": lambda m: m.load_state_dict(nn.Conv2d(17, 24, 3).state_dict()),
    "load-assign": lambda m: m.load_state_dict(nn.Conv2d(17, 24, 3).state_dict(), assign=True),
    "new-parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.randn(24, 17, 3, 3))),
    "reset": lambda m: m.reset_parameters(),
    "numpy": lambda m: m.weight.detach().numpy().__imul__(2),
    "channels-last": lambda m: m.to(memory_format=torch.channels_last),
    "one-value": lambda m: m.weight.data.view(-1).__setitem__(0, 9.0),
    "bias": lambda m: m.bias.data.add_(5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_packed_weights_follow_every_write(name):
    torch.manual_seed(0)
    module = nn.Conv2d(17, 24, 3)
    conv_matches_dense(module)
    CHANGES[name](module)
    conv_matches_dense(module)


def test_weights_are_packed_once():
    module = nn.Conv2d(17, 24, 3)
    conv_matches_dense(module)
    with torch_blocked.profile() as p:
        conv_matches_dense(module, seed=2)
        conv_matches_dense(module, seed=3)
    assert p.packs == 0, p.table()
    inputs = [
        random_dense(2, 17, 7, 7).to_blocked("nChw16c"),
        random_dense(3, 17, 29, 27).to_blocked(TAG),
    ]
    with torch.no_grad():
        for x in inputs:
            module(x)  # another kernel may want another form
        with torch_blocked.profile() as p:
            for x in inputs:
                module(x)
    assert p.packs == 0, p.table()


def test_prepacked_weights_are_packed_before_the_first_call():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(17, 24, 3), nn.BatchNorm2d(24), nn.Dropout(), nn.Conv2d(24, 8, 1)
    )
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = random_dense(2, 17, 7, 7).to_blocked(TAG)
    assert torch_blocked.prepack(model, x) is model and model[1].training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch_blocked.profile() as p, torch.no_grad():
        model.eval()(x)
    assert p.packs == 0, p.table()
    with pytest.raises(ValueError, match=r"expected a blocked example input, got \['Tensor'\]"):
        torch_blocked.prepack(model, x.to_dense())


def test_views_of_one_storage_are_told_apart():
    both = random_dense(48, 17, 3, 3)
    x = random_dense(2, 17, 7, 7)
    for weight in (both[:24], both[24:], both[:24].flip(0), both[::2]):
        expected = F.conv2d(x, weight)
        ours = F.conv2d(x.to_blocked(TAG), weight).to_dense()
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_packed_weights_die_with_their_weights():
    gc.collect()
    before = _C.packed_weight_bytes()
    module = nn.Conv2d(17, 24, 3)
    conv_matches_dense(module)
    held = _C.packed_weight_bytes() - before
    assert held >= module.weight.nbytes
    with torch.no_grad():
        module.weight.mul_(2)
    conv_matches_dense(module)
    assert _C.packed_weight_bytes() - before == held, "the stale form was kept"
    del module
    gc.collect()
    assert _C.packed_weight_bytes() == before


def test_packed_weights_can_be_cleared():
    module = nn.Conv2d(17, 24, 3)
    conv_matches_dense(module)
    torch_blocked.clear_packed_weights()
    assert _C.packed_weight_bytes() == 0
    conv_matches_dense(module)


def test_inference_weights_are_kept():
    """They count no writes, but their storage tells of them."""
    gc.collect()
    before = _C.packed_weight_bytes()
    with torch.inference_mode():
        module = nn.Conv2d(17, 24, 3)
        conv_matches_dense(module)
        assert packs_of(module) == 0
        module.weight.mul_(2)
        conv_matches_dense(module)
        module.weight[3, 5, 1, 1] = 7
        conv_matches_dense(module)
    del module
    gc.collect()
    assert _C.packed_weight_bytes() == before


# --- writes that the version counter does not see


def packs_of(module):
    """Weight packs of one more call."""
    with torch_blocked.profile() as p:
        conv_matches_dense(module)
    return p.packs


def module_in_use(channels=40):
    torch.manual_seed(0)
    module = nn.Conv2d(17, channels, 3)
    conv_matches_dense(module)
    return module


def test_one_element_through_data_is_seen():
    module, places = module_in_use(), random.Random(0)
    for _ in range(100):
        at = tuple(places.randrange(size) for size in module.weight.shape)
        module.weight.data[at] += 1
        assert packs_of(module) == 1, at


@pytest.mark.parametrize("held", (False, True), ids=("temporary", "held"))
def test_one_input_channel_through_data_is_seen(held):
    module, alias = module_in_use(), None
    for step in range(50):
        alias = module.weight.data if held else None
        (module.weight.data if alias is None else alias)[:, step % 17, 1, 1] *= 1.5
        assert packs_of(module) == 1, step
    assert packs_of(module) == 0


def test_an_average_kept_by_data_is_seen():
    """As moving averages of weights are often written."""
    student, teacher = module_in_use(), module_in_use()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    pairs = [
        (a.data, b.data) for a, b in zip(student.parameters(), teacher.parameters(), strict=True)
    ]
    for _ in range(5):
        optimizer.zero_grad()
        student(random_dense(2, 17, 7, 7).to_blocked(TAG)).square().mean().backward()
        optimizer.step()
        for new, average in pairs:
            average.mul_(0.999).add_(new, alpha=0.001)
        assert packs_of(teacher) == 1
        conv_matches_dense(student)


def flip_sign(array):
    array.reshape(-1)[::2] *= -1  # changes the highest bit only of what a hash reads


RAW_WRITES = {
    "one value": lambda array: array[3, 4, 1, 2:].__iadd__(1),
    "last value": lambda array: array[-1, -1, -1, -1:].__iadd__(1),
    "two equal bits": flip_sign,
    "swapped": lambda array: array.__setitem__(slice(0, 2), array[1::-1].copy()),
}


@pytest.mark.parametrize("write", RAW_WRITES)
def test_a_numpy_view_from_before_is_seen(write):
    module = module_in_use()
    array = module.weight.detach().numpy()
    for _ in range(2):
        conv_matches_dense(module)
        assert packs_of(module) == 0, "sharing the storage is not writing to it"
        RAW_WRITES[write](array)
        assert packs_of(module) == 1


def test_memory_of_numpy_is_seen():
    array = np.random.default_rng(0).standard_normal((24, 17, 3, 3), dtype=np.float32)
    module = nn.Conv2d(17, 24, 3)
    module.weight = nn.Parameter(torch.from_numpy(array))
    conv_matches_dense(module)
    assert packs_of(module) == 0
    array[5, 6, 1, 1] += 1
    assert packs_of(module) == 1


def test_memory_of_other_processes_is_seen():
    module = module_in_use()
    module.share_memory()
    conv_matches_dense(module)
    child = torch.multiprocessing.get_context("fork").Process(target=write_in_child, args=(module,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert packs_of(module) == 1


def write_in_child(module):
    module.weight.data[1, 2, 0, 0] += 5


def test_a_numpy_array_of_the_weights_themselves_needs_the_call():
    """Neither the storage nor its users tell of this one, which the documentation says."""
    module = module_in_use().requires_grad_(False)
    array = module.weight.numpy()
    conv_matches_dense(module)
    array[1, 2, 1, 1] += 100
    torch_blocked.clear_packed_weights()
    assert packs_of(module) == 1


READS = {
    "save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "norm": lambda m: m.weight.norm(),
    "address": lambda m: m.weight.data_ptr(),
    "numpy": lambda m: m.weight.detach().numpy().sum(),
    "dense": lambda m: m(torch.zeros(1, 17, 5, 5)),
}


@pytest.mark.parametrize("name", READS)
def test_reading_does_not_pack_again(name):
    """What may write and does not is doubted once; from then on the weights are compared."""
    module = module_in_use()
    for turn in range(3):
        READS[name](module)
        assert packs_of(module) <= (turn == 0)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_other_types_are_seen(dtype):
    module = module_in_use().to(dtype)
    x = random_dense(2, 17, 7, 7).to(dtype)
    for step in range(3):
        with torch.no_grad():
            ours, theirs = module(x.to_blocked(TAG)).to_dense(), module(x)
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)
        module.weight.data[step, 2, 1, 1] = 30


def test_weights_may_die_in_any_order():
    """A storage that takes the place of a dead one starts anew."""
    for _ in range(50):
        module = module_in_use(channels=8)
        module.weight.data[1, 1, 1, 1] += 1
        assert packs_of(module) == 1


@pytest.mark.parametrize("uses", (1, 2), ids=("packed", "used-again"))
def test_who_wrote_may_have_let_go(uses):
    """A write through an alias that is gone at the next use, and that was there at the last."""
    module = module_in_use()
    alias = module.weight.detach().numpy()
    for _ in range(uses):
        conv_matches_dense(module)
    alias[1, 1, 1, 1] += 1
    del alias
    conv_matches_dense(module)
    assert packs_of(module) == 0  # and from here on it is believed again


def test_threads_may_write_while_others_run():
    module, stop = module_in_use(), threading.Event()
    x = random_dense(2, 17, 7, 7).to_blocked(TAG)

    def write():
        while not stop.is_set():
            module.weight.data[1, 1, 1, 1] += 1

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    with torch.no_grad():
        for _ in range(200):
            module(x)
    stop.set()
    for writer in writers:
        writer.join()
    conv_matches_dense(module)
