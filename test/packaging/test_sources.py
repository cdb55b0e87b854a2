"""The C++ sources: layers, folders, names of one unit, and the hash that tells old times apart."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# A folder includes what stands before it.
LAYERS = ["format", "runtime", "kernels", "ops", "graph", "python"]


def sources(*suffixes: str) -> list[Path]:
    return [path for path in sorted(CSRC.rglob("*")) if path.suffix in suffixes]


def test_layers() -> None:
    wrong = []
    for path in sources(".h", ".cpp", ".inc"):
        own = LAYERS.index(path.relative_to(CSRC).parts[0])
        for included in re.findall(r'#include "(\w+)/', path.read_text()):
            if included in LAYERS and LAYERS.index(included) > own:
                wrong.append(f"{path.relative_to(CSRC)} includes {included}/")
    assert not wrong


def test_folders_say_what_lives_there() -> None:
    folders = {path.parent for path in sources(".h", ".cpp", ".inc")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "README.md").exists()] == []


def names_of_anonymous_namespaces(code: str) -> set[str]:
    """Functions and types that a source defines for itself, at the outermost level."""
    names = set()
    for part in re.findall(r"^namespace \{$(.*?)^\}  // namespace$", code, re.S | re.M):
        names |= set(re.findall(r"^(?:struct|class) (\w+)[^;]*? \{", part, re.M))
        # A definition begins in the first column, and its body or the next line is indented.
        for statement in re.findall(r"^[A-Za-z][^;{}#]*\{", part, re.M):
            called = re.match(r"(?:[\w:<>,&*\s]+?[\s&*])?(\w+)\(", statement)
            if called and not statement.startswith(("struct", "class", "namespace", "enum")):
                names.add(called.group(1))
    return names


def units() -> dict[str, list[Path]]:
    """The sources that CMakeLists.txt compiles together: those of a folder, less the ones apart."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    apart = re.search(r'set\(apart "(.*?)"\)', cmake)
    assert apart
    found = defaultdict(list)
    for path in sources(".cpp"):
        name = str(path.relative_to(ROOT))
        if path.relative_to(CSRC).parts[0] in ("format", "runtime", "ops", "graph"):
            if not re.search(apart.group(1) + r"|/implementations[.]cpp", name):
                found[str(path.parent.relative_to(CSRC))].append(path)
    return found


def test_two_files_of_a_unit_name_nothing_alike() -> None:
    """Overloads would compile: a wrong implicit conversion would then call the other file's."""
    alike = []
    for folder, paths in units().items():
        owner: dict[str, str] = {}
        for path in paths:
            for name in names_of_anonymous_namespaces(path.read_text()):
                other = owner.setdefault(name, path.name)
                if other != path.name:
                    alike.append(f"{folder}: {name} in {other} and {path.name}")
    assert not sorted(alike)


def test_names_of_anonymous_namespaces_are_found() -> None:
    code = (
        "namespace {\n\nstruct Cut {\n  int rows;\n};\n\n"
        "std::optional<Plan> plan_aten(const Problem& p,\n                const Other& o) {\n"
        "  run(p);\n}\n\nconst char* refuses(const P& p) { return 0; }\n\n}  // namespace\n"
    )
    assert names_of_anonymous_namespaces(code) == {"Cut", "plan_aten", "refuses"}


def source_hash(folder: Path) -> str:
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    assert cmake, "cmake comes with the build requirements"
    script = ROOT / "cmake" / "source_hash.cmake"
    command = [cmake, f"-DFOLDERS={folder}", "-P", str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.strip()


def test_hash_of_timed_sources(tmp_path: Path) -> None:
    """Comments and space do not make measured times stale; code in any subfolder does."""
    inner = tmp_path / "winograd"
    inner.mkdir()
    source = inner / "src.cpp"
    source.write_text("int tile() { return 4; }\n")
    before = source_hash(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", before)
    source.write_text("// Tiles of 4x4; more was slower.\nint tile() {\n  return 4;  // rows\n}\n")
    assert source_hash(tmp_path) == before
    source.write_text("int tile() { return 6; }\n")
    assert source_hash(tmp_path) != before
    source.write_text("int tile() { return 4; }\n")
    (inner / "dst.cpp").write_text("int rows;\n")
    assert source_hash(tmp_path) != before


@pytest.mark.parametrize("family", ["convolution", "linear", "gradient", "quantized"])
def test_rows_of_a_list_are_constants(family: str) -> None:
    """Each row of a list.inc is defined once, in a file of its folder."""
    folder = CSRC / "ops" / family
    rows = re.findall(r"^IMPLEMENTATION\((\w+)\)", (folder / "list.inc").read_text(), re.M)
    code = "\n".join(path.read_text() for path in folder.rglob("*.cpp"))
    assert rows
    for row in rows:
        defined = re.findall(rf'\w+::{row}\s*=\s*\{{\s*\.name = "(\w+)"', code)
        assert defined == [row]


def test_mypy_names_modules_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = []
    for override in project["tool"]["mypy"]["overrides"]:
        modules = override["module"]
        named += [modules] if isinstance(modules, str) else modules
    ours = [name for name in named if name.startswith("torch_blocked")]
    gone = []
    for name in ours:
        path = ROOT / "src" / name.removesuffix(".*").replace(".", "/")
        if not path.is_dir() and not path.with_suffix(".py").exists():
            gone.append(name)
    assert ours
    assert not gone


def test_lists_are_formatted() -> None:
    """Every kind of C++ file has a hook of clang-format."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "types_or: [c, c++]" in hooks
    assert r"files: \.inc$" in hooks
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources(".inc")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not long
