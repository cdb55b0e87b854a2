"""The wheel: what it holds, and that it works in an environment of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

ROUND_TRIP = """
import json, torch, torch_blocked
x = torch.randn(2, 17, 5, 7)
y = x.to_blocked("nChw8c")
z = torch.nn.functional.conv2d(y, torch.ones(3, 17, 1, 1)).to_dense()
print(json.dumps({
    "file": torch_blocked.__file__,
    "version": torch_blocked.__version__,
    "physical_shape": list(y.physical_shape),
    "same": torch.equal(y.to_dense(), x),
    "close": torch.allclose(z, x.sum(1, keepdim=True).expand(2, 3, 5, 7), atol=1e-4),
    "env": torch_blocked.env(),
}))
"""


def run(*command, **keywords) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, from the objects of the build in place; only the run path is another."""
    folder = tmp_path_factory.mktemp("wheel")
    config = folder / "distutils.cfg"
    config.write_text(f"[build]\nbuild_base = {folder}/build\n")
    build = os.environ.get("TORCH_BLOCKED_BUILD_DIR", str(ROOT / "build"))
    variables = {"TORCH_BLOCKED_BUILD_DIR": build, "DIST_EXTRA_CONFIG": str(config)}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run(*pip, "--wheel-dir", folder, ROOT, env=os.environ | variables)
    return next(folder.glob("*.whl"))


def readme_commands() -> list[str]:
    """What README.md tells to type, in order; `make` builds an environment of its own."""
    blocks = re.findall(r"^```console\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line[2:].partition(" #")[0].strip() for line in lines if line.startswith("$ ")]
    return [command for command in commands if not command.startswith("make ")]


# What makes a command of README.md short: later arguments win.
SHORTER = {
    "torch-blocked bench": " --size 64 --rounds 1 --format nhwc",
    "torch-blocked explain": " --input 3x64x64",
}


@dataclass
class Installed:
    """An environment in which README.md's commands were typed, in order, in an empty folder."""

    python: Path
    outputs: dict[str, str]


def copy_torch(site: Path) -> None:
    """Torch and what it needs as they are installed here. `pip install torch` then has nothing to
    unpack, which takes 33 s; `make` does that whenever it makes an environment."""
    waiting, names = ["torch"], set()
    while waiting:
        found = distribution(waiting.pop())
        names |= {file.parts[0] for file in found.files or () if file.parts[0] != ".."}
        needed = [re.split(r"[^\w.-]", each)[0] for each in found.requires or () if ";" not in each]
        waiting += [name for name in needed if name != "setuptools"]  # the environment has one
    for name in names - {"__pycache__"}:
        source = Path(torch.__file__).parents[1] / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, site / name)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    copy_torch(next(folder.glob("lib/python*/site-packages")))
    constraint = folder / "torch.txt"  # of the versions that README.md allows, the one at hand
    constraint.write_text(f"torch=={version('torch')}\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(constraint),
        "PIP_NO_COMPILE": "1",  # compiled when it is imported: most of torch never is
        "PYTHONWARNINGS": "ignore",
    }
    outputs = {}
    for command in readme_commands():
        # The wheel is what the second line would build, from objects that are there.
        line = command.replace("pip install .", f"pip install {wheel}")
        line += next((more for words, more in SHORTER.items() if command.startswith(words)), "")
        outputs[command] = run(
            "sh", "-c", line, cwd=tmp_path_factory.mktemp("empty"), env=variables
        )
    return Installed(folder / "bin" / "python", outputs)


@pytest.fixture
def installed(environment) -> Path:
    """The interpreter of that environment."""
    return environment.python


def test_readme_commands_run_in_a_fresh_environment(environment):
    outputs = environment.outputs
    assert list(outputs)[:3] == ["pip install torch", "pip install .", "torch-blocked selftest"]
    assert re.search(r"^5 passed, 0 failed$", outputs["torch-blocked selftest"], re.MULTILINE)
    assert "not run: torchao is not installed" in outputs["torch-blocked selftest"]
    assert "native_blocks" in outputs["torch-blocked env"]
    (explained,) = (outputs[command] for command in outputs if "explain" in command)
    (timed,) = (outputs[command] for command in outputs if " bench " in command)
    assert re.search(r"\d+ of 57 layers blocked", explained)  # how many, the machine decides
    assert "| resnet50" in timed and "| mobilenet_v2" in timed


def test_readme_has_no_relative_links_on_pypi(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA")))
    text = re.sub(r"^```.*?^```$", "", metadata.decode(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10 and all(re.match("https://|#", link) for link in links)
    assert any(re.search(r"/raw/v[\d.]+/docs/format\.svg$", link) for link in links)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    sources = {str(path.relative_to(SRC)) for path in SRC.glob("torch_blocked/**/*.py")}
    package = {name for name in names if not re.match(r"torch_blocked-[\d.]+\.dist-info/", name)}
    assert {name for name in package if name.endswith(".py")} == sources
    (extension,) = [name for name in package if name.endswith(".so")]
    pattern = r"torch_blocked/torch2\.\d+/_C\.cpython-3\d+-x86_64-linux-gnu\.so"
    assert re.fullmatch(pattern, extension)
    files = ("py.typed", "_C.pyi", "explain_page.html", "profile_page.html", "torch_private.txt")
    data = {f"torch_blocked/{each}" for each in files}
    data |= {
        str(path.relative_to(SRC))
        for pattern in ("include/**/*.h", "share/**/*.cmake")
        for path in (SRC / "torch_blocked").glob(pattern)
    }
    data.add("torch_blocked/share/cmake/torch_blocked/torch_blocked-config-version.cmake")  # built
    assert len(data) > 3 and package == sources | {extension} | data
    assert "Requires-Dist: torch<2.16,>=2.13\n" in metadata
    assert "Requires-Dist: onednn-cpu-gomp==2023.2.0\n" in metadata


def test_wheel_works_in_an_environment_of_its_own(installed, tmp_path):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = json.loads(
        run(installed, "-W", "ignore", "-c", ROUND_TRIP, cwd=tmp_path, env=variables)
    )
    prefix = installed.parent.parent
    assert answer["file"].startswith(str(prefix))
    assert answer["version"] == answer["env"]["torch_blocked"] == version("torch_blocked")
    assert answer["physical_shape"] == [2, 3, 5, 7, 8]
    assert answer["same"] and answer["close"]
    assert answer["env"]["libdnnl"] == str(prefix / "lib" / "libdnnl.so.3")
    (libgomp,) = answer["env"]["openmp"]
    assert libgomp.startswith(str(prefix)) and libgomp.endswith("/torch/lib/libgomp.so.1")


def test_cmake_finds_the_installed_package(installed, tmp_path):
    """Its headers and its extension, and torch, in the environment that it is installed in."""
    code = "import torch_blocked; print(torch_blocked.cmake_prefix())"
    prefix = run(installed, "-W", "ignore", "-c", code, cwd=tmp_path).strip()
    (tmp_path / "CMakeLists.txt").write_text("""
        cmake_minimum_required(VERSION 3.24)
        project(finds LANGUAGES CXX)
        find_package(torch_blocked 0.1 CONFIG REQUIRED)
        get_target_property(location torch_blocked::torch_blocked IMPORTED_LOCATION)
        get_target_property(include torch_blocked::torch_blocked INTERFACE_INCLUDE_DIRECTORIES)
        file(WRITE ${CMAKE_BINARY_DIR}/found "${location}\\n${include}\\n${torch_blocked_TORCH}")
    """)
    tools = Path(sys.executable).parent
    make = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    build = [f"-DCMAKE_PREFIX_PATH={prefix}", "-S", tmp_path, "-B", tmp_path / "build"]
    run(tools / "cmake", "-G", "Ninja", make, *build)
    location, include, torch = map(Path, (tmp_path / "build/found").read_text().splitlines())
    (package,) = installed.parent.parent.glob("lib/python*/site-packages/torch_blocked")
    assert location.parent.parent == package and location.exists()
    assert (include / "torch_blocked" / "tensor.h").exists() and include == package / "include"
    assert torch == package.parent / "torch"


NET = """
from torch import nn


def small():
    return nn.Sequential(nn.Conv2d(4, 9, 3), nn.BatchNorm2d(9), nn.ReLU())
"""


def test_bench_of_the_wheel_takes_the_users_models(installed, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    bench = [installed, "-W", "ignore", "-m", "torch_blocked", "bench", "models"]
    out = run(*bench, *"net:small --input 4x9x7 --rounds 1 --format nhwc".split(), cwd=tmp_path)
    assert "| net:small | nhwc   |" in out


def test_installed_module_looks_for_libraries_beside_itself_only(installed):
    (module,) = installed.parent.parent.glob(
        "lib/python*/site-packages/torch_blocked/torch*/_C.*.so"
    )
    (run_path,) = re.findall(r"runpath: \[(.*)\]", run("readelf", "-dW", module))
    folders = run_path.split(":")
    assert all(folder.startswith("$ORIGIN/../") for folder in folders)
    found = {
        name
        for folder in folders
        for name in ("libtorch_cpu.so", "libgomp.so.1", "libdnnl.so.3")
        if (Path(folder.replace("$ORIGIN", str(module.parent))) / name).exists()
    }
    assert found == {"libtorch_cpu.so", "libgomp.so.1", "libdnnl.so.3"}


def test_source_distribution_holds_all_that_the_build_needs(tmp_path):
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=ROOT)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    build = {"setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"}
    build |= {"THIRD_PARTY_NOTICES.txt", "release/sbom.py"}
    folders = ("csrc", "src/torch_blocked/include", "src/torch_blocked/share")
    sources = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in ROOT.glob(f"{folder}/**/*")
        if path.is_file()
    }
    assert names >= build | sources
