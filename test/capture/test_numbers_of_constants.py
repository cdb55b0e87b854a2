"""Numbers that a forward reads out of its parameters, buffers and other tensors that do not depend
on its inputs, in all spellings and from wherever these lie: constants of the capture."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked.capture import capture, capture_sizes
from torch_blocked.optimized_module import OptimizedModule

pytestmark = pytest.mark.any_isa

VALUES = (2.0, 4.0, 3.0)
IN_MODULE = torch.tensor(VALUES)
SIZES = ((1, 3, 16, 16), (2, 3, 8, 24), (1, 3, 9, 7), (1, 3, 16, 16))


class Spelling(nn.Module):
    """Reads numbers of `self.at(place)`, a tensor of VALUES, as `read` does it."""

    def __init__(self, place, read):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.place, self.read = place, read
        self.attribute = torch.tensor(VALUES)
        self.register_buffer("buffer", torch.tensor(VALUES))
        self.parameter = nn.Parameter(torch.tensor(VALUES))
        self.list = [torch.tensor(VALUES)]

    def numbers(self):
        if self.place == "module":
            return IN_MODULE
        return self.list[0] if self.place == "list" else getattr(self, self.place)

    def forward(self, x):
        return self.read(self.layer(x), self.numbers())


PLACES = ("attribute", "buffer", "parameter", "list", "module")


def anchors(y, number):
    return y.flatten(2) * torch.full((y.shape[2] * y.shape[3],), number)


def branch(y, flag):
    return y * 2 if flag else y + 1


def rows(y, count):
    return torch.stack([y * (i + 1) for i in range(count)])


def of_all(y, numbers):
    return sum(y * number for number in numbers)


READS = {
    "full": lambda y, t: anchors(y, t[0]),
    "new_full": lambda y, t: y * y.new_full((y.shape[3],), t[1]),
    "item": lambda y, t: y * t[0].item(),
    "float": lambda y, t: y + float(t[1]),
    "int": lambda y, t: rows(y, int(t[2])),
    "bool": lambda y, t: branch(y, bool(t[0] - 2)),
    "if": lambda y, t: y * 2 if t[0] > 3 else y + 1,
    "if not": lambda y, t: y * 2 if not t.sum() else y + 1,
    "while": lambda y, t: rows(y, next(i for i in range(9) if i >= t[0])),
    "tolist": lambda y, t: of_all(y, t.tolist()),
    "tolist of a result": lambda y, t: of_all(y, (t * 2).tolist()),
    "iteration": lambda y, t: torch.stack([torch.full((3,), q) for q in t]).sum() * y,
    "zip": lambda y, t: [anchors(y, q) for _, q in zip((1,), t, strict=False)][0],
    "unpacked": lambda y, t: (lambda a, b, c: y * float(a) - float(b) * float(c))(*t),
    "len": lambda y, t: rows(y, len(t)),
    "index of a list": lambda y, t: y * [1.0, 5.0, 7.0][t.argmin()],
    "slice": lambda y, t: y[:, : int(t[2])],
    "sizes": lambda y, t: y + torch.ones(int(t[1]), 1, 1),
    "view": lambda y, t: y.view(y.shape[0], int(t[0]), -1),
    "sorted": lambda y, t: of_all(y, [float(q) for q in sorted(t)]),
    "min and max": lambda y, t: y * float(min(t)) + float(max(t)),
    "sum": lambda y, t: y * float(sum(t)),
    "math": lambda y, t: y * math.sqrt(t[1]),
    "format": lambda y, t: y * float(f"{t[0]:.3f}") + len(f"{t}"),
    "numpy": lambda y, t: of_all(y, t.detach().numpy().tolist()),
    "numpy of a result": lambda y, t: y * float((t.detach() * 2).numpy()[1]),
    "contains": lambda y, t: branch(y, 4.0 in t),
    "equal": lambda y, t: branch(y, torch.equal(t, t + 0)),
    "allclose": lambda y, t: branch(y, torch.allclose(t, t + 1)),
    "any": lambda y, t: branch(y, (t > 3).any()),
    "resize": lambda y, t: F.interpolate(y, scale_factor=float(t[0])),
    "dropout": lambda y, t: F.dropout(y, float(t[0]) / 4, training=False),
    "mask": lambda y, t: y[:, torch.cat([t > 2, t[:1] > 2])],
    "nonzero": lambda y, t: y[:, (t > 2).nonzero()[:, 0]],
    "filled": lambda y, t: anchors(y, torch.zeros(3).copy_(t)[1].add_(1)),
    "arange": lambda y, t: y * torch.arange(float(t[0]), float(t[0]) + y.shape[3]),
}


def refuses(model, x):
    """torch.full takes no number that may need a gradient."""
    try:
        with torch.no_grad():
            model(x)
    except TypeError:
        return True
    return False


def same(fast, model, x):
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", READS)
def test_a_model_that_reads_numbers_is_captured_whole(name, place):
    torch.manual_seed(0)
    model = Spelling(place, READS[name]).eval()
    inputs = [torch.randn(*size) for size in SIZES]
    if refuses(model, inputs[0]):
        with pytest.raises(TypeError, match="must be Number"):
            tb.optimize(model, inputs[0], tune=False)
        return
    fast = tb.optimize(model, inputs[0], tune=False)
    assert isinstance(fast, OptimizedModule), fast.plan()
    for x in inputs:
        same(fast, model, x)
        assert fast.plan(x).startswith("runs: blocked")


@pytest.mark.parametrize("name", ("full", "if", "tolist", "numpy of a result", "mask"))
def test_a_run_without_values_reads_the_same(name):
    torch.manual_seed(0)
    model, x = Spelling("buffer", READS[name]).eval(), torch.randn(*SIZES[0])
    with torch.no_grad():
        assert capture_sizes(model, (x,)).same_as(capture(model, (x,)))


@pytest.mark.parametrize("name", ("item", "tolist", "numpy", "if", "len"))
def test_a_changed_number_asks_to_optimize_again(name):
    model = Spelling("buffer", READS[name]).eval()
    first, second = (torch.randn(*size) for size in SIZES[:2])
    fast = tb.optimize(model, first, tune=False)
    before = fast(first)
    model.buffer.mul_(3)
    assert torch.equal(fast(first), before)
    if name == "len":
        same(fast, model, second)  # its numbers are not read
        return
    with pytest.raises(ValueError, match="optimize the model again"):
        fast(second)
    same(tb.optimize(model, first, tune=False), model, second)


class Anchors(nn.Module):
    """Keeps what follows from sizes and constants for as long as the sizes stay, as a YOLO does."""

    shape = None

    def __init__(self, key):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3, stride, 1) for stride in (1, 2)])
        self.key, self.stride = key, torch.tensor([8.0, 16.0])
        self.kept = {}

    def make(self, images):
        made = []
        for image, stride in zip(images, self.stride, strict=True):
            h, w = image.shape[2:]
            sx = torch.arange(end=w, dtype=image.dtype) + 0.5
            sy = torch.arange(end=h, dtype=image.dtype) + 0.5
            y, x = torch.meshgrid(sy, sx, indexing="ij")
            grid = torch.stack((x, y), -1).view(-1, 2) * stride
            made.append(torch.cat([grid, torch.full((h * w, 1), stride)], 1))
        return torch.cat(made).T

    def anchors(self, x, images):
        if self.key == "dict":
            key = tuple(x.shape[2:])
            if key not in self.kept:
                self.kept[key] = self.make(images)
            return self.kept[key]
        shape = x.shape if self.key == "shape" else x.shape[2:]
        if self.shape != shape:
            self.made, self.shape = self.make(images), shape
        return self.made

    def forward(self, x):
        images = [layer(x) for layer in self.layers]
        flat = torch.cat([each.flatten(2) for each in images], 2)
        return flat[:, :3] * self.anchors(x, images)


@pytest.mark.parametrize("ran", ("never", "here", "elsewhere"))
@pytest.mark.parametrize("key", ("shape", "image", "dict"))
def test_anchors_that_are_kept_for_a_shape(key, ran):
    model = Anchors(key).eval()
    inputs = [torch.randn(*size) for size in SIZES]
    with torch.no_grad():
        for x in {"never": (), "here": inputs[:1], "elsewhere": inputs[1:]}[ran]:
            model(x)
    fast = tb.optimize(model, inputs[0], tune=False)
    for x in inputs * 2:
        assert fast.plan(x).startswith("runs: blocked")
        same(fast, copy.deepcopy(model), x)


@pytest.mark.parametrize(
    "read",
    (
        lambda y, t: y * y.mean().item(),
        lambda y, t: branch(y, y.mean() > 0),
        lambda y, t: y * y.flatten()[:3].tolist()[0],
        lambda y, t: y * float(y.detach().numpy().max()),
        lambda y, t: y * torch.zeros(3).copy_(y[0, :3, 0, 0])[1].item(),
        lambda y, t: y * float((t + y.mean())[0]),
        lambda y, t: y * torch.rand(1).item() * 0 + y,
    ),
)
def test_values_that_depend_on_inputs_are_not_constants(read):
    torch.manual_seed(0)
    model = Spelling("buffer", read).eval()
    fast = tb.optimize(model, torch.randn(*SIZES[0]), tune=False)
    for x in (torch.randn(*SIZES[0]), -torch.ones(SIZES[0]), torch.randn(*SIZES[1])):
        same(fast, model, x)


def test_an_array_that_shows_what_is_written_later_is_no_constant():
    def read(y, t):
        base = torch.zeros(3)
        array = base.numpy()
        base += y.mean()
        return y * float(array[0])

    model = Spelling("buffer", read).eval()
    fast = tb.optimize(model, torch.randn(*SIZES[0]), tune=False)
    for x in (torch.randn(*SIZES[0]), torch.ones(SIZES[0])):
        same(fast, model, x)
