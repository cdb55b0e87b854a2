"""Calls for which nothing of ours can run: the model does, in parts or as it is, and says so once.
What it raises is the model's own; what is refused on purpose stays refused."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import torch_blocked as tb
from torch_blocked import _C
from torch_blocked.compile import OptimizedParts
from torch_blocked.optimized_module import OptimizedModule

pytestmark = pytest.mark.any_isa


@contextlib.contextmanager
def told(times):
    """Checks that so many warnings say that the model runs."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    ours = [str(each.message) for each in heard if "torch_blocked::optimize" in str(each.message)]
    assert len(ours) == times, ours


def same(fast, model, *args):
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), model(*args), rtol=1e-2, atol=1e-2)


class Wide(nn.Module):
    """Does for wide images what `wide` says, which no capture holds."""

    def __init__(self, wide):
        super().__init__()
        self.layer, self.wide, self.calls = nn.Conv2d(3, 4, 3, padding=1), wide, 0

    def forward(self, x):
        y = self.layer(x)
        return self.wide(self, y) if x.shape[3] > 8 else y


def counts(self, y):
    self.calls += 1
    return y + self.calls * 0


def decides(self, y):
    return y * 2 if y.sum() > 0 else y + 1


WIDE = {
    "sizes of values": lambda self, y: y[y > 0],
    "value": lambda self, y: y * y.mean().item(),
    "decision": decides,
    "data": lambda self, y: y.data * 1,
    "count": counts,
    "as_strided": lambda self, y: y.as_strided((2, 2), (1, 2)) + 0,
    "other memory": lambda self, y: torch.from_numpy(y.numpy().copy()) + 0,
    "sparse": lambda self, y: y.flatten(1).to_sparse().to_dense() + y.mean().item(),
    "a type of its own": lambda self, y: [y, y.sum() > 0, object],
    "double": lambda self, y: torch.linalg.eigvals(y[:, :, :4, :4]).real.sum() * 0 + y,
}


def images(width):
    return torch.randn(1, 3, 8, width)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
@pytest.mark.parametrize("name", WIDE)
def test_a_later_size_that_cannot_be_captured(name, dtype):
    torch.manual_seed(0)
    model = Wide(WIDE[name]).eval()
    fast = tb.optimize(model, images(8), tune=False, dtype=dtype)
    assert isinstance(fast, OptimizedModule) and fast.choice == "blocked"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for width in (9, 10, 8, 9, 9, 10, 11):
            x = images(width)
            with torch.no_grad():
                result, expected = fast(x), model(x)
            results = result if isinstance(result, list) else [result]
            wanted = expected if isinstance(expected, list) else [expected]
            if name == "sizes of values" and dtype is not None:
                continue  # rounding decides how many these are
            for a, b in zip(results, wanted, strict=True):
                if isinstance(b, torch.Tensor):
                    torch.testing.assert_close(a, b, rtol=2e-2, atol=3e-2)
                else:
                    assert a == b
    ours = [str(each.message) for each in heard if "the model runs" in str(each.message)]
    assert len(ours) <= 1, ours
    if name in ("value", "data", "decision"):
        assert len(ours) == 1 and "[1, 3, 8, 9]" in ours[0]


def _fails(*_args):
    raise RuntimeError("no such luck\nmore")


def test_a_run_that_fails_is_the_models(monkeypatch):
    model = Wide(decides).eval()
    fast = tb.optimize(model, images(8), tune=False)
    monkeypatch.setattr(_C.Compiled, "__call__", _fails)
    with told(1):
        for width in (7, 6, 7):
            same(fast, model, images(width))
    assert fast.plan().startswith("runs: blocked") and "no such luck" in fast.plan(images(7))
    monkeypatch.undo()
    same(fast, model, images(5))
    with pytest.raises(NotImplementedError, match="no such luck"):
        fast.save("nowhere")


def test_a_direct_call_that_fails_is_the_models(monkeypatch):
    model, x = Wide(decides).eval(), images(8)
    fast = tb.optimize(model, x, tune=False)
    fast(x)
    direct = type("Direct", (), {"__call__": _fails, "clear": lambda _: None})()
    monkeypatch.setattr(fast, "_direct", direct)
    monkeypatch.setattr(_C.Compiled, "__call__", _fails)
    with told(1):
        same(fast, model, x)


@pytest.mark.parametrize("step", ("prepare", "outline", "__call__"))
def test_a_plan_that_fails_leaves_the_model(monkeypatch, step, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, x = Wide(decides).eval(), images(8)
    monkeypatch.setattr(_C.Compiled, step, _fails)
    with told(1):
        fast = tb.optimize(model, x)
    assert fast.choice == "model" and "no such luck" in fast.reason
    same(fast, model, x)
    same(fast, model, images(9))


def test_changed_weights_and_refused_inputs_stay_refused():
    model = Wide(decides).eval()
    fast = tb.optimize(model, images(8), tune=False)
    for bad in (images(8).to("meta"), images(8).to_sparse(), nn.Parameter(images(8)).to("meta")):
        with pytest.raises(TypeError):
            fast(bad)
    with torch.no_grad():
        model.layer.weight.mul_(2)
    with pytest.raises(ValueError, match="optimize the model again"):
        fast(images(7))


@pytest.mark.parametrize("bad", ((torch.randn(1, 5, 8, 8),), (torch.randn(8),), (), ("text",)))
def test_what_the_model_raises_comes_from_the_model_once(bad):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.layer(x)

    model = Counts().eval()
    fast = tb.optimize(model, images(8), tune=False)
    with pytest.raises(Exception) as expected, torch.no_grad():
        model(*bad)
    with told(0), pytest.raises(type(expected.value)) as ours:
        fast(*bad)
    assert str(ours.value) == str(expected.value)
    same(fast, model, images(8))
    fast.plan()


def test_parts_that_fail_leave_the_model(monkeypatch):
    model = Wide(decides).eval()
    fast = tb.optimize(model, images(9), tune=False)
    assert isinstance(fast, OptimizedParts)
    same(fast, model, images(9))
    monkeypatch.setitem(vars(fast), "_compiled", _fails)
    with told(1):
        for width in (9, 10, 9):
            same(fast, model, images(width))
    assert "no such luck" in fast.plan()


def test_a_part_that_gets_what_is_refused_runs_as_it_is():
    class Sparse(nn.Module):
        def forward(self, x):
            y = (x * (x > 0)).to_sparse()
            torch._dynamo.graph_break()
            return (y * 2).to_dense() * x.mean().item()

    model, x = Sparse().eval(), torch.randn(3, 4)
    fast = tb.optimize(model, x, tune=False)
    for _ in range(3):
        same(fast, model, x)


def test_an_argument_that_the_forward_fills():
    class Fills(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, x, kept):
            kept.append(self.layer(x))
            return kept[-1] + len(kept)

    model, x = Fills().eval(), images(8)
    fast = tb.optimize(model, (x, []), tune=False)
    for _ in range(3):
        ours, theirs = [], []
        with torch.no_grad():
            torch.testing.assert_close(fast(x, ours), model(x, theirs))
        torch.testing.assert_close(ours, theirs)


def test_large_arrays_that_differ_in_the_middle_have_captures_of_their_own():
    class Adds(nn.Module):
        def forward(self, x, array):
            return x + torch.from_numpy(array)

    model, x = Adds().eval(), torch.randn(1, 3, 8, 200)
    first = torch.randn(3, 8, 200).numpy()
    second = first.copy()
    second[1, 4, 100] = 9
    fast = tb.optimize(model, (x, first), tune=False)
    for array in (first, second, first):
        same(fast, model, x, array)


def test_an_input_of_another_rank_has_a_capture_of_its_own():
    """The ops have the same names and numbers, and other sizes."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    with torch.no_grad():
        fast = tb.optimize(net, torch.randn(1, 3, 8, 8), tune=False)
        for dims in ((3, 9, 9), (2, 3, 9, 9), (3, 8, 8)):
            x = torch.randn(dims)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert fast.choice == "blocked" and len(fast._forms) == 2
