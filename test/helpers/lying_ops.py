"""Ops whose schemas do not say what they write, or that a result is memory of an argument.

Each is run by `CALLS` on tensors that `make` gives; the results are compared between dense and
blocked tensors, and between a model and what is made of it."""

import ctypes
import itertools

import torch
from torch import Tensor

_library = torch.library.Library("lying", "DEF")


def _by_torch(x: Tensor) -> None:
    x.mul_(2).add_(1)


def _by_data(x: Tensor) -> None:
    x.data.mul_(2).add_(1)


def _by_numpy(x: Tensor) -> None:
    array = x.detach().numpy()
    array *= 2
    array += 1


def _by_address(x: Tensor) -> None:
    """As C++ does that takes data_ptr()."""
    values = (x * 2 + 1).contiguous()
    if x.is_contiguous():
        ctypes.memmove(x.data_ptr(), values.data_ptr(), x.nbytes)
    else:
        _by_numpy(x)


def _in_a_view(x: Tensor) -> None:
    x[0, 1:].mul_(2).add_(1)


def _one_value(x: Tensor) -> None:
    x[(-1,) * x.dim()] += 1


def _sign_of_zero(x: Tensor) -> None:
    x[0, 0] = -0.0


WRITES = {
    "torch": _by_torch,
    "data": _by_data,
    "numpy": _by_numpy,
    "address": _by_address,
    "view": _in_a_view,
    "one_value": _one_value,
    "sign": _sign_of_zero,
}

# What an op takes and returns, and its kernel around a write.
FORMS = {
    "first": ("Tensor x, Tensor y) -> Tensor", lambda w: lambda x, y: (w(x), x + y)[1]),
    "second": ("Tensor x, Tensor y) -> Tensor", lambda w: lambda x, y: (w(y), x + y)[1]),
    "both": ("Tensor x, Tensor y) -> Tensor", lambda w: lambda x, y: (w(x), w(y), x + y)[2]),
    "list": ("Tensor[] xs) -> Tensor", lambda w: lambda xs: (w(xs[1]), xs[0] + xs[1])[1]),
    "none": ("Tensor x, Tensor? y=None) -> ()", lambda w: lambda x, y=None: w(x)),
    "two": (
        "Tensor x, Tensor y) -> (Tensor, Tensor)",
        lambda w: lambda x, y: (w(x), x + y, -y)[1:],
    ),
    "number": ("Tensor x) -> float", lambda w: lambda x: (w(x), x.max().item())[1]),
}

for (_form, (_schema, _kernel)), (_name, _write) in itertools.product(
    FORMS.items(), WRITES.items()
):
    _library.define(f"{_form}_{_name}({_schema}")
    # As of a kernel in C++, torch.compile sees nothing of what it does.
    _library.impl(f"{_form}_{_name}", torch.compiler.disable(_kernel(_write)), "CPU")
# Of forms that a graph of torch.compile may hold: what their results look like.
FAKES = {
    "first": lambda x, y: torch.empty_like(x),
    "list": lambda xs: torch.empty_like(xs[0]),
    "none": lambda x, y=None: None,
    "two": lambda x, y: (torch.empty_like(x), torch.empty_like(y)),
}
for _form, _fake in FAKES.items():
    torch.library.register_fake(f"lying::{_form}_address", _fake)
# Honest ones, and those that return memory of an argument.
_library.define("honest(Tensor x, Tensor y) -> Tensor")
_library.impl("honest", lambda x, y: x * 2 + y, "CPU")
_library.define("same(Tensor x) -> Tensor")
_library.impl("same", lambda x: x.mul_(2), "CPU")
_library.define("shows(Tensor x) -> Tensor")
_library.impl("shows", lambda x: x[0, 1:3], "CPU")
_library.define("above(Tensor x, float limit) -> Tensor")
_library.impl("above", lambda x, limit: (x.clamp_(max=limit), x + 1)[1], "CPU")

OPS = [f"{form}_{name}" for form in FORMS for name in WRITES] + ["honest", "same"]


def call(op: str, x: Tensor, y: Tensor):
    """The result of an op, in whatever form."""
    function = getattr(torch.ops.lying, op)
    form = op.partition("_")[0]
    if form == "list":
        return function([x, y])
    return function(x) if form in ("none", "number", "same") else function(x, y)
