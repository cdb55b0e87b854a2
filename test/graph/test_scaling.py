"""Sums and products with constants per channel: in optimize they become part of the weights of a
layer beside them, whatever they are called and wherever views put the channels."""

import pytest
import torch
from helpers.optimized import assert_exact
from torch import nn

import torch_blocked as tb

C = 9


class Between(nn.Module):
    """function(x, constant) between two layers."""

    def __init__(self, function, padding=0):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, C, 3), nn.Conv2d(C, 5, 3, padding=padding)
        self.constant = nn.Parameter(torch.rand(C, 1, 1) + 0.5)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x), self.constant))


def ops_of(optimized):
    return [row.split("  ")[0] for row in optimized.plan().splitlines()[2:]]


def optimized_exactly(model, *args, tolerance=8):
    optimized = tb.optimize(model.eval(), args, tune=False)
    assert_exact(model, optimized, *args, tolerance=tolerance)
    return optimized


FOLDED = {
    "number times": lambda x, k: 3 * x,
    "times number": lambda x, k: x * 0.25,
    "by number": lambda x, k: x / 7,
    "plus number": lambda x, k: x + 2,
    "number less": lambda x, k: 2 - x,
    "less number, alpha": lambda x, k: torch.sub(x, 1.5, alpha=3),
    "times constant": lambda x, k: k * x,
    "by constant": lambda x, k: x / k,
    "plus constant, alpha": lambda x, k: torch.add(x, k, alpha=2),
    "constant plus, alpha": lambda x, k: torch.add(k, x, alpha=2),
    "constant less": lambda x, k: k - x,
    "rsub": lambda x, k: torch.rsub(x, k, alpha=0.5),
    "one constant": lambda x, k: x * k[0],
    "four dims": lambda x, k: x * k[None],
    "chain": lambda x, k: ((x - k) / k * 2 + 1) * k.flip(0),
    "channels last": lambda x, k: (x.permute(0, 2, 3, 1) * k.flatten()).permute(0, 3, 1, 2),
    "flat pixels": lambda x, k: (x.flatten(2) * k[:, 0] + 1).view(x.shape),
}


@pytest.mark.any_isa
@pytest.mark.parametrize("name", FOLDED)
def test_folded_into_the_layer_before(name):
    ops = ops_of(optimized_exactly(Between(FOLDED[name]), torch.randn(2, 3, 8, 9)))
    layers = [op for op in ops if op.startswith("aten::conv2d")]
    assert "+" in layers[0]
    assert not any(
        op.startswith(("aten::mul", "aten::add", "aten::sub", "aten::div")) for op in ops
    )


@pytest.mark.any_isa
@pytest.mark.parametrize(
    "name", ["number times", "times constant", "plus constant, alpha", "chain"]
)
@pytest.mark.parametrize("padding", [0, 1])
def test_folded_into_the_layer_after(name, padding):
    """Where somebody else reads the layer before. A sum may not cross padding."""

    class Model(Between):
        def forward(self, x):
            y = self.first(x)
            return self.last(self.function(y, self.constant)), y.mean()

    model, x = Model(FOLDED[name], padding).eval(), torch.randn(1, 3, 8, 8)
    optimized = tb.optimize(model, x, tune=False)
    for result, expected in zip(optimized(x), model(x), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    alone = [op for op in ops_of(optimized) if not op.startswith(("aten::conv2d", "aten::mean"))]
    shifts = name in ("plus constant, alpha", "chain")
    assert any("mul" in op or "add" in op for op in alone) == bool(padding and shifts)


@pytest.mark.any_isa
def test_folded_into_all_parts_of_a_concat():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(3, width, 3) for width in (4, 2, C - 6))
            self.constant = nn.Parameter(torch.rand(C, 1, 1) + 0.5)

        def forward(self, x):
            return torch.cat([layer(x) for layer in self.layers], 1) * self.constant + 0.5

    ops = ops_of(optimized_exactly(Model(), torch.randn(1, 3, 7, 7)))
    assert ops.count("aten::conv2d + mul + add") == 3, ops


class Rows(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.layer = nn.Linear(7, C)
        self.constant = nn.Parameter(torch.rand(*shape) + 0.5)

    def forward(self, x):
        return (self.layer(x) * self.constant - self.constant).relu()


@pytest.mark.any_isa
@pytest.mark.parametrize("shape", [(C,), (1, C), (1, 1, C), (1,)])
def test_folded_into_a_linear_layer(shape):
    ops = ops_of(optimized_exactly(Rows(*shape), torch.randn(2, 5, 7)))
    assert len([op for op in ops if op.startswith("aten::")]) == 1, ops


NOT_FOLDED = {
    "a plane": lambda x, k: x * torch.linspace(1, 2, x.shape[-1]),
    "another result": lambda x, k: x[:, :1] * k,
    "infinite": lambda x, k: (x / torch.zeros(())).clamp(-1, 1),
    "rounds": lambda x, k: (x + 2.0**23) - 2.0**23,
    "floor": lambda x, k: torch.div(x, 3, rounding_mode="floor"),
}


@pytest.mark.any_isa
@pytest.mark.parametrize("name", NOT_FOLDED)
def test_not_folded(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, C, 3)
            self.constant = nn.Parameter(torch.rand(C, 1, 1) + 0.5)

        def forward(self, x):
            return NOT_FOLDED[name](self.first(x), self.constant)

    model, x = Model().eval(), 4 * torch.randn(1, 3, 8, 11)
    optimized = tb.optimize(model, x, tune=False, verify=False)
    torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.any_isa
def test_other_sizes_of_one_number():
    """A number that a model makes as it runs is a constant at any size."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, C, 3)

        def forward(self, x):
            y = self.layer(x)
            return torch.maximum(y, y.new_zeros(())) * y.new_full((1,), 2.0) + x.new_ones(1)

    model = Model()
    optimized = optimized_exactly(model, torch.randn(1, 3, 6, 6))
    assert len([op for op in ops_of(optimized) if "conv" in op]) == 1
    for dims in ((2, 3, 9, 5), (0, 3, 5, 5)):
        x = torch.randn(dims)
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-5)
