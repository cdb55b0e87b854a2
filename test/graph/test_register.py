"""torch_blocked.register: ops of others on blocked tensors, eager, compiled and optimized."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_blocked
from torch_blocked import _C, profile, register

pytestmark = pytest.mark.any_isa

LIBRARY = torch.library.Library("test_register", "DEF")
CHANNELS = 17
# Of network(): so many that Winograd's kernels, which are blocked, are twice as fast as all others.
WIDE, SIZE = 63, 28


def define(name: str, arguments: str, function, returns: str = "Tensor", fake=None):
    """An op that knows its function on dense or physical tensors and its fake."""
    LIBRARY.define(f"{name}({arguments}) -> {returns}")
    LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(
        f"test_register::{name}", fake or (lambda x, *_: torch.empty_like(x))
    )
    return getattr(torch.ops.test_register, name).default


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


calls: list[tuple[int, ...]] = []


def scaled_blocked(physical: Tensor, channels: int, factor: float) -> Tensor:
    calls.append(tuple(physical.shape))
    return physical * factor


SCALED = define("scaled", "Tensor x, float factor", scaled)
SCALED_BLOCKED = define("scaled_blocked", "Tensor x, SymInt channels, float factor", scaled_blocked)
register(SCALED, SCALED_BLOCKED)


class Scaled(nn.Module):
    def forward(self, x):
        return torch.ops.test_register.scaled(x, 0.5)


def network() -> nn.Module:
    first, last = nn.Conv2d(WIDE, WIDE, 3, padding=1), nn.Conv2d(WIDE, WIDE, 3)
    return nn.Sequential(first, Scaled(), last).eval()


def test_a_form_keeps_tensors_blocked():
    x = torch.randn(2, CHANNELS, 5, 7)
    with torch_blocked.strict(), profile() as p:
        y = SCALED(x.to_blocked("nChw8c"), 3.0)
    assert y.format == "nChw8c" and torch.equal(y.to_dense(), x * 3)
    assert p.fallbacks == 0


@torch.no_grad()
def test_optimize_runs_the_form_between_convolutions(tmp_path):
    model, x = network(), torch.randn(1, WIDE, SIZE, SIZE)
    fast = torch_blocked.optimize(model, x, tune=False)
    steps = {step.op: step for step in fast.steps()}
    assert steps["test_register::scaled"].implementation == "test_register::scaled_blocked"
    assert steps["test_register::scaled"].output.startswith("nChw")
    block = _C.native_blocks()[0]
    calls.clear()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert calls == [(1, -(-WIDE // block), SIZE, SIZE, block)]  # the model itself runs `scaled`
    fast.save(tmp_path / "model.pt")
    loaded = torch_blocked.load(tmp_path / "model.pt", ops=["test_register::scaled"])
    assert torch.equal(loaded(x), fast(x)) and len(calls) == 3


@torch.no_grad()
def test_compiled_models_run_the_form():
    model, x = network(), torch.randn(1, WIDE, SIZE, SIZE)
    compiled = torch.compile(model, backend="torch_blocked", options={"tune": False})
    compiled(x)
    calls.clear()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(calls) == 1
    y = torch.compile(Scaled(), backend="aot_eager", fullgraph=True)(x.to_blocked("nChw8c"))
    assert y.format == "nChw8c" and torch.equal(y.to_dense(), x * 0.5)


@torch.no_grad()
def test_what_is_not_between_images_runs_the_op_itself():
    model = nn.Sequential(nn.Flatten(1), nn.Linear(4 * 9, 6), Scaled()).eval()
    x = torch.randn(3, 4, 3, 3)
    calls.clear()
    torch.testing.assert_close(torch_blocked.optimize(model, x)(x), model(x))
    assert not calls


def twice_as_many(x: Tensor, *_) -> Tensor:
    return torch.cat([x, x], 1)


MORE = define("more", "Tensor x", twice_as_many, fake=twice_as_many)
MORE_BLOCKED = define("more_blocked", "Tensor x, SymInt channels", twice_as_many)
register(MORE, MORE_BLOCKED)


class More(nn.Module):
    def forward(self, x):
        return torch.ops.test_register.more(x)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:torch_blocked")
def test_a_form_with_other_channels_is_left_alone():
    model = nn.Sequential(nn.Conv2d(8, CHANNELS, 3), More(), nn.Conv2d(2 * CHANNELS, 8, 3)).eval()
    x = torch.randn(1, 8, 12, 12)
    fast = torch_blocked.optimize(model, x)
    assert "test_register::more_blocked" not in fast.plan()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    y = torch.randn(1, CHANNELS, 2, 2)
    with profile() as p:
        result = MORE(y.to_blocked("nChw8c"))
    assert p.fallbacks == 1 and torch.equal(result.to_dense(), torch.cat([y, y], 1))


HALVED = define("halved", "Tensor x, int dim", lambda x, dim: x.narrow(dim, 0, 1).clone(),
                fake=lambda x, dim: x.narrow(dim, 0, 1).clone())  # fmt: skip


@register("test_register::halved", takes="input: blocked, dim: spatial dim")
def halved(func, input, dim):
    if input.shape[dim] == 1:
        return NotImplemented
    return input.narrow(dim, 0, 1).clone()


@pytest.mark.filterwarnings("ignore:torch_blocked")
def test_a_function_as_handler():
    x = torch.randn(2, CHANNELS, 5, 1)
    y = x.to_blocked("nChw8c")
    with torch_blocked.strict():
        assert torch.equal(HALVED(y, -2).to_dense(), x[:, :, :1])
    for dim in (1, 3):  # its contract, and the handler itself, decline
        with profile() as p:
            result = HALVED(y, dim)
        assert p.fallbacks == 1
        dense = result.to_dense() if torch_blocked.is_blocked(result) else result
        assert torch.equal(dense, x.narrow(dim, 0, 1))


LONE = define("lone", "Tensor x", torch.clone)
OTHER = define("other", "Tensor x, float factor", scaled)
WRITES = define("writes", "Tensor(a!) x", lambda x: x, "Tensor(a!)")


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((3, LONE), TypeError, "expected an op's overload or its name, got 3"),
        ((torch.ops.test_register.lone, LONE), TypeError, "expected an op's overload or its name"),
        ((LONE, 3), TypeError, "expected a function or an op as handler, got int"),
        (("test_register::none", LONE), ValueError, "expected the name of a torch op"),
        (("no such name", LONE), ValueError, "expected the name of a torch op"),
        (("test_register::lone.none", LONE), ValueError, "expected the name of a torch op"),
        ((SCALED, SCALED_BLOCKED), ValueError, "expected an op without a handler"),
        (("test_register::halved", halved), ValueError, "expected an op without a handler"),
        (("aten::relu", halved), ValueError, "expected an op without a handler"),
        ((OTHER, LONE), ValueError, "expected a blocked form of test_register::other"),
        ((LONE, SCALED_BLOCKED), ValueError, "expected a blocked form of test_register::lone"),
        ((WRITES, LONE), ValueError, "expected a blocked form of test_register::writes"),
    ],
)
def test_what_register_refuses(arguments, error, sentence):
    with pytest.raises(error, match=f"^torch_blocked::register: {sentence}"):
        register(*arguments)


def test_a_contract_is_the_functions_alone():
    with pytest.raises(ValueError, match="expected no contract with an op"):
        register(OTHER, SCALED_BLOCKED, takes="x: blocked")
    with pytest.raises(ValueError, match="torch_blocked::implements: expected one of"):
        register(OTHER, takes="nobody: blocked")(lambda func, x, factor: x)


LATE = define("late", "Tensor x", torch.clone)
TWICE = define("twice", "Tensor x, float factor", scaled)


def test_what_cpp_registers_is_checked_at_the_first_use():
    """While a library is loaded, an exception would end the process."""
    x = torch.randn(1, 8, 2, 2)
    _C.register_blocked_form("test_register::late", "test_register::nowhere")
    with pytest.raises(ValueError, match="expected the name of a torch op, got test_register::now"):
        LATE(x.to_blocked("nChw8c"))
    _C.register_blocked_form("test_register::twice", "test_register::scaled_blocked")
    _C.register_blocked_form("test_register::twice", "test_register::scaled_blocked")
    assert torch.equal(TWICE(x.to_blocked("nChw8c"), 2.0).to_dense(), x * 2)
    _C.register_blocked_form("test_register::twice", "test_register::lone")
    with pytest.raises(ValueError, match="expected one blocked form of test_register::twice"):
        torch_blocked.optimize(
            nn.Sequential(nn.Conv2d(8, 8, 3), Twice(), nn.Conv2d(8, 8, 1)).eval(),
            torch.randn(1, 8, 9, 9),
        )


class Twice(nn.Module):
    def forward(self, x):
        return torch.ops.test_register.twice(x, 2.0)


# What a form returns in place of its result, of physical, which has 17 channels in blocks of 8: a
# fault, and words of the sentence that says so.
WRONG = {
    "other channels in as many blocks": (lambda p: p.exp(), "a zero tail beyond channel 17"),
    "more blocks": (lambda p: torch.cat([p, p], 1), r"\[1, 3, 12, 13, 8\] of the op's result"),
    "fewer blocks": (lambda p: p[:, :1].clone(), "got \\[1, 1, 12, 13, 8\\]"),
    "more images": (lambda p: torch.cat([p, p]), "got \\[2, 3, 12, 13, 8\\]"),
    "other pixels": (lambda p: p[:, :, 1:].clone(), "got \\[1, 3, 11, 13, 8\\]"),
    "turned pixels": (lambda p: p.transpose(2, 3).clone(), "got \\[1, 3, 13, 12, 8\\]"),
    "another block": (lambda p: p.new_zeros(1, 2, 12, 13, 16), "got \\[1, 2, 12, 13, 16\\]"),
    "a dense tensor": (lambda p: p.new_zeros(1, 17, 12, 13), "got \\[1, 17, 12, 13\\]"),
    "a number": (lambda p: p.sum(), r"got \[\]"),
    "another type": (lambda p: p.double(), "Float as the op's fake says.*got Double"),
    "its argument": (lambda p: p, "memory of its own.*got a view of an argument; return a clone"),
    "a view of it": (lambda p: p.view(-1).view(p.shape), "got a view of an argument"),
    "a sparse tensor": (lambda p: p.to_sparse(), "a strided CPU tensor"),
    "no values": (lambda p: p.to("meta"), "a strided CPU tensor"),
}


def broken(name: str, function, **of_op):
    """An op that copies, with a form that does this instead."""
    op = define(name, "Tensor x", torch.clone, **of_op)
    form = define(f"{name}_form", "Tensor x, SymInt channels", lambda p, _: function(p))
    register(op, form)
    return op


@torch.no_grad()
@pytest.mark.parametrize("case", WRONG)
def test_what_a_form_returns_is_held_to_the_op(case):
    """In eager mode and in an optimized model, by a sentence that names the form."""
    function, words = WRONG[case]
    name = "wrong_" + case.replace(" ", "_")
    op = broken(name, function)
    said = f"^torch_blocked::register: expected .* from test_register::{name}_form, the blocked "
    x = torch.randn(1, CHANNELS, 12, 13)
    with pytest.raises(RuntimeError, match=said) as error:
        op(x.to_blocked("nChw8c"))
    assert re.search(words, str(error.value)), error.value

    class Broken(nn.Module):
        def forward(self, x):
            return op(x)

    model = nn.Sequential(nn.Conv2d(WIDE, WIDE, 3, padding=1), Broken(), nn.Conv2d(WIDE, WIDE, 3))
    with pytest.raises(RuntimeError, match=said):
        torch_blocked.optimize(model.eval(), torch.randn(1, WIDE, SIZE, SIZE + 2), tune=False)


@torch.no_grad()
def test_a_form_that_computes_something_else_is_no_defect_of_this_package():
    op = broken("other_values", lambda p: p * 2)

    class Broken(nn.Module):
        def forward(self, x):
            return op(x)

    model = nn.Sequential(nn.Conv2d(WIDE, WIDE, 3, padding=1), Broken(), nn.Conv2d(WIDE, WIDE, 3))
    with pytest.warns(UserWarning, match=r"Correct test_register::other_values_form, a") as told:
        torch_blocked.optimize(model.eval(), torch.randn(1, WIDE, SIZE, SIZE), tune=False)
    assert not any("report" in str(each.message) for each in told)


@pytest.mark.parametrize("case", ["more blocks", "other pixels", "another type"])
def test_a_fake_that_differs_is_told_while_it_is_traced(case):
    """A wrong form whose fake says what it does: torch.compile meets it first."""
    function, words = WRONG[case]
    name = "traced_" + case.replace(" ", "_")
    op = define(name, "Tensor x", torch.clone)
    form = define(f"{name}_form", "Tensor x, SymInt channels", lambda p, _: function(p),
                  fake=lambda p, _: function(p))  # fmt: skip
    register(op, form)
    compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"torch_blocked::register: .*{name}_form"):
        compiled(torch.randn(1, CHANNELS, 12, 13).to_blocked("nChw8c"))


def test_a_form_may_return_memory_in_another_order():
    def turned(p):
        return p.transpose(2, 3).contiguous().transpose(2, 3) * 1

    x = torch.randn(1, CHANNELS, 5, 7)
    y = broken("in_order", turned)(x.to_blocked("nChw8c"))
    assert torch.equal(y.to_dense(), x) and y._physical.is_contiguous()


@pytest.mark.filterwarnings("ignore:torch_blocked")
def test_without_a_fake_of_the_op_blocks_and_tail_are_checked():
    def op_of(name, function):
        LIBRARY.define(f"{name}(Tensor x) -> Tensor")
        LIBRARY.impl(name, lambda x: x[:, :, 1:].clone(), "CPU")
        form = define(f"{name}_form", "Tensor x, SymInt channels", lambda p, _: function(p))
        op = getattr(torch.ops.test_register, name).default
        register(op, form)
        return op

    x = torch.randn(1, CHANNELS, 5, 7)
    y = op_of("shorter", lambda p: p[:, :, 1:].clone())(x.to_blocked("nChw8c"))
    assert torch.equal(y.to_dense(), x[:, :, 1:])
    for name, function in {"blocks": lambda p: torch.cat([p, p], 1), "tail": torch.exp}.items():
        with pytest.raises(
            RuntimeError, match=f"from test_register::bare_{name}_form, the blocked"
        ):
            op_of(f"bare_{name}", function)(x.to_blocked("nChw8c"))


LATER_WRONG = """
import torch, torch_blocked
from test_register import broken, nn, Scaled, WIDE, SIZE
faulty = False
op = broken("later", lambda p: p + 1 if faulty else p * 1)
class Later(nn.Module):
    def forward(self, x):
        return op(x)
def said(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
x = torch.randn(1, 17, 4, 4).to_blocked("nChw8c")
layers = nn.Conv2d(WIDE, WIDE, 3, padding=1), Later(), nn.Conv2d(WIDE, WIDE, 3)
image = torch.randn(1, WIDE, SIZE, SIZE)
fast = torch_blocked.optimize(nn.Sequential(*layers).eval(), image, tune=False)
assert said(lambda: op(x)) is None and said(lambda: fast(image)) is None
assert "test_register::later_form" in fast.plan()
faulty = True
for call in (lambda: op(x), lambda: fast(image)):
    print(said(call))
"""


@pytest.mark.parametrize("checked", ["0", "1"])
def test_every_result_of_a_form_is_asked_where_that_is_switched_on(checked):
    """And the sentence names the form: it is no defect of this package."""
    done = subprocess.run(
        [sys.executable, "-c", LATER_WRONG],
        env=os.environ | {"TORCH_BLOCKED_CHECK": checked, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = "torch_blocked::register: expected a zero tail beyond channel {} from "
    expected += "test_register::later_form, the blocked form of test_register::later, got"
    for line, channels in zip(done.stdout.splitlines(), (17, WIDE), strict=True):
        assert line.startswith(expected.format(channels)) if checked == "1" else line == "None"
        assert "report" not in line
