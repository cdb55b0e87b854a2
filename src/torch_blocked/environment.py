"""The environment of torch_blocked: checked at import, and reported by `env()`."""

import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch_blocked import torch_versions
from torch_blocked.torch_versions import TESTED, minor

# The wheel that brings libdnnl.so.3. Other wheels put other builds into a file of the same name.
ONEDNN_WHEEL = "onednn-cpu-gomp==2023.2.0"
_REINSTALL_ONEDNN = (
    f"pip uninstall -y onednn && pip install --force-reinstall --no-deps {ONEDNN_WHEEL}"
)
_REBUILD = (
    "build it for the installed torch: pip install --force-reinstall --no-deps . in a checkout"
)

# Instruction sets with kernels of their own, best first, and the CPU flags each needs.
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
ISA_FLAGS = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma"},
    "default": {"sse4_1"},
}
ISA_LIMITS = ("TORCH_BLOCKED_MAX_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")

# Variables that change what runs, or how fast.
_SETTINGS = re.compile(
    r"(TORCH_BLOCKED|ONEDNN|DNNL|ATEN|OMP|GOMP|KMP|MKL|MALLOC|TORCHINDUCTOR|XDG_CACHE)_|LD_PRELOAD$"
)

_CPUINFO = Path("/proc/cpuinfo")
_OPENMP_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.]")


def check() -> None:
    """Loads torch and the C++ extension; returns only if they fit together and fit this machine.

    Raises ImportError of one sentence (what was expected, what was found, what to do) if torch, the
    CPU, the extension or oneDNN's libdnnl.so.3 is missing or is not the one it was built for."""
    try:
        torch = importlib.import_module("torch")  # first, so that all bind to its libgomp
    except ModuleNotFoundError:
        _refuse(f"torch {TESTED[0]} or newer", "none", f'pip install "torch=={TESTED[0]}.*"')
    _check_cpu()
    module = _module_for(torch.__version__)
    torch_versions.check(torch)
    before = set(openmp_runtimes())
    extension = _load_extension(module)
    _check_onednn(extension.onednn_version(), extension.BUILT_WITH_ONEDNN)
    _check_openmp(sorted(set(openmp_runtimes()) - before))


def env() -> dict[str, Any]:
    """Versions, libraries, CPU, settings and memory in use, for bug reports and benchmark tables.

    build: how the C++ extension was compiled. cores: physical and logical cores, and those that
    this process may use. caches: sizes for the first core. settings: environment variables that
    change what runs. tuning_file: the file with times of kernels, "" without a home.
    tuned_problems: the number of problems in it. packed_weight_bytes: bytes of packed copies of
    weights. idle_pool_bytes: bytes kept for the next large results."""
    torch = importlib.import_module("torch")
    extension = importlib.import_module("torch_blocked._C")
    onednn = extension.onednn_version()
    return {
        "torch_blocked": package_version(),
        "build": extension.BUILD,
        "torch": torch.__version__,
        "onednn": onednn["version"],
        "onednn_hash": onednn["hash"],
        "onednn_runtime": onednn["cpu_runtime"],
        "libdnnl": next(iter(loaded_libraries(r"libdnnl\.so")), None),
        "openmp": openmp_runtimes(),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "cpu": cpu_name(),
        "cores": cores(),
        "caches": caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "huge_pages": _first_of("/sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
        "cpu_isa": cpu_isas()[0],
        "isa": extension.isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "isa_limits": {name: os.environ[name] for name in ISA_LIMITS if name in os.environ},
        "settings": {
            name: value for name, value in sorted(os.environ.items()) if _SETTINGS.match(name)
        },
        "native_blocks": extension.native_blocks(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "tuning_file": str(tuning_file() or ""),
        "tuned_problems": tuned_problems(),
        "packed_weight_bytes": extension.packed_weight_bytes(),
        "idle_pool_bytes": extension.idle_pool_bytes(),
    }


@functools.cache  # it parses a file, and is part of the name of the tuning file
def package_version() -> str:
    """The version of torch_blocked; "not installed" if it is used from a checkout's folder."""
    try:
        return version("torch_blocked")
    except PackageNotFoundError:
        return "not installed"


def measured_with() -> str:
    """Identifies a build for measured times. In another build, implementations, kernels or oneDNN
    may be faster or slower than those that were measured."""
    fingerprint: str = importlib.import_module("torch_blocked._C").fingerprint()
    return hashlib.sha1(fingerprint.encode()).hexdigest()[:12]


def tuning_file() -> Path | None:
    """The file with measured times of kernels, by version, build and CPU. It is safe to delete.
    None without XDG_CACHE_HOME and a home: then each process measures anew."""
    root = _cache_home()
    name = "-".join(("tuning", package_version(), measured_with(), cpu_name()))
    return root and root / "torch_blocked" / (re.sub(r"[^\w.-]+", "_", name) + ".tsv")


def _cache_home() -> Path | None:
    """The cache folder by the XDG specification, which ignores relative paths."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):
        return Path(root)
    home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""
    return Path(home) / ".cache" if os.path.isabs(home) else None


def make_folder(file: Path | None) -> bool:
    """Makes the folder of a file that is kept between processes, for this user alone, and returns
    whether it exists. Files that others may write to are not used (csrc/runtime/own_file.h)."""
    try:
        if file:
            file.parent.parent.mkdir(parents=True, exist_ok=True)
            file.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return file is not None


def read_lines(file: Path | None) -> list[str]:
    """The lines of a file of this user; none if it is another's or does not exist."""
    read = importlib.import_module("torch_blocked._C").read_own_file
    content: bytes | None = read(str(file)) if file else None
    return content.decode(errors="replace").split("\n")[:-1] if content else []


def append_lines(file: Path | None, lines: list[str]) -> None:
    """Appends lines to a file of this user, and makes it if needed. Does nothing if that fails."""
    append = importlib.import_module("torch_blocked._C").append_to_own_file
    if lines and make_folder(file):
        append(str(file), "".join(line + "\n" for line in lines))


def tuned_problems() -> int:
    """The number of problems that the tuning file has a time for."""
    return len(read_lines(tuning_file()))


def cores() -> dict[str, int]:
    """The cores of the machine, and how many logical ones this process may use."""
    ids = [
        re.findall(rf"^{field}\s*: (\d+)$", _CPUINFO.read_text(), re.MULTILINE)
        for field in ("physical id", "core id")
    ]
    return {
        "physical": len(set(zip(*ids, strict=True))) or os.cpu_count() or 1,
        "logical": os.cpu_count() or 1,
        "allowed": len(os.sched_getaffinity(0)),
    }


def caches() -> dict[str, str]:
    """Sizes of the first core's caches, {"L1d": "32K", ...}; empty where the system hides them."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (folder / name).read_text().strip() for name in ("level", "type", "size")
        )
        found[f"L{level}{kind[0].lower() if kind in ('Data', 'Instruction') else ''}"] = size
    return found


def cpu_isas() -> list[str]:
    """The instruction sets of ISA_FLAGS that this CPU has, best first; empty without SSE4.1."""
    flags = set(_cpuinfo("flags").split())
    return [isa for isa, needed in ISA_FLAGS.items() if needed <= flags]


def cpu_name() -> str:
    """The CPU's name as the kernel tells it."""
    return _cpuinfo("model name") or platform.machine()


def loaded_libraries(pattern: str) -> list[str]:
    """Paths of the libraries in this process whose file names match the pattern at their start."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
    return sorted(path for path in paths if re.match(pattern, os.path.basename(path)))


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes in this process: torch's libgomp, and none that we bring."""
    return loaded_libraries(_OPENMP_RUNTIME.pattern)


def _refuse(rule: str, value: str, remedy: str) -> NoReturn:
    raise ImportError(f"torch_blocked: expected {rule}, got {value}; {remedy}") from None


def _first_of(path: str, pattern: str) -> str | None:
    """The first match of the pattern's group in a file of the system, if there is such a file."""
    file = Path(path)
    found = re.search(pattern, file.read_text()) if file.exists() else None
    return found[1] if found else None


def _cpuinfo(field: str) -> str:
    """The field of the first CPU in /proc/cpuinfo, "" if there is none."""
    for line in _CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _check_cpu() -> None:
    if platform.machine() != "x86_64" or not cpu_isas():
        _refuse(
            "an x86-64 CPU with SSE4.1",
            f"{cpu_name()} ({platform.machine()})",
            "run on another machine, there are no kernels for this one",
        )


def built_for() -> dict[str, Path]:
    """The C++ extensions for this Python that this package holds, by the torch they are for."""
    found: dict[str, Path] = {}
    for suffix in EXTENSION_SUFFIXES:
        for path in Path(__file__).parent.glob(f"torch*/_C{suffix}"):
            found.setdefault(path.parent.name.removeprefix("torch"), path)
    return found


def _module_for(installed: str) -> Path:
    """The extension for a version of torch; refuses one that has none."""
    built = built_for()
    if not built:
        _refuse_unbuilt()
    wanted = ".".join(map(str, minor(installed)))
    if wanted not in built:
        versions = " or ".join(sorted(built, key=minor))
        _refuse(
            f"torch {versions}, which its C++ extension was built for",
            f"torch {installed}",
            f'pip install "torch=={max(built, key=minor)}.*", or {_REBUILD}',
        )
    return built[wanted]


def _load_extension(path: Path) -> ModuleType:
    """Loads it as torch_blocked._C, from the folder that names the installed torch."""
    name = "torch_blocked._C"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    try:
        extension = importlib.util.module_from_spec(spec)
        sys.modules[name] = extension
        spec.loader.exec_module(extension)
    except ImportError as error:
        sys.modules.pop(name, None)
        _explain_load_failure(str(error))
    sys.modules["torch_blocked"]._C = extension  # type: ignore[attr-defined]
    return extension


def _explain_load_failure(text: str) -> NoReturn:
    """Explains an error of the dynamic loader in our words."""
    if text.startswith("torch_blocked"):  # the extension's own, such as a bad TORCH_BLOCKED_MAX_ISA
        raise ImportError(text) from None
    absent = re.match(r"(\S+): cannot open shared object file", text)
    library = absent[1] if absent else ""
    if library.startswith("libdnnl."):
        _refuse("oneDNN's libdnnl.so.3", "none", f"pip install --force-reinstall {ONEDNN_WHEEL}")
    if library and not library.startswith(("libtorch", "libc10")):
        value = f"a libdnnl.so.3 that needs {library}, which is missing"
        _refuse("the OpenMP build of oneDNN", value, _REINSTALL_ONEDNN)
    if "libdnnl.so" in text or "undefined symbol: dnnl_" in text:
        value = f"a libdnnl.so.3 that does not load ({text})"
        _refuse("the OpenMP build of oneDNN", value, _REINSTALL_ONEDNN)
    _refuse("a C++ extension that loads", text, _REBUILD)


def _refuse_unbuilt() -> NoReturn:
    _refuse(
        "its C++ extension torch_blocked._C",
        f"none for Python {platform.python_version()}",
        "run `make extension` or `pip install -e .` in the checkout",
    )


def _check_onednn(found: dict[str, str], built: tuple[int, int]) -> None:
    least = max((3, 2), built)
    if not least <= minor(found["version"]) < (4, 0):
        _refuse(
            f"oneDNN {least[0]}.{least[1]} or newer, below 4.0",
            f"oneDNN {found['version']}",
            _REINSTALL_ONEDNN,
        )
    if found["cpu_runtime"] != "omp":
        _refuse(
            "the OpenMP build of oneDNN",
            f"a libdnnl.so.3 with the CPU runtime {found['cpu_runtime']}",
            _REINSTALL_ONEDNN,
        )


def _check_openmp(brought: list[str]) -> None:
    """Refuses a second OpenMP runtime: torch.set_num_threads would not govern it."""
    if brought:
        _refuse(
            "an oneDNN that runs on torch's libgomp",
            f"a libdnnl.so.3 that brings {', '.join(brought)}",
            _REINSTALL_ONEDNN,
        )
