"""The package's modules stand on one another: no circle, and no import that waits to hide one."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import torch_blocked
from torch_blocked import _C

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


def test_what_the_types_say_of_the_extension_is_there():
    """Every name of _C.pyi, and every method of its classes."""
    tree = ast.parse((ROOT / "_C.pyi").read_text())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert hasattr(_C, node.name), node.name
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            name = each.name if isinstance(each, ast.FunctionDef) else each_name(each)
            assert hasattr(getattr(_C, node.name), name), f"{node.name}.{name}"


def each_name(statement):
    """What an annotation or an assignment in a class is of."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    return target.id


# A bare subclass of torch.Tensor, an op on which makes torch import what it does for any of them
# (torch.distributed.tensor, to know its class); then the first fallback, and what that imports.
FALLBACK = """
import sys, torch, torch_blocked, warnings
warnings.simplefilter("ignore")
class Bare(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.zeros(1)
blocked = torch.randn(1, 33, 6, 5).to_blocked()
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
torch.Tensor._make_subclass(Bare, torch.zeros(3)).relu()
before = set(sys.modules)
blocked.sort(1)
assert "torch._dynamo" not in sys.modules
print(sorted(set(sys.modules) - before))
"""


def test_the_first_fallback_imports_nothing():
    done = subprocess.run(
        [sys.executable, "-c", FALLBACK], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
