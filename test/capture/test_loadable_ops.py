"""The list of ops that a saved model may call: what schemas tell of it, and what captures call."""

import re
from pathlib import Path

import pytest
import torch
from random_models import random_program

import torch_blocked as tb
from torch_blocked import _C

pytestmark = pytest.mark.any_isa

LIST = Path(__file__).parents[2] / "csrc" / "graph" / "capture" / "loadable_ops.inc"
# What may be given to an op: nothing that names a file, a storage, a stream or an object.
ARGUMENTS = re.compile(
    r"(Optional\[)?(List\[)?(Optional\[)?(Tensor|number|int|float|bool|str|Device|Generator)\]*$"
)
# Words among arguments of text, which are modes; a file would be one of the others.
TEXTS = set(
    """approximate driver equation indexing interpolation mode norm ord p padding pad_mode
    padding_side reduce rounding_mode side UPLO""".split()
)
NAMES = re.compile(r"storage|stream|symbol|handle|pointer", re.I)


def listed() -> list[str]:
    words = " ".join(re.findall(r'^ *"(.*)"$', LIST.read_text(), re.MULTILINE)).split()
    return [word if "::" in word else f"aten::{word}" for word in words]


def schemas() -> dict[str, object]:
    return {f"{each.name}.{each.overload_name}": each for each in torch._C._jit_get_all_schemas()}


def test_the_list_is_one():
    names = listed()
    assert len(names) > 800 and len(set(names)) == len(names)
    assert all(_C.is_loadable(*each.rsplit(".", 1)) for each in names)


def test_ops_return_tensors_and_touch_nothing_else():
    known = schemas()
    found = [known[each] for each in listed() if each in known]
    assert len(found) > 800
    for schema in found:
        name = f"{schema.name}.{schema.overload_name}"
        arguments = schema.arguments
        assert not any(each.alias_info and each.alias_info.is_write for each in arguments), name
        assert all(str(each.type) in ("Tensor", "List[Tensor]") for each in schema.returns), name
        assert schema.returns, name
        assert all(ARGUMENTS.match(str(each.type)) for each in arguments), name
        texts = {each.name for each in arguments if "str" in str(each.type)}
        assert texts <= TEXTS, (name, texts - TEXTS)
        assert not any(NAMES.search(each.name) for each in arguments), name


@pytest.mark.parametrize(
    "name",
    (
        "aten::from_file.",
        "aten::as_strided.",
        "aten::slice_inverse.",
        "aten::set_.source_Storage",
        "aten::set.source_Tensor",
        "aten::resize_.",
        "aten::zero_.",
        "aten::add.out",
        "aten::add_.Tensor",
        "aten::_print.",
        "aten::_reshape_alias.",
        "aten::pin_memory.",
        "aten::lu_unpack.",
        "aten::_cudnn_init_dropout_state.",
        "prim::Print.",
        "torch_blocked::clear_tail_.",
        "torch_blocked::batch_norm_training.",
        "mylib::add.Tensor",
        "add.Tensor",
        ".",
    ),
)
def test_others_are_not_on_it(name):
    assert not _C.is_loadable(*name.rsplit(".", 1))


def test_ops_of_captures_are_on_it():
    """Of random models with most of what the passes know."""
    missing = set()
    for seed in range(24):
        program = random_program(seed)
        if program.is_cut():
            continue
        with torch.no_grad():
            fast = tb.optimize(program.build(), program.arguments(0), tune=False, verify=False)
        for form in getattr(fast, "_forms", []):
            calls = {(node.name, node.overload) for node in form.captured.nodes}
            missing |= {each for each in calls if not _C.is_loadable(*each)}
    assert not missing
