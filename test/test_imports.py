"""The package's modules stand on one another: no circle, and no import that waits to hide one."""

import ast
import graphlib
from pathlib import Path

import pytest

import torch_blocked

pytestmark = pytest.mark.any_isa

ROOT = Path(torch_blocked.__file__).parent
MODULES = {
    ".".join(("torch_blocked", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in ROOT.rglob("*.py")
}
PACKAGES = {name.removesuffix(".__init__") for name in MODULES if name.endswith(".__init__")}


def imported(node, module):
    """The modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in MODULES}
    package = module.split(".")[: -node.level] if node.level else []
    origin = ".".join([*package, *filter(None, [node.module])])
    names = {f"{origin}.{alias.name}" for alias in node.names} & MODULES.keys()
    return names or ({origin, f"{origin}.__init__"} & MODULES.keys() - {"torch_blocked.__init__"})


def imports_of(module, everywhere):
    tree = ast.parse(MODULES[module].read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    kinds = (ast.Import, ast.ImportFrom)
    return set().union(*(imported(each, module) for each in nodes if isinstance(each, kinds)))


def test_no_circle():
    graph = {module: imports_of(module, everywhere=True) for module in MODULES}
    assert sum(map(len, graph.values())) > 100
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", sorted(name for name in MODULES if ".bench" not in name))
def test_no_import_waits(module):
    assert imports_of(module, everywhere=True) == imports_of(module, everywhere=False)
