"""Where a NaN or an infinity of the input reaches: docs/formats.md has these numbers.

A direct convolution takes it to the pixels that see it. Winograd convolutions compute tiles of
pixels together, and take it further; TORCH_BLOCKED_WINOGRAD=0 is the way out."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.draws import crossed
from helpers.implementations import forced
from helpers.optimized import ACTIVATIONS, blocked
from helpers.problems import dims_of, make_tensors, problems
from torch import nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.optimized_module import tuning_file
from torch_blocked.tensor import format_name, tail_is_zero

pytestmark = pytest.mark.usefixtures("cache_folder")

NAN, INF = float("nan"), float("inf")
# (implementation, kernel, stride): the most pixels it reaches in each dim, and ATen
EXTENTS = {
    ("winograd4", (3, 3), 1): ((5, 5), (3, 3)),
    ("winograd2", (3, 3), 1): ((3, 3), (3, 3)),
    ("winograd3", (7, 7), 2): ((6, 6), (4, 4)),
    ("winograd4", (3, 3, 3), 1): ((3, 5, 5), (3, 3, 3)),
    ("winograd2", (3, 3, 3), 1): ((3, 3, 3), (3, 3, 3)),
    ("winograd4", (1, 3, 3), 1): ((1, 5, 5), (1, 3, 3)),
    ("direct", (3, 3), 1): ((3, 3), (3, 3)),
}
if _C.isa() == "default":  # which has no Winograd kernels
    EXTENTS = {case: extents for case, extents in EXTENTS.items() if case[0] == "direct"}
# Of the pixel in every dim: each place in a tile of 2, 3 or 4, also where the stride is 2.
POSITIONS = range(8, 20)
CONVOLUTIONS = {2: F.conv2d, 3: F.conv3d}


def convolve(kernel, stride, position, value, blocked):
    """Pixels of the result that are not finite in some channel."""
    spatial = len(kernel)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 3, *kernel, generator=generator)
    x = torch.randn(1, 3, *[26] * spatial, generator=generator)
    x[(0, 1, *position)] = value
    x = x.to_blocked(format_name(x.dim(), 8)) if blocked else x
    padding = [size // 2 for size in kernel]
    result = CONVOLUTIONS[spatial](x, weight, stride=stride, padding=padding)
    assert not blocked or tail_is_zero(result)
    return ~torch_blocked.to_dense(result).isfinite().all(1)[0]


def extent(pixels):
    """The sides of the box around them."""
    at = pixels.nonzero()
    return tuple((at.max(0).values - at.min(0).values + 1).tolist())


@pytest.mark.parametrize("value", (NAN, INF))
@pytest.mark.parametrize("case", EXTENTS, ids=str)
def test_how_far_it_reaches(case, value):
    implementation, kernel, stride = case
    most, dense = ((0,) * len(kernel),) * 2
    for at in POSITIONS:
        position = (at,) * len(kernel)
        with forced(implementation):
            pixels = convolve(kernel, stride, position, value, True)
        expected = convolve(kernel, stride, position, value, False)
        assert (pixels | ~expected).all(), "it reaches at least what sees it"
        most = tuple(map(max, most, extent(pixels)))
        dense = tuple(map(max, dense, extent(expected)))
    assert (most, dense) == EXTENTS[case]


WITHOUT_WINOGRAD = """
import json
from test_nan import EXTENTS, POSITIONS, convolve
wrong = []
for implementation, kernel, stride in EXTENTS:
    for at in POSITIONS:
        position = (at,) * len(kernel)
        places = [convolve(kernel, stride, position, float("nan"), b) for b in (True, False)]
        if not places[0].equal(places[1]):
            wrong.append((kernel, position))
print(json.dumps(wrong))
"""


def test_without_winograd_it_reaches_what_it_reaches_in_aten():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WINOGRAD],
        cwd=os.path.dirname(__file__),
        env=os.environ | {"TORCH_BLOCKED_WINOGRAD": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("value", (NAN, INF))
@pytest.mark.parametrize("problem", list(problems("convolution")), ids=lambda problem: problem.id)
def test_the_tail_stays_zero(problem, value):
    """The weights of the tail's lanes are zero, and zero times infinity is not."""
    for block in (8, 16):
        dims = dims_of(problem, 2, 9)
        x, *operands = make_tensors(problem, dims)
        x = x.detach().clone()
        x.select(1, 3).fill_(value)
        with torch.no_grad():
            result = problem.run(x.to_blocked(format_name(problem.ndim, block)), *operands)
        assert not torch_blocked.is_blocked(result) or tail_is_zero(result)


# ATen's GELU of infinity is infinity or NaN, by where it lies in memory.
VALUES = {name: (NAN, INF, -INF) if name != "gelu" else (NAN,) for name in ACTIVATIONS}
LAYERS = {
    "3x3": lambda: nn.Conv2d(16, 16, 3, padding=1),
    "1x1": lambda: nn.Conv2d(16, 16, 1),
    "groups": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=4),
    "depthwise": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    "transposed": lambda: nn.ConvTranspose2d(16, 16, 3, padding=1),
}


class Activated(nn.Module):
    """activation(layer(x)), or with a sum in between."""

    def __init__(self, layer, activation, residual=False):
        super().__init__()
        self.layer, self.activation, self.residual = layer, activation, residual
        with torch.no_grad():
            self.layer.weight.abs_()  # so that an infinity comes out with its sign

    def forward(self, x):
        y = self.layer(x)
        return self.activation(y + x if self.residual else y)


def by_implementation(model, x):
    """Optimized modules, by the implementation that the layer runs by."""
    options = {"tune": True, "verify": False, "dynamic": False}
    problems = blocked(model, x, **options)._forms[0].compiled.times()
    for name in _C.implementations()["convolution"]:
        rows = [f"{each}\taten\t1e6\n" for each in problems]
        rows += [f"{each}\t{name}\t0.001\n" for each in problems if " nchw-" not in each]
        tuning_file().write_text("".join(rows))
        optimized = blocked(model, x, **options)
        if f" {name} " in optimized.plan():  # else it takes no such layer
            yield name, optimized


@pytest.mark.parametrize(("activation", "residual"), crossed(2, ACTIVATIONS, (False, True)))
@torch.no_grad()
def test_activations_of_convolutions_keep_it(activation, residual):
    seen = set()
    for layer in LAYERS.values():
        model = Activated(layer(), ACTIVATIONS[activation], residual).eval()
        for name, optimized in by_implementation(model, torch.randn(3, 16, 8, 8)):
            x = torch.randn(3, 16, 8, 8)
            seen.add(name)
            for value in (NAN,) if name.startswith("winograd") else VALUES[activation]:
                x[1] = value
                assert torch.allclose(optimized(x), model(x), atol=1e-5, equal_nan=True), name
    assert {"onednn_blocked", "aten"} <= seen
    assert _C.isa() == "default" or {"direct", "depthwise", "grouped", "winograd4"} <= seen


@torch.no_grad()
def strassen_keeps_it(activation):
    """At the row that it is in."""
    model, x = Activated(nn.Linear(96, 96), activation).eval(), torch.randn(56, 96)
    with forced("strassen", "linear"):
        optimized = blocked(model, x)
    assert " strassen " in optimized.plan()
    x[1] = NAN
    assert optimized(x)[1].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ("few_rows", "direct", "onednn", "strassen"))
@torch.no_grad()
def test_activations_of_linear_layers_keep_it(name, activation):
    if name == "strassen":  # takes it to other rows
        return strassen_keeps_it(ACTIVATIONS[activation])
    if name == "few_rows" and _C.isa() == "default":
        return
    model = Activated(nn.Linear(48, 32), ACTIVATIONS[activation]).eval()
    x = torch.randn(3, 48)
    with forced(name, "linear"):
        optimized = blocked(model, x)
    for value in VALUES[activation]:
        x[1] = value
        assert torch.allclose(optimized(x), model(x), atol=1e-5, equal_nan=True)
    assert f" {name} " in optimized.plan()
