"""Which torch is taken: what is used of it in private, and versions that were never tried."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import private_names

import torch_blocked
from torch_blocked import torch_versions

pytestmark = pytest.mark.any_isa

ROOT = Path(__file__).parents[2]
PACKAGE = Path(torch_blocked.__file__).parent


def test_the_list_of_private_names_is_that_of_the_source():
    listed = torch_versions.private_names()
    assert len(listed) == len(set(listed))
    of_python = {"._getframe", "._at_fork_reinit", "._is_owned"}  # of sys and of locks
    used = private_names.uses(PACKAGE) - of_python
    named = {name for name in used if not name.startswith(".")}
    of_objects = used - named
    ends = {"." + name.rpartition(".")[2] for name in listed}
    assert of_objects <= ends
    assert {name for name in listed if "." + name.rpartition(".")[2] not in of_objects} == named


def test_private_names_are_found_in_every_spelling(tmp_path):
    (tmp_path / "a.py").write_text(
        "import torch\n"
        "from torch._ops import OpOverload\n"
        "from torch.utils import _pytree as pytree\n"
        "aten = torch.ops.aten\n"
        "pytree.tree_map\n"
        "aten._softmax.default\n"
        "torch._C._nn.gelu(x._version)\n"
        "self._own = torch.ops.aten.relu\n"
        "self._own.x\n"
    )
    assert private_names.uses(tmp_path) == {
        "torch._ops.OpOverload",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_map",
        "torch.ops.aten._softmax.default",
        "torch._C._nn.gelu",
        "._version",
    }


def test_every_private_name_is_there():
    """Also those of modules that importing torch does not load: they are loaded here."""
    for name in torch_versions.private_names():
        module, parts = torch, name.split(".")[1:]
        while parts and not hasattr(module, parts[0]):
            __import__(f"{module.__name__}.{parts[0]}")
            module = getattr(module, parts.pop(0))
    torch_versions.check(torch)


@pytest.mark.parametrize(
    "name", ["torch._C._no_such", "torch._no_such", "torch._subclasses.no_such", "torch.nn._no.x"]
)
def test_a_missing_private_name_is_told(monkeypatch, tmp_path, name):
    listed = tmp_path / "list.txt"
    listed.write_text(f"# why\n{name}  # a reason\ntorch._C._nn.gelu\n")
    monkeypatch.setattr(torch_versions, "_PRIVATE", listed)
    with pytest.raises(ImportError) as caught:
        torch_versions.check(torch)
    first, last = torch_versions.TESTED[0], torch_versions.TESTED[-1]
    assert str(caught.value) == (
        f"torch_blocked: expected torch {first} to {last}, got torch {torch.__version__} without "
        f'{name}; pip install "torch=={last}.*"'
    )


def test_a_newer_torch_warns_once(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    with pytest.warns(UserWarning, match=r"torch 2\.99\.1 is newer than torch") as caught:
        torch_versions.check(torch)
    assert len(caught) == 1


def test_tested_versions_do_not_warn(monkeypatch):
    for minor in torch_versions.TESTED:
        monkeypatch.setattr(torch, "__version__", f"{minor}.7+cu130")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_versions.check(torch)


def test_metadata_and_documents_name_the_tested_versions():
    first, last = (
        torch_versions.minor(each)
        for each in torch_versions.TESTED[:: len(torch_versions.TESTED) - 1]
    )
    requirement = f'"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"'
    assert requirement in (ROOT / "pyproject.toml").read_text()
    table = (ROOT / "docs" / "install.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+) +\|", table, re.MULTILINE)
    assert tuple(rows) == torch_versions.TESTED


def test_the_check_at_import_loads_no_more_of_torch():
    code = (
        "import sys, torch; before = set(sys.modules); from importlib import util; "
        f"spec = util.spec_from_file_location('v', {str(PACKAGE / 'torch_versions.py')!r}); "
        "v = util.module_from_spec(spec); spec.loader.exec_module(v); v.check(torch); "
        "print(sorted(n for n in set(sys.modules) - before if n.startswith('torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
