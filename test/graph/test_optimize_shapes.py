"""Sizes and types of results: the rules of csrc/graph/shapes.cpp against meta tensors."""

import io
import subprocess
import sys

import pytest
import torch
from helpers import networks as models
from torch import nn

import torch_blocked as tb
from torch_blocked import _C, saved
from torch_blocked.capture import capture
from torch_blocked.captured import VALUE, Capture, Node

pytestmark = pytest.mark.any_isa

BF16 = torch.bfloat16


def evaluated(argument, values):
    """An argument of a node, its values on the meta device."""
    if isinstance(argument, list):
        if len(argument) == 2 and argument[0] == VALUE:
            return values[argument[1]]
        return [evaluated(each, values) for each in argument]
    return argument


def by_meta_tensors(node, values):
    """What PyTorch returns for the node on meta tensors."""
    op = getattr(torch.ops.aten, node.name.removeprefix("aten::"))
    op = getattr(op, node.overload or "default")
    positional, named = [], {}
    for declared, argument in zip(op._schema.arguments, node.arguments, strict=True):
        if declared.kwarg_only:
            named[declared.name] = evaluated(argument, values)
        else:
            positional.append(evaluated(argument, values))
    results = op(*positional, **named)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def described(tensors):
    return [(list(each.shape), each.dtype) for each in tensors]


def check(captured: Capture, dims) -> None:
    """Every node of the capture has a rule, which says what PyTorch says."""
    values = {i: each.to("meta") for i, each in captured.constants.items()}
    values |= {
        i: torch.empty(each, device="meta") for i, each in zip(captured.inputs, dims, strict=True)
    }
    for node in captured.nodes:
        results = by_meta_tensors(node, values)
        assert _C.known_results(node, values) == described(results), node
        values |= dict(zip(node.outputs, results, strict=True))


@pytest.mark.parametrize("name", models.SOME)
def test_models(name):
    spec = models.MODELS[name]
    with torch.device("meta"):  # sizes only: no weights are made
        model = spec.constructor().eval()
    channels, *spatial = spec.input_dims
    for dims in ([1, channels, *spatial], [3, channels, *(size + 32 for size in spatial)]):
        check(capture(model, (torch.empty(dims, device="meta"),), False), [dims])


def t(*dims, dtype=torch.float32):
    return torch.empty(dims, dtype=dtype, device="meta")


NONE = None
KNOWN = [
    # broadcasts and types: dims decide over none, tensors over numbers
    ("add", "Tensor", t(2, 3, 4), t(3, 1), 1),
    ("add", "Tensor", t(2, 1, 4, dtype=BF16), t(5, 1), 1),
    ("add", "Tensor", t(2, 3, dtype=BF16), t(), 1),
    ("mul", "Tensor", t(dtype=BF16), t(2, 3)),
    ("mul", "Tensor", t(2, 3, dtype=torch.int64), t()),
    ("mul", "Tensor", t(2, 3, dtype=torch.int64), 2.5),
    ("mul", "Tensor", t(2, 3, dtype=torch.int32), 2),
    ("sub", "Tensor", t(0, 3), t(1, 3), 1),
    ("div", "Tensor", t(4, 3, dtype=torch.float16), 3),
    ("maximum", "", t(4, 1), t(1, 5)),
    # windows
    ("conv2d", "", t(2, 6, 9, 8), t(4, 3, 3, 2), t(4), [2, 1], [1, 0], [2, 3], 2),
    ("conv1d", "", t(2, 6, 9), t(4, 6, 3), NONE, [2], [1], [1], 1),
    ("conv_transpose2d", "input", t(1, 4, 5, 6), t(4, 3, 3, 2), NONE, [2], [1], [1, 0], 2, [1, 2]),
    ("max_pool2d", "", t(1, 3, 7, 8), [3, 2], [2, 3], [1, 0], [1, 2], True),
    ("max_pool2d", "", t(1, 3, 7, 8), [3, 2], [], [0], [1], False),
    ("max_pool2d", "", t(3, 112, 112), [3], [2], [1], [1], True),
    ("max_pool1d", "", t(2, 3, 10), [4], [3], [2], [1], True),
    ("avg_pool2d", "", t(1, 3, 6, 6), [3], [4], [1], True, True, NONE),
    ("avg_pool3d", "", t(1, 3, 6, 7, 8), [3], [2], [0], True, True, NONE),
    ("avg_pool1d", "", t(1, 3, 6), [2], [2], [0], False, True),
    ("adaptive_avg_pool2d", "", t(3, 6, 6), [2, 5]),
    ("adaptive_avg_pool1d", "", t(1, 3, 6), [4]),
    ("upsample_nearest2d", "vec", t(1, 3, 5, 7), NONE, [1.7, 2.0]),
    ("upsample_bilinear2d", "vec", t(1, 3, 5, 7), NONE, True, [0.6, 1.1]),
    ("upsample_trilinear3d", "vec", t(1, 3, 5, 7, 2), [3, 4, 5], True, NONE),
    ("pad", "", t(1, 3, 5, 7), [1, 2, -1, 3], "constant", 0.5),
    ("pad", "", t(1, 3, 5, 7), [1, 2, 3, 4], "reflect", NONE),
    ("pixel_shuffle", "", t(2, 18, 5, 7), 3),
    # products
    ("linear", "", t(2, 5, 7), t(3, 7), t(3)),
    ("linear", "", t(7), t(3, 7), NONE),
    ("matmul", "", t(4, 1, 2, 3), t(5, 3, 6)),
    ("scaled_dot_product_attention", "", *(t(2, 4, n, d) for n, d in ((5, 8), (7, 8), (7, 6)))),
    # several into one
    ("stack", "", [t(2, 3), t(2, 3)], -1),
    ("cat", "", [t(2, 3), t(2, 0), t(2, 5)], -1),
    ("mean", "dim", t(2, 3, 4), [-1, 0], True, NONE),
    ("mean", "dim", t(2, 3, 4), [1], False, NONE),
    ("mean", "dim", t(2, 3, 4), NONE, False, NONE),
    ("sum", "dim_IntList", t(2, 3, 4), [], True, NONE),
    ("amax", "", t(2, 3, 4), [-2], False),
    ("softmax", "int", t(2, 3), -1, NONE),
    # views
    ("view", "", t(2, 3, 4), [2, -1]),
    ("view", "", t(2, 3, 4), [-1]),
    ("view", "", t(0, 3), [3, 0]),
    ("reshape", "", t(2, 3, 4), [4, -1, 3, 1]),
    ("flatten", "using_ints", t(2, 3, 4, 5), -3, -2),
    ("permute", "", t(2, 3, 4), [-1, 0, -2]),
    ("transpose", "int", t(2, 3, 4), -1, 0),
    ("unsqueeze", "", t(2, 3), -1),
    ("squeeze", "dim", t(2, 1, 1), -1),
    ("squeeze", "dim", t(2, 1, 1), 0),
    ("squeeze", "dims", t(1, 2, 1), [0, -1]),
    ("expand", "", t(3, 1), [2, -1, 4]),
    ("select", "int", t(2, 3, 4), -2, -1),
    ("slice", "Tensor", t(9, 3), 0, NONE, NONE, 2),
    ("slice", "Tensor", t(9, 3), 0, -20, -2, 3),
    ("slice", "Tensor", t(9, 3), -2, 7, 2**63 - 1, 1),
    ("slice", "Tensor", t(9, 3), 0, 7, 3, 1),
    ("chunk", "", t(2, 7), 4, -1),
    ("chunk", "", t(2, 4), 7, 1),
    ("split", "Tensor", t(7, 2), 3, 0),
    ("split_with_sizes", "", t(7, 2), [3, 0, 4], 0),
]

# Refused by PyTorch, or legal and left to its meta tensors.
LEFT = [
    ("add", "Tensor", t(2, 3), t(2), 1),
    ("add", "Tensor", t(2, 3, dtype=torch.bool), t(2, 3, dtype=torch.bool), 1),
    ("conv2d", "", t(1, 4, 9, 9), t(4, 3, 3, 3), NONE, [1], [0], [1], 1),
    ("conv2d", "", t(1, 3, 2, 2), t(4, 3, 3, 3), NONE, [1], [0], [1], 1),
    ("max_pool2d", "", t(1, 3, 7, 7), [2], [2], [2], [1], False),
    ("relu", "", t(2, dtype=torch.int64)),
    ("linear", "", t(2, 5), t(3, 7), NONE),
    ("cat", "", [t(2, 3), t(3, 3)], 1),
    ("cat", "", [t(2, 3), t(2, 3, dtype=BF16)], 1),
    ("softmax", "int", t(2, 3), -1, BF16),
    ("view", "", t(2, 3), [4, -1]),
    ("view", "", t(0, 3), [0, -1]),
    ("transpose", "int", t(2, 3), 2, 0),
    ("expand", "", t(3, 2), [3, 4]),
    ("select", "int", t(2, 3), 0, 2),
    ("split_with_sizes", "", t(7, 2), [3, 3], 0),
    ("bucketize", "Tensor", t(3), t(4), False, False),
]


def node_of(case):
    """The case as a node and the values that it reads."""
    name, overload, *arguments = case
    values = {}

    def argument(value):
        if isinstance(value, torch.Tensor):
            values[len(values)] = value
            return [VALUE, len(values) - 1]
        return [argument(each) for each in value] if isinstance(value, list) else value

    arguments = [argument(each) for each in arguments]
    op = getattr(getattr(torch.ops.aten, name), overload or "default")
    arguments += [each.default_value for each in op._schema.arguments[len(arguments) :]]
    return Node("aten::" + name, overload, arguments, []), values


def case_id(case):
    shapes = [list(each.shape) if isinstance(each, torch.Tensor) else each for each in case]
    return "-".join(str(each) for each in shapes).replace(" ", "")


@pytest.mark.parametrize("case", KNOWN, ids=case_id)
def test_rule(case):
    node, values = node_of(case)
    results = by_meta_tensors(node, values)
    node.outputs = list(range(100, 100 + len(results)))
    assert _C.known_results(node, values) == described(results)


@pytest.mark.parametrize("case", LEFT, ids=case_id)
def test_left_to_pytorch(case):
    node, values = node_of(case)
    node.outputs = [100]
    assert _C.known_results(node, values) is None


# ---- a stranger's numbers -----------------------------------------------------------------------

NUMBERS = (0, -1, -2, 3, 7, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
REALS = (0.0, -1.0, 1e-300, 1e300, float("inf"), float("nan"))
SMALL = 1000  # what may be computed


def variants(value):
    """The argument with one number or size changed, in every place."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (n for n in (NUMBERS if isinstance(value, int) else REALS) if n != value)
    elif isinstance(value, torch.Tensor):
        for i, size in enumerate(value.shape):
            others = [value.shape[:i] + (n,) + value.shape[i + 1 :] for n in (0, 1, size + 1)]
            for dims in [*others, value.shape[:i] + value.shape[i + 1 :]]:
                yield t(*dims, dtype=value.dtype)
        yield t(1, *value.shape, dtype=value.dtype)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from (value[:i] + [each] + value[i + 1 :] for each in variants(item))
        yield from ([value[1:], value + value[:1]] if value else [])


def holds_tensors(value):
    items = value if isinstance(value, list) else [value]
    return any(isinstance(each, torch.Tensor) for each in items)


def is_small(value):
    if isinstance(value, list):
        return all(map(is_small, value))
    return not isinstance(value, (int, float)) or abs(value) < SMALL


def variants_of(case):
    for i in range(2, len(case)):
        yield from ((i, (*case[:i], each, *case[i + 1 :])) for each in variants(case[i]))


def by_pytorch(node, values):
    """As by_meta_tensors(), and what only the op itself refuses is refused."""
    if is_small(node.arguments):
        values = {i: torch.zeros(each.shape, dtype=each.dtype) for i, each in values.items()}
    return by_meta_tensors(node, values)


@pytest.mark.parametrize("case", KNOWN, ids=case_id)
def test_a_rule_takes_nothing_that_pytorch_refuses(case):
    for _, changed in variants_of(case):
        node, values = node_of(changed)
        try:
            results = by_pytorch(node, values)
        except (RuntimeError, IndexError, TypeError, ValueError):
            results = None
        node.outputs = list(range(100, 100 + len(results or [0])))
        known = _C.known_results(node, values)
        assert known is None or (results is not None and known == described(results)), changed


class Calls(nn.Module):
    def __init__(self, op, arguments):
        super().__init__()
        self.op, self.arguments = op, arguments

    def forward(self, *tensors):
        values = [each.relu() for each in tensors]
        names = [each.name for each in self.op._schema.arguments if each.kwarg_only]
        positional = self.arguments[: len(self.arguments) - len(names)]
        named = dict(zip(names, self.arguments[len(positional) :], strict=True))
        return self.op(*(evaluated(each, values) for each in positional), **named)


def filled(value):
    return torch.linspace(-1, 1, value.numel()).reshape(value.shape).to(value.dtype)


def outcome(run, *inputs):
    try:
        results = run(*inputs)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    return list(results) if isinstance(results, (list, tuple)) else [results]


def loaded(data, choice):
    file = io.BytesIO()
    saved.save(data, file)
    file.seek(0)
    try:
        model = tb.load(file)
    except ValueError:
        return None
    model.choice = choice
    return model


@pytest.mark.parametrize("choice", ("blocked", "dense"))
@pytest.mark.parametrize("case", KNOWN, ids=case_id)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_another_number_in_a_file(case, choice, cache_folder):
    """load() refuses it, or the call does, or the results are those of the op itself."""
    node, values = node_of(case)
    op = getattr(getattr(torch.ops.aten, case[0]), case[1] or "default")
    inputs = tuple(filled(each) for each in values.values())
    file = io.BytesIO()
    tb.optimize(Calls(op, node.arguments).eval(), inputs, tune=False, verify=False).save(file)
    for place, changed in variants_of(case):
        if holds_tensors(case[place]) or not is_small(changed[place]):
            continue
        data = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        (call,) = (
            each for each in data["forms"][0]["capture"]["nodes"] if each["name"] == node.name
        )
        arguments = node_of(changed)[0].arguments
        call["arguments"][place - 2] = arguments[place - 2]
        expected = outcome(Calls(op, arguments), *inputs)
        model = loaded(data, choice)
        results = model and outcome(model, *inputs)
        if results is not None:
            assert expected is not None, changed
            torch.testing.assert_close(results, expected, equal_nan=True)


# ---- the time that rules save -------------------------------------------------------------------

LOADED = """
import sys, torch, torch_blocked
for path in sys.argv[1:]:
    model = torch_blocked.load(path)
    model(torch.ones(1, 3, 64, 64))
    model(torch.ones(2, 3, 96, 64))
print("sympy" in sys.modules, "torch._dynamo" in sys.modules)
"""


def test_a_loaded_model_needs_no_meta_kernel_in_python(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = []
    for name in ("resnet18", "resnet50", "mobilenet_v2", "unet"):
        model = models.MODELS[name].constructor().eval()
        paths.append(str(tmp_path / name))
        tb.optimize(model, torch.ones(1, 3, 64, 64), tune=False).save(paths[-1])
    command = [sys.executable, "-c", LOADED, *paths]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "False"]
