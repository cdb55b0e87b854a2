"""C++ against the public headers: the example is built as its readers build it, and runs; what else
the headers have is asked by cpp/public_api.cpp."""

import ctypes
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_blocked
from torch_blocked import _C

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_kernel"
PACKAGE = Path(torch_blocked.__file__).parent
HEADERS = sorted((PACKAGE / "include" / "torch_blocked").glob("*.h"))
TOOLS = Path(sys.executable).parent


def run(*command, **keywords) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """The example's, built by its own CMakeLists.txt; loaded here, too."""
    folder = tmp_path_factory.mktemp("custom_kernel")
    ninja = f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"
    prefix = f"-DCMAKE_PREFIX_PATH={torch_blocked.cmake_prefix()}"
    run(TOOLS / "cmake", "-G", "Ninja", "-S", EXAMPLE, "-B", folder, ninja, prefix)
    run(TOOLS / "cmake", "--build", folder)
    built = folder / "libcustom_kernel.so"
    torch.ops.load_library(built)
    return built


def test_the_example_runs_eager_compiled_and_optimized(library):
    out = run(sys.executable, EXAMPLE / "use.py", library, cwd=ROOT)
    assert "eager: right, compiled: right, optimized: right" in out
    optimized, eager = (re.split(r"  +", line) for line in out.splitlines() if "star_relu " in line)
    block = f"nChw{_C.native_blocks()[0]}c"
    form = "custom_kernel::star_relu_blocked"
    assert optimized[:6] == ["1", "custom_kernel::star_relu", "1x33x28x28", block, "yes", form]
    assert eager[:5] == ["1", "custom_kernel.star_relu", "1x33x28x28", block, "yes"]


@pytest.mark.parametrize("block", [4, 8, 16, 32])
@pytest.mark.parametrize("channels", [1, 8, 17, 33])
def test_the_examples_kernel(library, channels, block):
    """Its bias must not reach the tail, which the suite verifies."""
    x, scale, bias = torch.randn(2, channels, 5, 3), torch.randn(channels), torch.randn(channels)
    with torch_blocked.strict():
        y = torch.ops.custom_kernel.star_relu(x.to_blocked(f"nChw{block}c"), scale, bias)
    assert y.format == f"nChw{block}c"
    expected = torch.ops.custom_kernel.star_relu(x.double(), scale.double(), bias.double())
    torch.testing.assert_close(y.to_dense().double(), expected, rtol=1e-6, atol=1e-6)


def form_of_the_example(physical, channels, vector=None):
    vector = torch.zeros(channels) if vector is None else vector
    return torch.ops.custom_kernel.star_relu_blocked(physical, channels, vector, vector)


@pytest.mark.parametrize(
    ("physical", "channels", "rule"),
    [
        (torch.zeros(2, 3), 5, "N, ceil(C / b)"),
        (torch.zeros(2, 3, 4, 4, 8), 25, "N, ceil(C / b)"),
        (torch.zeros(2, 3, 4, 4, 7), 21, "N, ceil(C / b)"),
        (torch.zeros(2, 3, 4, 4, 8).double(), 24, "a contiguous CPU tensor of Float"),
        (torch.zeros(2, 3, 4, 8, 4).mT, 24, "a contiguous CPU tensor of Float"),
    ],
)
def test_what_an_accessor_refuses(library, physical, channels, rule):
    with pytest.raises(ValueError, match=f"^torch_blocked::accessor: expected .*{re.escape(rule)}"):
        form_of_the_example(physical, channels)


@pytest.mark.parametrize("vector", [torch.zeros(4), torch.zeros(5).double(), torch.zeros(1, 5)])
def test_what_per_channel_refuses(library, vector):
    """A vector that is too short would be read beyond its end."""
    rule = r"^torch_blocked::per_channel: expected a CPU tensor \[5\] of Float"
    with pytest.raises(ValueError, match=rule):
        form_of_the_example(torch.zeros(2, 1, 4, 4, 8), 5, vector)


def test_the_examples_ops_are_as_torch_wants_them(library):
    """Schema, fake, and what torch.compile makes of both."""
    scale, bias = torch.rand(17), torch.randn(17)
    torch.library.opcheck(
        torch.ops.custom_kernel.star_relu.default, (torch.randn(2, 17, 3, 3), scale, bias)
    )
    physical = torch.randn(2, 17, 3, 3).to_blocked("nChw8c")._physical
    torch.library.opcheck(
        torch.ops.custom_kernel.star_relu_blocked.default, (physical, 17, scale, bias)
    )


def test_find_package_takes_its_own_minor_version_only(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("""
        cmake_minimum_required(VERSION 3.24)
        project(versions LANGUAGES NONE)
        foreach(wanted 0.0 0.2 1.0)
          find_package(torch_blocked ${wanted} CONFIG QUIET)
          message(STATUS "${wanted}: ${torch_blocked_FOUND} ${torch_blocked_CONSIDERED_VERSIONS}")
        endforeach()
    """)
    prefix = f"-DCMAKE_PREFIX_PATH={torch_blocked.cmake_prefix()}"
    ninja = f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"
    out = run(TOOLS / "cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path, ninja, prefix)
    version = torch_blocked.__version__
    for wanted in ("0.0", "0.2", "1.0"):
        assert f"{wanted}: 0 {version}" in out


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """cpp/public_api.cpp, compiled with the public headers and c10's, and no others of ours."""
    built = tmp_path_factory.mktemp("api") / "api.so"
    includes = [f"-I{PACKAGE / 'include'}", f"-isystem{Path(torch.__file__).parent / 'include'}"]
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    source = ROOT / "test/packaging/public_api.cpp"
    run(compiler, *flags, *includes, source, _C.__file__, "-o", built)
    return ctypes.CDLL(str(built))


def int64s(*values):
    return (ctypes.c_int64 * len(values))(*values)


def test_offsets_are_the_descriptors(api):
    dims, lanes = (2, 17, 3, 5), 8
    descriptor = torch_blocked.Descriptor(dims, "f32", "nChw8c")
    for index in itertools.product(*map(range, dims)):
        offset = api.offset(b"nChw8c", int64s(*dims), int64s(*index), ctypes.c_int64(lanes))
        assert offset == descriptor.offset(index)


@pytest.mark.parametrize("dims", [(2, 17, 3, 5), (3, 16, 64, 64), (0, 8, 2, 2)])
def test_every_block_is_visited_once(api, dims):
    physical = torch.zeros(dims[0], -(-dims[1] // 8), *dims[2:], 8)
    visits = api.number_channels(
        ctypes.c_void_p(physical.data_ptr()), int64s(*dims), ctypes.c_int64(8)
    )
    assert visits == (1 if dims[0] else 0)
    expected = torch.arange(1.0, dims[1] + 1).view(1, -1, 1, 1).expand(dims)
    assert torch.equal(torch_blocked.BlockedTensor(physical, dims[1]).to_dense(), expected)


MANY_PIECES = """
import ctypes, sys, time, torch
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from torch_blocked import _C

api = ctypes.CDLL(sys.argv[1])
api.units_run_once.argtypes = [ctypes.c_int64]
api.units_run_once.restype = ctypes.c_int64
torch.set_num_threads(2)
with ThreadPoolExecutor(1) as pool:
    first = pool.submit(_C.walk_loops, [3200] * 600, sleep=timedelta(milliseconds=5))
    time.sleep(0.3)
    torch.set_num_threads(5000)
    assert api.units_run_once(100_000) == 100_000
    assert not first.done()
"""


def test_one_thread_takes_the_pieces_of_thousands(api):
    """Another team has the cores, so a team that wants 5000 threads has one."""
    subprocess.run([sys.executable, "-c", MANY_PIECES, api._name], check=True, timeout=60)


def test_errors_can_be_caught_by_other_libraries(api):
    api.refuses.restype = ctypes.c_bool
    assert api.refuses(b"nChw8d")


def test_public_headers_stand_alone():
    """What is public includes what is public, torch's and the standard library's; installed builds
    have nothing else."""
    assert {"accessor.h", "blocked_form.h", "descriptor.h", "kernel.h", "tag.h", "tensor.h"} <= {
        header.name for header in HEADERS
    }
    for header in HEADERS:
        for name in re.findall(r'#include [<"](.*?)[">]', header.read_text()):
            known = name in {f"torch_blocked/{each.name}" for each in HEADERS}
            of_torch = name.startswith(("ATen/", "c10/", "torch/"))
            assert known or of_torch or re.fullmatch(r"[a-z_]+", name), f"{header.name}: {name}"


def test_it_is_told_what_a_library_without_the_package_lacks(library):
    code = f"import ctypes, torch; ctypes.CDLL({str(library)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "libtorch_blocked.so: cannot open shared" in done.stderr


def test_the_guides_code_is_the_examples():
    """Each block of C++ and CMake in docs/cpp.md is a part of a file that is built here."""
    page = (ROOT / "docs" / "cpp.md").read_text()
    found = re.findall(r"^```(cpp|cmake)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in found} == {"cpp", "cmake"}
    files = [EXAMPLE / "kernel.cpp", EXAMPLE / "CMakeLists.txt"]
    files.append(ROOT / "test/packaging/public_api.cpp")
    for _, code in found:
        assert any(code in file.read_text() for file in files), code
