"""Settings for the whole suite."""

import os
import zlib

os.environ.setdefault("TORCH_BLOCKED_CHECK", "1")  # the zero tail is verified after every op

import pytest  # noqa: E402
import torch  # noqa: E402

import torch_blocked  # noqa: E402

# torch.manual_seed puts its seed off for each kind of device that is not there, with a formatted
# stack: 15 ms in pytest's deep ones, two thirds of the time of the sweeps over torch's operators.
for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
    module._lazy_call = lambda *_, **__: None


# CPUs without AVX2 have no Winograd kernels, and few have AMX.
ISA = torch_blocked.env()["isa"]
collect_ignore = ["test_winograd.py", "test_int8_winograd.py"] if ISA == "default" else []
if ISA != "amx":
    collect_ignore.append("test_amx.py")


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


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True)
def seed(request):
    """The numbers that a test draws are its own, in any order of tests: a bound of a few roundings
    would fail once in some hundred draws."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


def pytest_report_header(config):
    env = torch_blocked.env()
    return (
        f"torch_blocked: {env['isa']} of {env['cpu_isa']} ({env['cpu']}), "
        f"{env['threads']} threads, torch {env['torch']}, oneDNN {env['onednn']}"
    )
