"""What torch_blocked runs on: one OpenMP runtime, and one sentence for whatever does not fit."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import python

import torch_blocked
from torch_blocked import _C, environment

pytestmark = pytest.mark.any_isa

PACKAGE = Path(torch_blocked.__file__).parent
TORCH_LIBGOMP = str(Path(torch.__file__).parent / "lib" / "libgomp.so.1")
REINSTALL = (
    "pip uninstall -y onednn && pip install --force-reinstall --no-deps onednn-cpu-gomp==2023.2.0"
)


def answer_of(*arguments, **keywords):
    """What the code printed, as JSON."""
    done = python(*arguments, **keywords)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# One OpenMP runtime


THREADS = """
import importlib, json, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch, torch_blocked
from torch_blocked import _C
x, weight = torch.randn(1, 16, 64, 64), torch.randn(16, 16, 3, 3)
counts = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    ours = _C.threads_in_use()
    torch.nn.functional.conv2d(x.to_blocked(), weight)
    counts.append([*ours, len(os.listdir("/proc/self/task")) - before])
print(json.dumps({"openmp": torch_blocked.env()["openmp"], "counts": counts}))
"""


@pytest.mark.parametrize(
    "imports",
    [
        ["torch_blocked"],
        ["torch", "torch_blocked", "numpy", "sklearn.cluster"],
        ["sklearn.cluster", "numpy", "torch_blocked"],
    ],
    ids="-".join,
)
def test_threads_are_torchs_whatever_is_imported_first(imports):
    answer = answer_of(THREADS, *imports)
    others = [path for path in answer["openmp"] if path != TORCH_LIBGOMP]
    assert TORCH_LIBGOMP in answer["openmp"]
    # scikit-learn's wheel carries a copy under a name of its own; nothing else may.
    assert all("/scikit_learn.libs/libgomp-" in path for path in others)
    assert len(others) == ("sklearn.cluster" in imports)
    # [ours, oneDNN's, threads started]: two threads start one, once, and one starts none.
    assert answer["counts"] == [[1, 1, 0], [2, 2, 1]]


# Refusals, each one sentence


def refusal() -> str:
    with pytest.raises(ImportError) as caught:
        environment.check()
    return str(caught.value)


def test_check_accepts_this_machine():
    environment.check()


def has_extensions_for(monkeypatch, *minors: str) -> None:
    built = {minor: Path(f"torch{minor}/_C.so") for minor in minors}
    monkeypatch.setattr(environment, "built_for", lambda: built)


@pytest.mark.parametrize(
    ("minors", "named", "newest"),
    [(["2.12"], "torch 2.12", "2.12"), (["2.9", "2.12"], "torch 2.9 or 2.12", "2.12")],
)
def test_another_torch(monkeypatch, minors, named, newest):
    has_extensions_for(monkeypatch, *minors)
    assert refusal() == (
        f"torch_blocked: expected {named}, which its C++ extension was built for, "
        f'got torch {torch.__version__}; pip install "torch=={newest}.*", or build it for the '
        "installed torch: pip install --force-reinstall --no-deps . in a checkout"
    )


def test_the_extension_of_the_installed_torch_is_taken():
    minor = ".".join(torch.__version__.split(".")[:2])
    path = environment.built_for()[minor]
    assert path == Path(_C.__file__) and path.parent == PACKAGE / f"torch{minor}"


def test_another_patch_release_of_torch_is_fine(monkeypatch):
    monkeypatch.setattr(torch, "__version__", ".".join(torch.__version__.split(".")[:2]) + ".9")
    environment.check()


def test_no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert refusal() == (
        'torch_blocked: expected torch 2.13 or newer, got none; pip install "torch==2.13.*"'
    )


def test_no_extension(monkeypatch):
    has_extensions_for(monkeypatch)
    assert re.fullmatch(
        r"torch_blocked: expected its C\+\+ extension torch_blocked._C, got none for Python \S+; "
        r"run `make extension` or `pip install -e .` in the checkout",
        refusal(),
    )


@pytest.mark.parametrize(
    ("machine", "flags"), [("x86_64", "fpu sse sse2 ssse3"), ("aarch64", "asimd")]
)
def test_unsupported_cpu(monkeypatch, machine, flags):
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    monkeypatch.setattr(
        environment, "_cpuinfo", {"flags": flags, "model name": "Some CPU"}.__getitem__
    )
    assert refusal() == (
        f"torch_blocked: expected an x86-64 CPU with SSE4.1, got Some CPU ({machine}); "
        "run on another machine, there are no kernels for this one"
    )


@pytest.mark.parametrize("version", ["3.1.1", "2.7.5", "4.0.0"])
def test_another_onednn(monkeypatch, version):
    monkeypatch.setattr(_C, "onednn_version", lambda: {"version": version, "cpu_runtime": "omp"})
    least = ".".join(map(str, _C.BUILT_WITH_ONEDNN))
    assert refusal() == (
        f"torch_blocked: expected oneDNN {least} or newer, below 4.0, "
        f"got oneDNN {version}; {REINSTALL}"
    )


def test_a_bad_limit_keeps_its_own_sentence():
    done = python("import torch_blocked", TORCH_BLOCKED_MAX_ISA="sse9")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torch_blocked::TORCH_BLOCKED_MAX_ISA: expected default, avx2, avx512 or amx, "
        "got sse9; correct or unset the variable"
    )


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (
            "/lib/libdnnl.so.3: undefined symbol: _ZN4sycl3_V15queueC1Ev",
            "expected the OpenMP build of oneDNN, got a libdnnl.so.3 that does not load "
            "(/lib/libdnnl.so.3: undefined symbol: _ZN4sycl3_V15queueC1Ev); " + REINSTALL,
        ),
        (
            "/a/_C.so: undefined symbol: dnnl_memory_create_v2",
            "expected the OpenMP build of oneDNN, got a libdnnl.so.3 that does not load "
            "(/a/_C.so: undefined symbol: dnnl_memory_create_v2); " + REINSTALL,
        ),
        (
            "/a/_C.so: undefined symbol: _ZN3c105ErrorE",
            "expected a C++ extension that loads, "
            "got /a/_C.so: undefined symbol: _ZN3c105ErrorE; " + environment._REBUILD,
        ),
        (
            "libtorch_cpu.so: cannot open shared object file: No such file or directory",
            "expected a C++ extension that loads, got libtorch_cpu.so: cannot open shared object "
            "file: No such file or directory; " + environment._REBUILD,
        ),
    ],
    ids=["sycl", "older-onednn", "other-torch", "no-torch"],
)
def test_what_the_loader_said_is_explained(loader, sentence):
    with pytest.raises(ImportError, match=re.escape(f"torch_blocked: {sentence}") + "$"):
        environment._explain_load_failure(loader)


# The same with real libraries: LD_LIBRARY_PATH comes before the extension's run path


def compile_library(path: Path, source: str, *options: str) -> Path:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", path, f"-Wl,-soname,{path.name}"]
        + ["-Wl,--no-as-needed", "-x", "none", *options],
        input=source,
        text=True,
        check=True,
    )
    return path


def compile_onednn(folder: Path, *options: str, minor: int = 2, runtime: int = 2) -> None:
    """A libdnnl.so.3 that has every function our extension needs, and only tells its version."""
    extension = Path(_C.__file__)
    table = subprocess.run(
        ["nm", "-D", "--undefined-only", extension], capture_output=True, text=True, check=True
    ).stdout
    names = sorted(set(re.findall(r"\bdnnl_\w+", table)) - {"dnnl_version"})
    version = f'{{3, {minor}, 0, "0", {runtime}, 0}}'
    functions = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    compile_library(
        folder / "libdnnl.so.3",
        "struct version { int major, minor, patch; const char* hash; unsigned cpu, gpu; };\n"
        f"static const struct version value = {version};\n"
        "const struct version* dnnl_version(void) { return &value; }\n" + functions,
        *options,
    )


def import_error(**variables) -> str:
    """The last line of a failed `import torch_blocked`, which must not end in any other way."""
    done = python("import torch_blocked", **variables)
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


def test_import_with_a_sycl_onednn(tmp_path):
    compile_onednn(tmp_path, minor=9, runtime=512)
    assert import_error(LD_LIBRARY_PATH=str(tmp_path)) == (
        "ImportError: torch_blocked: expected the OpenMP build of oneDNN, "
        f"got a libdnnl.so.3 with the CPU runtime sycl; {REINSTALL}"
    )


def test_import_with_a_sycl_onednn_whose_runtime_is_missing(tmp_path):
    sycl = compile_library(tmp_path / "libsycl.so.8", "")
    compile_onednn(tmp_path, str(sycl), minor=9, runtime=512)
    sycl.unlink()
    assert import_error(LD_LIBRARY_PATH=str(tmp_path)) == (
        "ImportError: torch_blocked: expected the OpenMP build of oneDNN, got a libdnnl.so.3 that "
        f"needs libsycl.so.8, which is missing; {REINSTALL}"
    )


def test_import_with_an_older_onednn(tmp_path):
    compile_onednn(tmp_path, minor=1)
    assert import_error(LD_LIBRARY_PATH=str(tmp_path)) == (
        "ImportError: torch_blocked: expected oneDNN 3.2 or newer, below 4.0, "
        f"got oneDNN 3.1.0; {REINSTALL}"
    )


def test_import_with_an_onednn_on_another_openmp_runtime(tmp_path):
    compile_onednn(tmp_path, str(compile_library(tmp_path / "libiomp5.so", "")))
    assert import_error(LD_LIBRARY_PATH=str(tmp_path)) == (
        "ImportError: torch_blocked: expected an oneDNN that runs on torch's libgomp, "
        f"got a libdnnl.so.3 that brings {tmp_path}/libiomp5.so; {REINSTALL}"
    )


def test_import_without_onednn(tmp_path):
    """A copy of the package whose run path leads nowhere."""
    copy = shutil.copytree(PACKAGE, tmp_path / "torch_blocked")
    extension = copy / Path(_C.__file__).relative_to(PACKAGE)
    dynamic = subprocess.run(
        ["readelf", "-dW", extension], capture_output=True, text=True, check=True
    ).stdout
    run_path = re.search(r"runpath: \[(.*)\]", dynamic)[1].encode()
    content = extension.read_bytes()
    assert content.count(run_path) == 1
    extension.write_bytes(content.replace(run_path, b"/".ljust(len(run_path), b"?")))
    assert import_error(cwd=tmp_path) == (
        "ImportError: torch_blocked: expected oneDNN's libdnnl.so.3, got none; "
        "pip install --force-reinstall onednn-cpu-gomp==2023.2.0"
    )


# env()


def test_env_tells_what_is_in_use():
    env = torch_blocked.env()
    assert env["torch"] == torch.__version__
    assert env["onednn"].split(".")[0] == "3" and env["onednn_runtime"] == "omp"
    assert os.path.basename(env["libdnnl"]).startswith("libdnnl.so.3")
    assert TORCH_LIBGOMP in env["openmp"]
    assert env["cpu"] == environment.cpu_name()
    assert env["cpu_isa"] == environment.cpu_isas()[0]
    assert env["native_blocks"] == ([16, 8] if env["isa"] in ("avx512", "amx") else [8])
    assert env["threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(env)) == env


def test_env_tells_what_a_bug_report_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ONEDNN_VERBOSE", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    env = torch_blocked.env()
    assert env["build"] == _C.BUILD and env["build"].startswith(("Release, ", "Debug, "))
    assert env["settings"]["ONEDNN_VERBOSE"] == "0"
    assert env["settings"]["OMP_WAIT_POLICY"] == "passive" and "HOME" not in env["settings"]
    cores = env["cores"]
    assert 1 <= cores["physical"] <= cores["logical"] == os.cpu_count()
    assert cores["allowed"] == len(os.sched_getaffinity(0))
    assert all(re.fullmatch(r"L\d[di]?", level) for level in env["caches"])
    assert env["torch_isa"] == torch.backends.cpu.get_cpu_capability()
    assert env["memory_gib"] > 0 and env["interop_threads"] == torch.get_num_interop_threads()
    file = Path(env["tuning_file"])
    assert file.is_relative_to(tmp_path) and env["tuned_problems"] == 0
    file.parent.mkdir()
    file.write_text("a problem\taten\t1.0\nanother\taten\t2.0\n")
    assert torch_blocked.env()["tuned_problems"] == 2


# Limits are read by the first op, so one import of torch serves a child for each of them.
ISA = """
import json, os, sys, torch

def answer():
    import torch_blocked
    x, weight = torch.randn(2, 19, 9, 7), torch.randn(17, 19, 3, 3)
    y = torch.nn.functional.conv2d(x.to_blocked("nChw8c"), weight).to_dense()
    difference = (y - torch.nn.functional.conv2d(x, weight)).abs().max().item()
    env = torch_blocked.env()
    print(json.dumps([env["isa"], env["isa_limits"], difference]), flush=True)

for limits in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.environ.update(limits)
        answer()
        os._exit(0)
    os.waitpid(child, 0)
"""
ISA_LIMITS = (
    ({}, "amx"),
    ({"TORCH_BLOCKED_MAX_ISA": "avx512"}, "avx512"),
    ({"TORCH_BLOCKED_MAX_ISA": "avx2"}, "avx2"),
    ({"TORCH_BLOCKED_MAX_ISA": "default"}, "default"),
    ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
    ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "default"),
    ({"TORCH_BLOCKED_MAX_ISA": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
)


def test_isa_limits_hold_for_our_kernels_and_onednn_alike():
    available = environment.cpu_isas()
    done = python(ISA, json.dumps([limits for limits, _ in ISA_LIMITS]))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (limits, isa), answer in zip(ISA_LIMITS, answers, strict=True):
        used, named, difference = answer
        assert used == (isa if isa in available else available[0]), limits
        assert named == limits
        assert difference < 1e-4, limits
