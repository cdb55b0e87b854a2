"""The software bill of materials of a wheel, as CycloneDX 1.6. setup.py writes it into
torch_blocked-*.dist-info/sboms (PEP 770).

It names what is installed with the package, what is compiled into its modules and which shared
libraries these link to. It holds no time and no random number, so equal builds have equal bills."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAME = "torch_blocked.cdx.json"

GCC_LICENCE = "GPL-3.0-or-later WITH GCC-exception-3.1"
GLIBC_LICENCE = "LGPL-2.1-or-later"
TORCH_LICENCE = (
    "Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSD-2-Clause AND BSD-3-Clause AND BSL-1.0 "
    "AND MIT"
)

# The licences of what pyproject.toml's dependencies name; test_supply_chain.py compares them with
# the installed packages' own words.
LICENCES = {"onednn-cpu-gomp": "Apache-2.0", "torch": TORCH_LICENCE, "tqdm": "MPL-2.0 AND MIT"}

# The libraries that a module may link to: name, licence, purl and who brings it.
LINKED = [
    (r"lib(torch\w*|c10)\.so", TORCH_LICENCE, "pkg:pypi/torch", "torch"),
    (r"libdnnl\.so\.\d+", "Apache-2.0", "pkg:pypi/onednn-cpu-gomp", "onednn-cpu-gomp"),
    (r"libgomp\.so\.1", GCC_LICENCE, "pkg:generic/gcc", "torch"),
    (r"lib(stdc\+\+\.so\.6|gcc_s\.so\.1)", GCC_LICENCE, "pkg:generic/gcc", "the system"),
    (r"lib(c|m)\.so\.6", GLIBC_LICENCE, "pkg:generic/glibc", "the system"),
    (r"ld-linux-x86-64\.so\.2", GLIBC_LICENCE, "pkg:generic/glibc", "the system"),
]


@dataclass
class Build:
    """What a wheel is made from: its modules, the folders of the torch packages and of oneDNN's
    headers that they were compiled with, and the table `project` of pyproject.toml."""

    modules: list[Path]
    torches: list[Path]
    dnnl_include: Path
    project: dict


def refuse(rule: str, got: object, way_out: str) -> SystemExit:
    return SystemExit(f"torch_blocked::sbom: expected {rule}, got {got}; {way_out}")


def readelf(module: Path, *options: str) -> str:
    command = ["readelf", *options, str(module)]
    variables = os.environ | {"LC_ALL": "C"}
    return subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def needed(module: Path) -> list[str]:
    """The shared libraries that the loader loads with this one."""
    return re.findall(r"\(NEEDED\) .*\[(.*)\]", readelf(module, "-dW"))


def compiler(module: Path) -> str:
    """The version of the GCC that compiled it, as its section .comment says."""
    found = re.findall(r"GCC: \(.*?\) ([\d.]+)", readelf(module, "-p", ".comment"))
    if not found:
        raise refuse("a module by GCC", module, "compile it with g++, or extend release/sbom.py")
    return found[0]


def numbers(header: Path, *names: str) -> list[str]:
    """The values of these macros."""
    text = header.read_text()
    return [re.search(rf"^#define {name} +(\S+)", text, re.M)[1].strip('"') for name in names]


def torch_version(folder: Path) -> str:
    return re.search(r"__version__ = '(.+)'", (folder / "version.py").read_text())[1]


def component(ref: str, name: str, licence: str, purl: str, **more: object) -> dict:
    said = {"bom-ref": ref, "type": "library", "name": name, "purl": purl} | more
    one = {"license": {"id": licence}} if " " not in licence else {"expression": licence}
    return said | {"licenses": [one]}


def properties(**pairs: str) -> list[dict]:
    return [{"name": f"torch_blocked:{name}", "value": value} for name, value in pairs.items()]


def installed_with(project: dict) -> list[dict]:
    """The run-time dependencies, each with its range, and with a version where that is one."""
    found = []
    for requirement in sorted(project["dependencies"]):
        name, wanted = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()
        if name not in LICENCES:
            raise refuse("a known licence", name, "add it to LICENCES in release/sbom.py")
        exact = wanted.removeprefix("==") if wanted.startswith("==") else ""
        version = {"version": exact} if exact else {}
        purl = f"pkg:pypi/{name}" + (f"@{exact}" if exact else "")
        said = properties(use="installed with the package", requirement=requirement)
        ref = f"run-time/{name}"
        found.append(component(ref, name, LICENCES[name], purl, **version, properties=said))
    return found


def of_torch(folder: Path) -> list[dict]:
    """What one torch's headers bring into the modules for it."""
    version = torch_version(folder)
    minor = ".".join(version.split(".")[:2])
    header = folder / "include" / "pybind11" / "detail" / "common.h"
    macros = [f"PYBIND11_VERSION_{each}" for each in ("MAJOR", "MINOR", "MICRO")]
    pybind11 = ".".join(numbers(header, *macros))
    said = properties(use="compiled in: headers", module=f"torch{minor}")
    return [
        component(
            f"compiled/torch{minor}/torch",
            "torch",
            TORCH_LICENCE,
            f"pkg:pypi/torch@{version.replace('+', '%2B')}",
            version=version,
            properties=said,
        ),
        component(
            f"compiled/torch{minor}/pybind11",
            "pybind11",
            "BSD-3-Clause",
            f"pkg:pypi/pybind11@{pybind11}",
            version=pybind11,
            properties=said,
        ),
    ]


def compiled_in(build: Build) -> list[dict]:
    macros = [f"DNNL_VERSION_{each}" for each in ("MAJOR", "MINOR", "PATCH")]
    dnnl = ".".join(numbers(build.dnnl_include / "oneapi/dnnl/dnnl_version.h", *macros))
    tag = dnnl.removesuffix(".0")
    found = [each for folder in build.torches for each in of_torch(folder)]
    rows = [
        ("oneDNN", dnnl, "Apache-2.0", f"pkg:github/uxlfoundation/oneDNN@v{tag}", "headers"),
        (
            "CPython",
            platform.python_version(),
            "PSF-2.0",
            f"pkg:generic/cpython@{platform.python_version()}",
            "headers",
        ),
    ]
    for version in sorted({compiler(module) for module in build.modules}):
        parts = "headers of libstdc++, start files, parts of libgcc"
        rows.append(("GCC", version, GCC_LICENCE, f"pkg:generic/gcc@{version}", parts))
    glibc = os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    rows.append(("glibc", glibc, GLIBC_LICENCE, f"pkg:generic/glibc@{glibc}", "start files"))
    for name, version, licence, purl, parts in rows:
        said = properties(use=f"compiled in: {parts}")
        ref = f"compiled/{name}-{version}"
        found.append(component(ref, name, licence, purl, version=version, properties=said))
    return found


def linked_to(modules: list[Path]) -> list[dict]:
    """The shared libraries, each once."""
    found = []
    for name in sorted({name for module in modules for name in needed(module)}):
        rows = [row for row in LINKED if re.fullmatch(row[0], name)]
        if not rows:
            raise refuse("a known library", name, "add it to LINKED in release/sbom.py")
        ((_, licence, purl, owner),) = rows
        said = properties(use="linked dynamically", provided_by=owner)
        found.append(component(f"linked/{name}", name, licence, purl, properties=said))
    return found


def document(build: Build) -> dict:
    """The bill itself."""
    name, version = build.project["name"], build.project["version"]
    minors = {".".join(torch_version(folder).split(".")[:2]) for folder in build.torches}
    of_modules = {module.parent.name.removeprefix("torch") for module in build.modules}
    if not build.modules or minors != of_modules:
        raise refuse(
            f"a torch of each of {sorted(of_modules)}",
            sorted(minors),
            "let TORCH_BLOCKED_TORCH name the torch packages that the modules were built with",
        )
    purl = f"pkg:pypi/{name.replace('_', '-')}@{version}"
    licence = build.project["license"]
    itself = component(f"{name}-{version}", name, licence, purl, version=version)
    parts = [*installed_with(build.project), *compiled_in(build), *linked_to(build.modules)]
    refs = [part["bom-ref"] for part in parts]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": itself},
        "components": parts,
        "dependencies": [{"ref": itself["bom-ref"], "dependsOn": refs}]
        + [{"ref": ref} for ref in refs],
    }
