"""Runs CMake; everything else is in pyproject.toml and CMakeLists.txt."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

sys.path.insert(0, str(ROOT / "release"))
import sbom  # noqa: E402  where a build runs, its own folder is on no path

# Where the installed module finds libtorch, and libdnnl.so.3, which the wheel onednn-cpu-gomp puts
# into <prefix>/lib: the module lies in <prefix>/lib/pythonX.Y/site-packages/torch_blocked/torchA.B,
# or in lib64 on some systems, or in <target>/torch_blocked/torchA.B after `pip install --target`.
INSTALL_RUN_PATH = [
    "$ORIGIN/../../torch/lib",
    "$ORIGIN/../../../..",
    "$ORIGIN/../../../../../lib",
    "$ORIGIN/../../lib",
]


def torch_folders() -> list[Path]:
    """The torch packages to build for: those that TORCH_BLOCKED_TORCH names, or the one of this
    environment, which pip hides from a build that it isolates, but not the folder that it is in.

    Nothing is imported: a CUDA build of torch may lack its libraries here, and is as good."""
    if "TORCH_BLOCKED_TORCH" in os.environ:
        return [
            Path(each).resolve() for each in os.environ["TORCH_BLOCKED_TORCH"].split(os.pathsep)
        ]
    spec = importlib.util.find_spec("torch")
    folders = [
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        sysconfig.get_path("purelib", f"{os.name}_user"),
        sysconfig.get_path("purelib", vars={"base": sys.base_prefix}),
    ]
    found = list(spec.submodule_search_locations or []) if spec else []
    for folder in map(Path, [*found, *(os.path.join(each, "torch") for each in folders)]):
        if (folder / "version.py").exists():
            return [folder.resolve()]
    sys.exit(
        "torch_blocked::setup: expected torch in the environment to install into "
        f"({folders[0]}), got none; install torch first, or set TORCH_BLOCKED_TORCH to the "
        "folder of its package"
    )


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


def pythons() -> list[str]:
    """The Pythons to build for, each SOABI=folder of its headers: those that
    TORCH_BLOCKED_PYTHONS names, or this one."""
    if "TORCH_BLOCKED_PYTHONS" in os.environ:
        return os.environ["TORCH_BLOCKED_PYTHONS"].split(os.pathsep)
    return [f"{sysconfig.get_config_var('SOABI')}={sysconfig.get_paths()['include']}"]


class CMakeBuild(build_ext):
    """In place: the build folder is build/, or TORCH_BLOCKED_BUILD_DIR, and the modules are written
    into src/torch_blocked/.

    For a wheel: what CMake installs of a build of its own, or of that in TORCH_BLOCKED_BUILD_DIR;
    or the modules for this Python that lie in TORCH_BLOCKED_PREBUILT, one for each torch."""

    def run(self):
        if "TORCH_BLOCKED_PREBUILT" in os.environ:
            return self.copy(Path(os.environ["TORCH_BLOCKED_PREBUILT"]).resolve())
        self.build()

    def build(self):
        own = os.environ.get("TORCH_BLOCKED_BUILD_DIR", ROOT / "build" if self.inplace else "")
        build = Path(own or self.build_temp).resolve()
        output = ROOT / "src" if own else build
        dnnl_config, dnnl_library, run_path = dnnl_folders()
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "CMAKE_MAKE_PROGRAM": file_of("ninja", "bin/ninja"),
            "TORCH_BLOCKED_TORCH": ";".join(map(str, torch_folders())),
            "TORCH_BLOCKED_PYTHONS": ";".join(pythons()),
            "dnnl_DIR": dnnl_config,
            "TORCH_BLOCKED_OUTPUT_DIR": output / "torch_blocked",
            "CMAKE_BUILD_RPATH": dnnl_library,
            # A run path that is rewritten leaves the room of the one before, whose length is that
            # of this folder's name. In place, the build's own path stays.
            "CMAKE_BUILD_WITH_INSTALL_RPATH": "OFF" if own else "ON",
            "CMAKE_INSTALL_RPATH": ";".join(run_path + INSTALL_RUN_PATH),
        }
        defines = [f"-D{key}={value}" for key, value in options.items()]
        cmake = file_of("cmake", "data/bin/cmake")
        # An old cache may name a torch that is gone; --fresh would delete the objects as well.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.check_call([cmake, "-G", "Ninja", "-S", ROOT, "-B", build, *defines])
        subprocess.check_call([cmake, "--build", build])
        if not self.inplace:
            subprocess.check_call([cmake, "--install", build, "--prefix", self.package_folder()])

    def copy(self, prebuilt: Path):
        soabi = sysconfig.get_config_var("SOABI")
        modules = sorted(prebuilt.glob(f"torch*/_C.{soabi}.so"))
        if not modules:
            sys.exit(
                f"torch_blocked::setup: expected modules for {soabi} in {prebuilt}, got none; "
                "build them, or unset TORCH_BLOCKED_PREBUILT"
            )
        for module in modules:
            folder = self.package_folder() / module.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(module, folder)
        # What CMake wrote beside them. A build in place may have left an older one here.
        share = prebuilt / "share"
        shutil.copytree(share, self.package_folder() / "share", dirs_exist_ok=True)

    def package_folder(self) -> Path:
        return Path(self.build_lib).resolve() / "torch_blocked"


class Wheel(bdist_wheel):
    """Adds the bill of materials, and makes the archive depend on what is in it alone."""

    def write_wheelfile(self, folder: str, *arguments: str, **keywords: str):
        super().write_wheelfile(folder, *arguments, **keywords)
        packed = Path(self.bdist_dir)
        if not Path(folder).is_relative_to(packed):
            return  # of an editable install: its wheel holds no module
        config, _, _ = dnnl_folders()
        build = sbom.Build(
            modules=sorted(packed.glob("torch_blocked/torch*/_C.*.so")),
            torches=torch_folders(),
            dnnl_include=config.parents[2] / "include",
            project=PROJECT,
        )
        file = Path(folder) / "sboms" / sbom.NAME
        file.parent.mkdir()
        file.write_text(json.dumps(sbom.document(build), indent=2) + "\n")
        for each in packed.rglob("*"):  # the archive keeps these bits; a umask would show in them
            each.chmod(0o755 if each.is_dir() or each.suffix == ".so" else 0o644)


def readme() -> str:
    """README.md, with the files that it links to at the version's tag: PyPI shows it alone."""
    source, tag = PROJECT["urls"]["Source"], f"v{PROJECT['version']}"

    def absolute(link: re.Match) -> str:
        picture, label, target = link.groups()
        return f"{picture}[{label}]({source}/{'raw' if picture else 'blob'}/{tag}/{target})"

    relative = r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)"
    return re.sub(relative, absolute, (ROOT / "README.md").read_text())


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("torch_blocked._C", sources=[])],
    cmdclass={"bdist_wheel": Wheel, "build_ext": CMakeBuild},
)
