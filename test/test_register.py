"""torch_blocked.register: ops of others on blocked tensors, eager, compiled and optimized."""

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
    assert torch.equal(torch_blocked.load(tmp_path / "model.pt")(x), fast(x)) and len(calls) == 3


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
