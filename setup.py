"""Runs CMake; everything else is in pyproject.toml and CMakeLists.txt."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()

# Where the installed module finds libtorch, and libdnnl.so.3, which the wheel onednn-cpu-gomp puts
# into <prefix>/lib: the module lies in <prefix>/lib/pythonX.Y/site-packages/torch_blocked, or in
# lib64 on some systems, or in <target>/torch_blocked after `pip install --target`.
INSTALL_RUN_PATH = [
    "$ORIGIN/../torch/lib",
    "$ORIGIN/../../..",
    "$ORIGIN/../../../../lib",
    "$ORIGIN/../lib",
]


def file_of(package: str, end: str) -> Path:
    """The file that the wheel `package` installed under a path that ends so."""
    dist = distribution(package)
    file = next(file for file in dist.files if str(file).endswith(end))
    return Path(dist.locate_file(file)).resolve()


def dnnl_folders() -> tuple[Path, Path, list[str]]:
    """oneDNN's CMake folder, its library folder in place, and what the installed run path adds.

    The wheel's, unless the environment variable dnnl_DIR names an oneDNN of your own."""
    if "dnnl_DIR" in os.environ:
        config = Path(os.environ["dnnl_DIR"]).resolve()
        library = config.parents[1]
        return config, library, [str(library)]
    config = file_of("onednn-devel-cpu-gomp", "dnnl/dnnl-config.cmake").parent
    return config, Path(sys.prefix) / "lib", []


class CMakeBuild(build_ext):
    """In place: the build folder is build/, and _C and _build.py are written into torch_blocked/.

    For a wheel: a build folder of its own (or TORCH_BLOCKED_BUILD_DIR), then `cmake --install`."""

    def run(self):
        import pybind11
        import torch

        own = ROOT / "build"
        temporary = os.environ.get("TORCH_BLOCKED_BUILD_DIR", self.build_temp)
        build = own if self.inplace else Path(temporary).resolve()
        dnnl_config, dnnl_library, run_path = dnnl_folders()
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "CMAKE_MAKE_PROGRAM": file_of("ninja", "bin/ninja"),
            "Python_EXECUTABLE": sys.executable,
            "Torch_DIR": Path(torch.utils.cmake_prefix_path) / "Torch",
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "dnnl_DIR": dnnl_config,
            "TORCH_BLOCKED_OUTPUT_DIR": (ROOT if build == own else build) / "torch_blocked",
            "CMAKE_BUILD_RPATH": dnnl_library,
            "CMAKE_INSTALL_RPATH": ";".join(run_path + INSTALL_RUN_PATH),
        }
        defines = [f"-D{key}={value}" for key, value in options.items()]
        cmake = file_of("cmake", "data/bin/cmake")
        # An old cache may name a torch that is gone; --fresh would delete the objects as well.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.check_call([cmake, "-G", "Ninja", "-S", ROOT, "-B", build, *defines])
        subprocess.check_call([cmake, "--build", build])
        if not self.inplace:
            package = Path(self.build_lib).resolve() / "torch_blocked"
            subprocess.check_call([cmake, "--install", build, "--prefix", package])


setup(
    ext_modules=[Extension("torch_blocked._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
