"""What a forward may return: values, inputs, constants that no op reads, views, numbers."""

import io

import pytest
import torch
from random_results import GRID, TABLE
from torch import nn
from torch.utils import _pytree as pytree

import torch_blocked as tb
from torch_blocked import structure
from torch_blocked.optimized_module import OptimizedModule

pytestmark = [
    pytest.mark.any_isa,
    pytest.mark.filterwarnings("ignore:torch_blocked..optimize. the model (runs|is)"),
]

RESULTS = {
    "a buffer": lambda m, x, y: (y, m.anchors),
    "a parameter": lambda m, x, y: (y, m.scale),
    "a parameter alone": lambda m, x, y: m.scale,
    "a plain attribute": lambda m, x, y: (y, m.plain),
    "a tensor of the module": lambda m, x, y: (y, TABLE, GRID),
    "views of constants": lambda m, x, y: (y, m.scale.t(), m.scale[0], m.plain[None].expand(2, -1)),
    "weights of a layer": lambda m, x, y: (y, m.conv.weight, m.conv.bias),
    "a constant twice": lambda m, x, y: [m.scale, m.scale, m.scale.detach()],
    "an empty constant": lambda m, x, y: (y, m.empty),
    "an input": lambda m, x, y: x,
    "an input twice": lambda m, x, y: (x, y, x),
    "views of an input": lambda m, x, y: (x[:, :2], x.transpose(1, 2), y, x[:0]),
    "a value twice": lambda m, x, y: (y, y, {"again": y}),
    "views of a value": lambda m, x, y: (y.flatten(1), y[:, 0], y, y.unbind(1)[0]),
    "what it makes": lambda m, x, y: (y, torch.ones(2), torch.tensor([1, 2]), torch.eye(2)),
    "what follows from sizes": lambda m, x, y: (y, torch.arange(x.shape[2]), x.shape, y.size(0)),
    "numbers": lambda m, x, y: (y, 1, 2.5, True, "s", b"b", 1j, torch.float32, None),
    "None": lambda m, x, y: None,
    "a number alone": lambda m, x, y: 3,
    "an empty tuple": lambda m, x, y: (),
    "nested": lambda m, x, y: {"a": [y, (x, {"b": m.scale})], "c": {}},
    "other types": lambda m, x, y: (y > 1e6, y.double(), torch.complex(y, y), x.long()),
    "written": lambda m, x, y: (y.relu_(), y),
    "a written view": lambda m, x, y: (y[:, :1].mul_(2), y),
    "a slice": lambda m, x, y: (y, slice(1, 2), range(3)),
    "a set": lambda m, x, y: (y, {1, 2}),
    "an array": lambda m, x, y: (y, m.plain.numpy()),
    "numbers of a constant": lambda m, x, y: (y, m.scale.sum().item(), m.plain.tolist()),
    "a device and a layout": lambda m, x, y: (y, x.device, x.layout),
    "a module": lambda m, x, y: (y, m.conv),
}


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.register_buffer("anchors", torch.randn(3))
        self.register_buffer("empty", torch.empty(0))
        self.scale = nn.Parameter(torch.randn(2, 3))
        self.plain = torch.randn(4)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.what = what

    def forward(self, x):
        return self.what(self, x, self.conv(x))


def assert_same(results, wanted):
    got, spec = pytree.tree_flatten(results)
    expected, wanted_spec = pytree.tree_flatten(wanted)
    assert spec == wanted_spec
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert type(a) is type(b) and str(a) == str(b)


@pytest.mark.parametrize("what", RESULTS)
@torch.no_grad()
def test_results(what):
    torch.manual_seed(0)
    model = Returns(RESULTS[what]).eval()
    fast = tb.optimize(model, torch.randn(2, 8, 6, 6))
    inputs = [torch.randn(2, 8, 6, 6), torch.randn(3, 8, 5, 7)]
    for x in inputs:
        assert_same(fast(x), model(x))
    if not isinstance(fast, OptimizedModule):  # in parts, which no file holds
        return
    file = io.BytesIO()
    fast.save(file)
    file.seek(0)
    loaded = tb.load(file)
    for x in inputs:
        assert_same(loaded(x), model(x))


@pytest.mark.parametrize("what", RESULTS)
@torch.no_grad()
def test_a_caller_may_write_into_results(what):
    """Later calls give the same; only memory that the model itself gives away is shared."""
    torch.manual_seed(0)
    model = Returns(RESULTS[what]).eval()
    fast = tb.optimize(model, torch.randn(2, 8, 6, 6))
    x = torch.randn(2, 8, 6, 6)
    wanted = structure.with_tensors(torch.clone, model(x))
    kept = [x, *model.parameters(), *model.buffers(), model.plain, TABLE, GRID]
    for _ in range(3):
        for each in pytree.tree_leaves(fast(x)):
            if not isinstance(each, torch.Tensor) or not each.numel():
                continue
            if not any(torch._C._is_alias_of(each, other) for other in kept):
                each.clone() if 0 in each.stride() else each.zero_()
        assert_same(fast(x), wanted)
