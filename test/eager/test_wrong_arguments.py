"""The likeliest wrong arguments of public functions: each is refused in one sentence that says what
was expected, what came and what to do."""

import io
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_blocked as tb

pytestmark = pytest.mark.any_isa

MODEL = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
SHAPE = (1, 3, 8, 8)
X = torch.randn(SHAPE)
A_SHAPE = r"expected example_inputs as Sequential takes them, got \(1, 3, 8, 8\); .*torch.randn"
ARGUMENTS = "expected example_inputs as a tensor or a tuple of arguments, got"
SEVERAL = (
    "expected calibration as several inputs, each a tensor, a tuple of arguments or a dict of them "
    "by name, got"
)
FLAG = "as True or False, got 'no'"
NO_MODEL = "expected a torch.nn.Module, got"


class Counted(nn.Module):
    """Of numbers, which no shape is taken for."""

    def forward(self, rows: int, columns: int):
        return torch.ones(rows, columns)


def optimized():
    return tb.optimize(MODEL, X, tune=False)


def in_autocast(call):
    with torch.autocast("cpu"):
        return call()


# The function, what it is given, the exception and its sentence behind the function's name.
REFUSED = [
    ("optimize", (MODEL,), {}, TypeError, "Sequential takes them, got none; give a tensor"),
    ("optimize", (MODEL, ()), {}, TypeError, "Sequential takes them, got none; give a tensor"),
    ("optimize", (torch.jit.trace(MODEL, X),), {}, TypeError, "got none; give a tensor"),
    ("optimize", (MODEL, SHAPE), {}, TypeError, A_SHAPE),
    ("optimize", (MODEL, X.shape), {}, TypeError, f"{ARGUMENTS} Size; .*torch.randn"),
    ("optimize", (MODEL, list(SHAPE)), {}, TypeError, f"{ARGUMENTS} list; put .* into a tuple"),
    ("optimize", (MODEL, [X]), {}, TypeError, f"{ARGUMENTS} list; put .* into a tuple"),
    ("optimize", (MODEL, X.numpy()), {}, TypeError, f"{ARGUMENTS} ndarray; torch.from_numpy"),
    ("optimize", (MODEL, {"input": X}), {}, TypeError, f"{ARGUMENTS} dict; .*example_kwargs"),
    ("optimize", (MODEL, None), {}, TypeError, f"{ARGUMENTS} NoneType; give a tensor"),
    ("optimize", (MODEL, X), {"example_kwargs": X}, TypeError, "example_kwargs as a dict"),
    ("optimize", (MODEL, X), {"example_kwargs": [X]}, TypeError, "example_kwargs as a dict"),
    ("optimize", (X, MODEL), {}, TypeError, f"{NO_MODEL} Tensor"),
    ("optimize", (nn.ReLU, X), {}, TypeError, f"{NO_MODEL} type"),
    ("optimize", (torch.relu, X), {}, TypeError, f"{NO_MODEL} builtin_function_or_method"),
    ("optimize", (MODEL, X), {"dtype": "bfloat16"}, TypeError, "dtype as a torch.dtype, got"),
    ("optimize", (MODEL, X), {"dtype": torch.half}, NotImplementedError, "got torch.float16"),
    ("optimize", (MODEL, X), {"tune": "no"}, ValueError, "True, False or 'full', got 'no'"),
    ("optimize", (MODEL, X), {"dynamic": "no"}, TypeError, f"dynamic {FLAG}"),
    ("optimize", (MODEL, X), {"verify": "no"}, TypeError, f"verify {FLAG}"),
    ("explain", (MODEL,), {}, TypeError, "Sequential takes them, got none; give a tensor"),
    ("explain", (MODEL, SHAPE), {}, TypeError, A_SHAPE),
    ("explain", (MODEL, X.shape), {}, TypeError, f"{ARGUMENTS} Size; .*torch.randn"),
    ("explain", (MODEL, [X]), {}, TypeError, f"{ARGUMENTS} list; put .* into a tuple"),
    ("explain", (MODEL, X.numpy()), {}, TypeError, f"{ARGUMENTS} ndarray; torch.from_numpy"),
    ("explain", (X, X), {}, TypeError, f"{NO_MODEL} Tensor"),
    ("quantize", (MODEL, X), {}, TypeError, f"{SEVERAL} Tensor; put them into a list"),
    ("quantize", (MODEL, {"input": X}), {}, TypeError, f"{SEVERAL} dict; put them into a list"),
    ("quantize", (MODEL, None), {}, TypeError, f"{SEVERAL} NoneType; put them into a list"),
    ("quantize", (MODEL, 3), {}, TypeError, f"{SEVERAL} int; put them into a list"),
    ("quantize", (MODEL, [SHAPE]), {}, TypeError, rf"{SEVERAL} the shape \(1, 3, 8, 8\); give"),
    ("quantize", (MODEL, [[X]]), {}, TypeError, f"{SEVERAL} one of type list; give tensors"),
    ("quantize", (MODEL, [X.numpy()]), {}, TypeError, f"{SEVERAL} one of type ndarray; give"),
    ("quantize", (MODEL, [{"x": X}]), {}, TypeError, "expected names among input, got x; give"),
    ("quantize", (MODEL, [{}]), {}, TypeError, "expected the argument input, got none; give it"),
    ("quantize", (MODEL, []), {}, ValueError, "expected calibration inputs, got none; give"),
    ("quantize", (MODEL, [X]), {"keep": "0"}, TypeError, "paths of modules, got str; put"),
    ("quantize", (MODEL, [X]), {"target": "1%"}, TypeError, "a function, got '1%'; give 0.01"),
    ("quantize", (MODEL, [X]), {"target": True}, TypeError, "a function, got True; give 0.01"),
    ("quantize", (MODEL, [X]), {"target": 1}, ValueError, "a function, got 1; it is more than 0"),
    ("quantize", (MODEL, [X]), {"target": -0.1}, ValueError, "a function, got -0.1; it is more"),
    ("quantize", (X, [X]), {}, TypeError, f"{NO_MODEL} Tensor"),
    ("quantize", (optimized(), [X]), {}, TypeError, "got one that optimize.. has returned; quant"),
    ("load", (MODEL,), {}, TypeError, "expected a path or an open file, got Sequential; give"),
    ("load", (None,), {}, TypeError, "expected a path or an open file, got NoneType; give"),
    ("load", (io.BytesIO(b"junk"),), {}, ValueError, "expected a file written by save"),
    ("to_blocked", (X,), {"dtype": "float32"}, TypeError, "dtype as a torch.dtype, got 'float32'"),
    ("to_dense", (X.to_blocked(), "nchw"), {}, TypeError, "dtype as a torch.dtype, got 'nchw'"),
]
# Functions of tensors, and what they take behind one.
OF_TENSORS = {
    "to_blocked": (),
    "to_dense": (),
    "to_format": ("nhwc",),
    "format_of": (),
    "is_contiguous_channels_last_1d": (),
    "local_response_norm": (5,),
    "zeros_like": (),
    "ones_like": (),
    "empty_like": (),
    "rand_like": (),
    "randn_like": (),
    "full_like": (1.0,),
    "randint_like": (3,),
}
NO_TENSORS = {
    "Sequential": (MODEL, r"optimize\(model, example_inputs\) is for models"),
    "ndarray": (X.numpy(), "torch.from_numpy"),
    "list": ([1.0], r"torch.tensor\(values\)"),
    "NoneType": (None, "give a torch.Tensor"),
    "tuple": (SHAPE, "give a torch.Tensor"),
    "int": (3, "give a torch.Tensor"),
    "str": ("nchw", "give a torch.Tensor"),
}


def refused(name, args, kwargs, kind, sentence):
    with pytest.raises(kind) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(tb, name)(*args, **kwargs)
    assert type(error.value) is kind
    assert re.match(rf"torch_blocked::{name}: .*{sentence}", str(error.value)), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[4][-40:]}")
def test_wrong_arguments(case):
    refused(*case)


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("name", OF_TENSORS)
def test_what_is_no_tensor(name, kind):
    value, advice = NO_TENSORS[kind]
    said = f"expected a tensor, got {kind}; {advice}"
    refused(name, (value, *OF_TENSORS[name]), {}, TypeError, said)


def test_numbers_that_a_model_takes_are_no_shape():
    assert tb.optimize(Counted().eval(), (2, 3), tune=False)(2, 3).shape == (2, 3)


def test_autocast_around_optimize_is_refused_and_around_a_call_changes_nothing():
    with pytest.raises(RuntimeError, match="expected a call outside of torch.autocast, got one"):
        in_autocast(lambda: tb.optimize(MODEL, X, tune=False))
    fast = optimized()
    for x in (X, torch.randn(1, 3, 12, 12)):
        result = in_autocast(lambda x=x: fast(x))
        torch.testing.assert_close(result, MODEL(x), rtol=1e-4, atol=1e-5)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return y.relu() if y.sum() > 0 else y


IN_PARTS = {
    "steps": (lambda fast: fast.steps(), ValueError, "plan.. shows these"),
    "release": (lambda fast: fast.release(), ValueError, "there is nothing to release"),
    "save": (lambda fast: fast.save("model.pt"), NotImplementedError, "save the model"),
    "copy": (lambda fast: __import__("copy").deepcopy(fast), NotImplementedError, "copy the model"),
    "state_dict": (lambda fast: fast.state_dict(), NotImplementedError, "use the model's"),
    "load_state_dict": (lambda fast: fast.load_state_dict({}), NotImplementedError, "use the"),
    "double": (lambda fast: fast.double(), NotImplementedError, "convert the model"),
    "train": (lambda fast: fast.train(), NotImplementedError, "train the model"),
}


def test_a_model_in_parts_says_what_it_does_not_have():
    fast = tb.optimize(Decides().eval(), X, tune=False)
    assert fast.choice == "parts" and fast.reason in fast.plan()
    assert fast.float() is fast and fast.eval() is fast
    for call, kind, advice in IN_PARTS.values():
        with pytest.raises(kind, match=f"torch_blocked::.*{advice}"):
            call(fast)


COMMAND = [sys.executable, "-m", "torch_blocked"]


def test_a_command_names_an_input_that_the_model_does_not_take(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef conv(): return nn.Conv2d(3, 4, 3)\n"
    )
    done = subprocess.run(
        [*COMMAND, "explain", "nets:conv", "--input", "3x32"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(tb.__file__).parents[1]}", "PATH": ""},
    )
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"torch_blocked explain: 'nets:conv': expected --input as the model takes it, got 3x32: "
        r".*\n",
        done.stderr.replace("\r", "\n").splitlines()[-1] + "\n",
    )
    assert "Traceback" not in done.stderr


def test_a_command_whose_reader_has_gone_is_silent():
    process = subprocess.Popen(
        [*COMMAND, "env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


# Public functions whose first argument is neither a tensor nor a model, and what follows it.
OF_SIZES = {name: () for name in ("empty", "zeros", "ones", "rand", "randn")}
NO_SIZES = {"Conv2d": nn.Conv2d(3, 8, 3), "NoneType": None, "type": nn.Conv2d, "object": object(),
            "str": "a", "float": 1.5, "Tensor": X, "dict": {"a": 1}}  # fmt: skip


@pytest.mark.parametrize("kind", NO_SIZES)
@pytest.mark.parametrize("name", [*OF_SIZES, "full", "randint", "normal"])
def test_what_is_no_size(name, kind):
    value = NO_SIZES[kind]
    arguments = {"full": (value, 1.0), "randint": (3, value), "normal": (0.0, 1.0, value)}
    with pytest.raises((TypeError, ValueError), match=f"^torch_blocked::{name}: expected "):
        getattr(tb, name)(*arguments.get(name, (value,)))


def test_a_quantizer_keeps_paths():
    for value in (MODEL, None, 3, "layer"):
        with pytest.raises(TypeError, match="^torch_blocked::TorchBlockedQuantizer: expected keep"):
            tb.TorchBlockedQuantizer(value)
