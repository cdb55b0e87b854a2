"""What a build takes in and what a wheel carries: locked requirements, the bill of materials,
licences, equal bytes of equal builds, and life without what is optional."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.processes import python
from packaging.requirements import Requirement
from packaging.version import Version

import torch_blocked

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULE = Path(torch_blocked._C.__file__)
TORCH = Path(torch.__file__).parent
NOTICES = (ROOT / "THIRD_PARTY_NOTICES.txt").read_text()


@pytest.fixture
def release(monkeypatch):
    """Imports a script of release/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return importlib.import_module


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# The lock file


def pins(text: str) -> dict[str, str]:
    """Name to version; refuses what is no comment and no pin with hashes."""
    line = r"([a-z0-9-]+)==([\w.]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
    assert re.sub(line + r"|#.*\n", "", text) == ""
    found = re.findall(line, text)
    assert len({name for name, *_ in found}) == len(found)
    return {name: version for name, version, _ in found}


@pytest.fixture
def locked(release) -> dict[str, str]:
    return pins(release("required").LOCK.read_text())


@pytest.mark.parametrize(
    "text",
    ["torch==2.13.0\n", "torch>=2.13 \\\n    --hash=sha256:" + "0" * 64, "torch==2 --hash=md5:0\n"],
)
def test_a_line_without_a_version_or_a_hash_is_found(text):
    with pytest.raises(AssertionError):
        pins(text)


def test_the_lock_file_satisfies_the_ranges_of_the_project(release, locked):
    parts = release("required").PARTS
    asked = [Requirement(each) for part in parts.values() for each in part]
    assert len(asked) > 20
    wrong = [
        str(each)
        for each in asked
        if canonical(each.name) not in locked or locked[canonical(each.name)] not in each.specifier
    ]
    assert wrong == []


def needed_by(name: str) -> list[Requirement]:
    """What an installed package needs here, without extras. A CUDA build of torch needs packages of
    NVIDIA besides, all behind markers; they are torch's choice."""
    needed = [Requirement(each) for each in distribution(name).requires or ()]
    if canonical(name) == "torch":
        return [each for each in needed if not each.marker]
    return [each for each in needed if not each.marker or each.marker.evaluate({"extra": ""})]


def test_the_lock_file_has_all_that_its_packages_need(locked):
    wrong = []
    for name, version in locked.items():
        try:
            same = Version(distribution(name).version).public == version
        except PackageNotFoundError:
            continue  # of the part for releases
        for each in needed_by(name) if same else ():
            if locked.get(canonical(each.name), "") not in each.specifier:
                wrong.append(f"{name} needs {each}")
    assert wrong == []


def test_parts_are_exact_for_one_python_and_torch_and_ranges_for_others(
    release, monkeypatch, tmp_path
):
    required = release("required")
    fits, torch_lines = required.target("2.13"), ["torch==2.13.0 \\", "    --hash=x"]
    lines = ["# made", fits, "## torch", *torch_lines, "## build", "ninja==1 --hash=y"]
    monkeypatch.setattr(required, "LOCK", tmp_path / "lock.txt")
    required.LOCK.write_text("\n".join([*lines, ""]))
    assert required.required("torch", "2.13") == ["--require-hashes", *torch_lines]
    assert required.required("build", "2.13") == ["--require-hashes", "ninja==1 --hash=y"]
    assert required.download("2.13") == ["torch==2.13.0"]
    assert required.required("torch", "2.14") == required.download("2.14") == ["torch==2.14.*"]
    assert required.required("build", "2.14") == required.PARTS["build"]
    monkeypatch.setattr(sys, "version_info", (3, 99))
    assert required.target("2.13") != fits
    assert required.required("build", "2.13") == required.PARTS["build"]


def test_the_lock_file_is_written_as_it_is_read(release):
    """Each part holds what no earlier part has brought, and torch has both hashes."""
    lock, required = release("lock"), release("required")
    ours, of_pypi = "a" * 64, "b" * 64
    found = {part: {} for part in required.PARTS}
    found["torch"] = {"torch": ("2.13.0", ours)}
    found["build"] = {"ninja": ("1.13.2", ours), "cmake": ("4.4.5", ours)}
    text = lock.text(found, of_pypi, "2.13")
    assert pins(text) == {"torch": "2.13.0", "ninja": "1.13.2", "cmake": "4.4.5"}
    assert text.count(ours) == 3 and text.count(of_pypi) == 1
    assert required.target("2.13") in text.splitlines()
    assert re.findall(r"^## (\w+)$", text, re.M) == list(required.PARTS)


def test_torch_is_a_part_of_its_own(release):
    """It is installed alone, so its part may name nothing else."""
    assert [*pins("\n".join([*release("required").locked("torch"), ""]))] == ["torch"]


# Wheels


def packed(folder: Path, umask: int, changed: int) -> Path:
    """A wheel of the module in use, from a copy of the sources whose files last changed then."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    shutil.copytree(ROOT / "release", sources / "release")
    texts = ["LICENSE", "MANIFEST.in", "README.md", "THIRD_PARTY_NOTICES.txt"]
    for name in [*texts, "pyproject.toml", "setup.py"]:
        shutil.copy2(ROOT / name, sources)
    prebuilt = folder / "prebuilt"
    (prebuilt / MODULE.parent.name).mkdir(parents=True)
    shutil.copy2(MODULE, prebuilt / MODULE.parent.name)
    shutil.copytree(ROOT / "src/torch_blocked/share", prebuilt / "share")
    for path in folder.rglob("*"):
        os.utime(path, (changed, changed))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet"]
    variables = {"TORCH_BLOCKED_PREBUILT": str(prebuilt), "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        [*pip, "--wheel-dir", folder / "out", sources],
        env=os.environ | variables,
        umask=umask,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next((folder / "out").glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return packed(tmp_path_factory.mktemp("a"), 0o022, 1_000_000_000)


def inside(wheel: Path, end: str) -> str:
    """The text of the one file whose path ends so."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(end))
        return archive.read(name).decode()


@pytest.fixture(scope="module")
def bill(wheel) -> dict:
    return json.loads(inside(wheel, ".dist-info/sboms/torch_blocked.cdx.json"))


def test_the_same_module_packs_to_the_same_bytes(release, wheel, tmp_path):
    """Whatever the folder is called, when its files changed and what its umask is."""
    other = packed(tmp_path / "a_longer_name", 0o077, 1_500_000_000)
    assert release("reproduce").differences(wheel, other) == []
    assert wheel.name == other.name


def test_differences_of_wheels_are_named(release, tmp_path):
    reproduce = release("reproduce")
    paths = [tmp_path / name for name in ("first.whl", "second.whl", "third.whl")]
    for path, time, level in zip(paths, (1990, 1990, 2000), (1, 9, 9), strict=True):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
            for name in ("same.py", "other.py"):
                year = time if name == "other.py" else 1990
                entry = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
                archive.writestr(entry, b"x" * 999 + bytes(range(256)) * 9, zipfile.ZIP_DEFLATED)
    first, second, third = paths
    assert reproduce.differences(first, first) == []
    assert reproduce.differences(second, third) == ["other.py"]
    second.write_bytes(first.read_bytes() + b"\0")  # behind the archive's end
    assert reproduce.differences(first, second) == ["first.whl"]


def test_files_in_a_wheel_have_the_day_of_the_release(release, monkeypatch):
    wheels = release("wheels")
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    day = datetime.fromtimestamp(int(wheels.epoch()), UTC).date().isoformat()
    assert f'date-released: "{day}"' in (ROOT / "CITATION.cff").read_text()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "7")
    assert wheels.epoch() == "7"


def test_the_module_names_no_folder_of_the_machine_that_compiled_it():
    """Assertions name files. Two machines would build two modules otherwise."""
    content = MODULE.read_bytes()
    named = [str(each) for each in (ROOT / "csrc", TORCH / "include") if bytes(each) in content]
    assert named == []
    assert b"csrc/ops/implementations.cpp" in content


def test_a_source_distribution_holds_what_setup_imports():
    included = re.findall(r"^include (.*)$", (ROOT / "MANIFEST.in").read_text(), re.M)
    assert "release/sbom.py" in " ".join(included).split()


# The bill of materials


def test_the_bill_is_a_cyclonedx_document(bill):
    assert bill["bomFormat"] == "CycloneDX" and bill["specVersion"] == "1.6"
    itself = bill["metadata"]["component"]
    assert (itself["name"], itself["version"]) == (PROJECT["name"], PROJECT["version"])
    assert itself["licenses"] == [{"license": {"id": PROJECT["license"]}}]
    for each in [itself, *bill["components"]]:
        assert each["type"] == "library" and each["name"] and each["licenses"], each
        assert re.fullmatch(r"pkg:(pypi|generic|github)/[\w./+-]+(@[\w.%-]+)?", each["purl"]), each
    refs = [each["bom-ref"] for each in bill["components"]]
    assert len(set(refs)) == len(refs)
    first, *others = bill["dependencies"]
    assert first == {"ref": itself["bom-ref"], "dependsOn": refs}
    assert others == [{"ref": ref} for ref in refs]


def used(bill: dict, way: str) -> dict[str, dict]:
    """Name to component, of those that the wheel uses in this way."""
    return {
        each["name"]: each for each in bill["components"] if each["bom-ref"].startswith(f"{way}/")
    }


def said(part: dict, name: str) -> str:
    (value,) = (row["value"] for row in part["properties"] if row["name"].endswith(f":{name}"))
    return value


def test_the_bill_names_what_is_installed_with_the_package(bill):
    found = used(bill, "run-time").values()
    assert sorted(said(each, "requirement") for each in found) == sorted(PROJECT["dependencies"])


def test_the_bill_names_every_library_that_the_module_links_to(bill):
    output = subprocess.check_output(["readelf", "-dW", MODULE], text=True, env={"LC_ALL": "C"})
    needed = re.findall(r"NEEDED.*\[(.*)\]", output)
    assert len(needed) > 5 and set(used(bill, "linked")) == set(needed)


def test_the_bill_names_what_is_compiled_in(bill):
    found = {name: part["version"] for name, part in used(bill, "compiled").items()}
    assert found.pop("torch") == torch.__version__
    assert found.pop("pybind11").split(".")[0] >= "2"
    assert found.pop("oneDNN") == torch_blocked.env()["onednn"]
    assert torch_blocked.env()["build"].endswith(f"GNU {found.pop('GCC')}")
    assert found.pop("CPython") == sys.version.split()[0]
    assert [*found] == ["glibc"]


def document(sbom: ModuleType, **changed: object) -> dict:
    include = Path(sys.prefix) / "include"
    given = {"modules": [MODULE], "torches": [TORCH], "dnnl_include": include, "project": PROJECT}
    return sbom.document(sbom.Build(**given | changed))


def test_the_bill_refuses_what_it_does_not_know(release, monkeypatch):
    sbom = release("sbom")
    document(sbom)
    with pytest.raises(SystemExit, match=r"^torch_blocked::sbom: expected a torch of each of"):
        document(sbom, torches=[])
    with pytest.raises(SystemExit, match="expected a torch of each of"):
        document(sbom, modules=[])
    more = PROJECT | {"dependencies": [*PROJECT["dependencies"], "left-pad>=1"]}
    with pytest.raises(SystemExit, match="expected a known licence, got left-pad; add it"):
        document(sbom, project=more)
    monkeypatch.setattr(sbom, "needed", lambda module: ["libc.so.6", "libcrypto.so.3"])
    with pytest.raises(SystemExit, match=r"expected a known library, got libcrypto\.so\.3; add"):
        document(sbom)


# Licences

# Those that ask for no more than their notices of whoever passes the package on. MPL-2.0 binds who
# changes its files, and nobody does: tqdm is installed, not copied.
ALLOWED = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "ISC", "MIT", "MPL-2.0"}
ALLOWED |= {"PSF-2.0", "Apache-2.0 WITH LLVM-exception"}
# The compiler's and the system's: what they leave in a module is free, and they are linked to only.
OF_THE_SYSTEM = {"GPL-3.0-or-later WITH GCC-exception-3.1", "LGPL-2.1-or-later"}

# What packages say without SPDX's words.
WORDS = {
    "Apache v2.0": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
}


def licence(name: str) -> str:
    """The SPDX expression of an installed package, from its metadata."""
    metadata = distribution(name).metadata
    classifiers = metadata.get_all("Classifier") or []
    classified = [each.rpartition(" :: ")[2] for each in classifiers if "License ::" in each]
    given = metadata["License-Expression"] or metadata["License"] or " ".join(classified)
    return WORDS.get(given, given)


def parts_of(expression: str) -> set[str]:
    return set(re.split(r" (?:AND|OR) ", expression.replace("(", "").replace(")", "")))


def run_time() -> list[str]:
    """What pip installs with this package, directly or not."""
    waiting, found = [Requirement(each).name for each in PROJECT["dependencies"]], []
    while waiting:
        name = canonical(waiting.pop())
        if name not in found:
            found.append(name)
            waiting += [each.name for each in needed_by(name)]
    return sorted(found)


def test_licences_of_what_is_installed_with_the_package():
    found = {name: parts_of(licence(name)) for name in run_time()}
    assert {"torch", "tqdm", "onednn-cpu-gomp", "sympy", "markupsafe"} <= found.keys()
    assert {name: wrong for name, parts in found.items() if (wrong := parts - ALLOWED)} == {}


def expression(part: dict) -> str:
    (given,) = part["licenses"]
    return given.get("expression") or given["license"]["id"]


def test_licences_of_what_is_compiled_in_or_linked(bill):
    for name, part in (used(bill, "compiled") | used(bill, "linked")).items():
        of_the_system = re.fullmatch(r"GCC|glibc|lib(gomp|stdc\+\+|gcc_s|c|m)\..*|ld-.*", name)
        allowed = ALLOWED | (OF_THE_SYSTEM if of_the_system else set())
        assert parts_of(expression(part)) <= allowed, part


def test_the_bill_says_the_licences_that_packages_say(bill):
    found = used(bill, "run-time")
    assert {name: expression(part) for name, part in found.items()} == {
        name: licence(name) for name in found
    }


def test_notices_of_what_is_compiled_in_are_in_the_wheel(bill, wheel):
    assert inside(wheel, ".dist-info/licenses/THIRD_PARTY_NOTICES.txt") == NOTICES
    heads = re.findall(r"^-{80}\n(\w+)", NOTICES, re.M)
    names = {"PyTorch" if name == "torch" else name for name in used(bill, "compiled")}
    assert names == set(heads)


@pytest.mark.parametrize("end", ["licenses/LICENSE", "third_party/pybind11/LICENSE"])
def test_notices_repeat_what_torch_ships(end):
    """The first notice of the file, word for word: its copyrights, conditions and disclaimer."""
    files = [each for each in distribution("torch").files if str(each).endswith(end)]
    text = files[0].read_text()
    own = text[: text.index("POSSIBILITY OF SUCH DAMAGE.")].split()
    assert len(own) > 150 and " ".join(own) in " ".join(NOTICES.split())


# Without what is optional

WITHOUT = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuses())
import torch, torch_blocked as tb
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 17, 3), torch.nn.ReLU()).eval()
x = torch.randn(2, 3, 9, 7)
with torch.no_grad():
    fast = tb.optimize(model, x)
    assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert torch.allclose(model(x.to_blocked()).to_dense(), model(x), atol=1e-5)
print(type(fast).__name__, "numpy" in sys.modules)
"""


def test_the_package_works_without_numpy():
    done = python(WITHOUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["OptimizedModule", "False"]
