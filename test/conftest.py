"""Settings for the whole suite, and its fixtures."""

import gc
import os
import zlib
from pathlib import Path

os.environ.setdefault("TORCH_BLOCKED_CHECK", "1")  # the zero tail is verified after every op

# Torch's modules and 18,000 collected tests are a million objects, and a full collection of garbage
# takes 1.4 s. None of them ever is garbage.
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402
from helpers.isas import not_run  # noqa: E402

import torch_blocked  # noqa: E402
from torch_blocked.optimized_module import OptimizedModule  # noqa: E402

# torch.manual_seed puts its seed off for each kind of device that is not there, with a formatted
# stack: 15 ms in pytest's deep ones, two thirds of the time of the sweeps over torch's operators.
for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
    module._lazy_call = lambda *_, **__: None

NOT_RUN = not_run(torch_blocked.env()["isa"], torch_blocked._C.multiplies_bfloats())
TESTS = Path(__file__).parent

# Whose single tests take longest, in processes of their own: they come first, for at the end the
# other cores would wait for them.
LONG = {
    "test_random_models.py",
    "test_random_inputs.py",
    "test_random_int8.py",
    "test_readme.py",
    "test_cpp.py",
    "test_docs.py",
    "test_examples.py",
    "test_bench.py",
    "test_bench_train.py",
    "test_peers.py",
    "test_packaging.py",
}


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="only the K-th of N parts, from 0")


def named(item):
    """The test's id, from the suite's folder on."""
    return f"{item.path.relative_to(TESTS)}::{item.name}"


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if not named(item).startswith(tuple(NOT_RUN))]
    if part := config.getoption("part"):
        chosen, parts = map(int, part.split("/"))
        items[:] = [each for each in items if zlib.crc32(each.nodeid.encode()) % parts == chosen]
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seed(request):
    """A test draws the same numbers in any order of tests and in any folder: a bound of a few
    roundings would fail once in some hundred draws."""
    name = f"test/{request.node.path.name}::{request.node.nodeid.partition('::')[2]}"
    torch.manual_seed(zlib.crc32(name.encode()))


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """Times and comparisons of the test's own: none of this user's are read, none are left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def in_bfloat16(monkeypatch):
    """dtype=torch.bfloat16 means all that has kernels, on every CPU that multiplies or converts it,
    and not only where it is faster."""
    monkeypatch.setattr(OptimizedModule, "_computes", "narrow")


def pytest_report_header(config):
    env = torch_blocked.env()
    return [
        f"torch_blocked: {env['isa']} of {env['cpu_isa']} ({env['cpu']}), "
        f"{env['threads']} threads, torch {env['torch']}, oneDNN {env['onednn']}",
        *(f"not run: test/{tests}*, which needs {need}" for tests, need in NOT_RUN.items()),
    ]
