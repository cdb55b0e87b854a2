"""What a run of a model tells of it, against torch.export; and when a run does not tell all."""

import subprocess
import sys
import threading

import pytest
import torch
from helpers import networks as models
from helpers.draws import draws
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked import capture as captures
from torch_blocked.capture import capture
from torch_blocked.captured import VALUE, CaptureError
from torch_blocked.exported import exported

pytestmark = pytest.mark.any_isa

# Arguments that say which library may be used, where torch.export writes false.
_CUDNN = {"aten::batch_norm", "aten::layer_norm", "aten::group_norm", "aten::instance_norm"}


class Forward(nn.Module):
    """A module of a function, with a parameter and a plain tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1)

    def forward(self, *args):
        return self.function(self, *args)


def recorded(function, *inputs):
    with torch.no_grad():
        return captures._recorded(Forward(function).eval(), inputs, {})


def convolved(self, x):
    return F.conv2d(x, self.weight, padding=1)


def shape_of(captured):
    """The nodes with values renamed by first use: torch.export numbers parameters first."""
    names = {}

    def renamed(argument):
        if isinstance(argument, list) and len(argument) == 2 and argument[0] == VALUE:
            return names.setdefault(argument[1], len(names))
        if isinstance(argument, list):
            return [renamed(each) for each in argument]
        return argument

    rows = []
    for node in captured.nodes:
        arguments = [renamed(each) for each in node.arguments]
        arguments = arguments[:-1] if node.name in _CUDNN else arguments
        outputs = [renamed([VALUE, each]) for each in node.outputs]
        rows.append((node.name, node.overload, arguments, outputs))
    return rows, [renamed(each) for each in captured.outputs]


@pytest.mark.parametrize(
    "name", ["mobilenet_v2", "unet", "shufflenet_v2", "hifigan", *draws([], ["densenet121"])]
)
def test_a_run_tells_what_export_tells(name):
    spec = models.MODELS[name]
    with torch.device("meta"):
        model = spec.constructor().eval()
    x = torch.empty(1, *spec.input_dims, device="meta")
    with torch.no_grad():
        run, traced = captures._recorded(model, (x,), {}), exported(model, (x,), {})
    assert shape_of(run) == shape_of(traced)
    for field in ("input_metas", "out_spec"):
        assert getattr(run, field) == getattr(traced, field)
    assert traced.fixed_sizes


def writes_in_place(self, x):
    y = convolved(self, x)
    y += 1
    return F.relu(y, inplace=True).mul_(2)


def adds_a_constant(self, x):
    return convolved(self, x) * self.constant + torch.arange(4).view(4, 1, 1)


def takes_two(self, x, y):
    return {"sum": [x + 2 * y, None], "count": 3}


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (writes_in_place, "conv2d add relu mul"),
        (adds_a_constant, "conv2d mul arange view add"),
        (lambda self, x: torch.stack(x.unbind(1)[::2]), "unbind stack"),
        (lambda self, x: x * x.mean().item(), None),
        (lambda self, x: x if x.sum() > 0 else -x, None),
        (lambda self, x: x + x.max().tolist(), None),
        (lambda self, x: x + torch.from_numpy(x.numpy()), None),
        (lambda self, x: x.nonzero()[:1] if torch.equal(x, x) else x, None),
        (lambda self, x: torch.add(x, 1, out=torch.zeros(1, 4, 8, 8)), None),
        (lambda self, x: torch.empty(3).fill_(2) * x.sum(), "empty fill sum mul"),
        (lambda self, x: torch.zeros(4).add_(torch.ones(4).double()), "zeros ones to add to"),
        (lambda self, x: (x * 1j + 2).abs().mul_(0.5), "mul add abs mul"),
    ],
)
def test_runs(function, ops):
    run = recorded(function, torch.randn(1, 4, 8, 8))
    if ops is None:
        assert run is None
    else:
        assert [each.name for each in run.nodes] == ["aten::" + each for each in ops.split()]


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x.add_(1),
        lambda self, x: x.detach().mul_(2),
        lambda self, x: self.weight.detach().mul_(1),
    ],
)
def test_writes_into_what_was_there_before(function):
    model, x = Forward(function).eval(), torch.randn(1, 4, 8, 8)
    before = x.clone(), model.weight.detach().clone()
    with pytest.raises(CaptureError, match="its buffers or inputs"):
        capture(model, (x,))
    assert torch.equal(x, before[0]) and torch.equal(model.weight, before[1])


def test_a_failed_trace_prints_nothing_of_its_own(capfd):
    def forward(self, x):
        print("the model's own words", file=sys.stderr)
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="data-dependent"):
        capture(Forward(forward).eval(), (torch.ones(1, 4, 2, 2),))
    assert set(capfd.readouterr().err.splitlines()) == {"the model's own words"}


def test_writes_through_data_count():
    def forward(self, x):
        view = x[:, :1]
        x.data.mul_(0.5)
        return view

    model, x = Forward(forward).eval(), torch.randn(1, 4, 8, 8)
    with pytest.raises(CaptureError, match="takes .data"):
        capture(model, (x,))
    fast = tb.optimize(model, x.clone(), tune=False)
    for blocked in (False, True):
        given = x.to_blocked() if blocked else x.clone()
        assert torch.equal(torch.as_tensor(fast(given).tolist()), 0.5 * x[:, :1])


def test_autocast_is_left_to_export():
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return convolved(self, x)

    assert recorded(forward, torch.randn(1, 4, 8, 8)) is None


def test_one_tensor_for_two_inputs():
    x = torch.randn(2, 3)
    run = recorded(takes_two, x, x)
    assert run.inputs == [0, 1]
    assert [each.arguments[:2] for each in run.nodes] == [
        [[VALUE, 1], 2],
        [[VALUE, 0], [VALUE, 2]],
    ]
    assert run.outputs == [[VALUE, 3], None, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_values_that_other_threads_compute_are_noticed(dtype):
    def forward(self, x):
        sums = []
        thread = threading.Thread(target=lambda: sums.append(x.sum()))
        thread.start()
        thread.join()
        return x * sums[0]

    assert recorded(forward, torch.arange(8, dtype=dtype).view(1, 2, 2, 2)) is None


def test_an_error_of_the_model_ends_the_record():
    with pytest.raises(CaptureError, match="torch.export cannot trace it"):
        capture(Forward(convolved).eval(), (torch.randn(1, 3, 8, 8),))
    assert recorded(convolved, torch.randn(1, 4, 8, 8)) is not None


ASKING = {
    "nothing": (lambda self, x: F.interpolate(x, scale_factor=1.5).relu(), set()),
    "rank": (lambda self, x: x * 2 if x.dim() == 4 else x, {("x", -2, (4,))}),
    "sizes": (lambda self, x: x * x.shape[2], {("x", -1, (1, 4, 8, 8))}),
    "one size": (lambda self, x: x * x.size(-1), {("x", 3, (8,))}),
    "elements": (lambda self, x: x.view(torch.numel(x) // 4, 4), {("x", -3, (256,))}),
    "length": (lambda self, x: F.pad(x, [len(x), 1]), {("x", 0, (1,))}),
    "by class": (lambda self, x: x * torch.Tensor.size(x, 1), {("x", 1, (4,))}),
    "of a result": (lambda self, x: x.mean(3).flatten(1) * x.mean((1, 3)).size(1), {(2, 1, (8,))}),
    "inside torch": (
        lambda self, x: F.interpolate(x, scale_factor=1.5, recompute_scale_factor=True),
        {("x", -2, (4,)), ("x", 2, (8,)), ("x", 3, (8,))},
    ),
    "what torch asks to fill in": (
        lambda self, x: F.adaptive_avg_pool2d(x, (None, 1)),
        {("x", -1, (1, 4, 8, 8))},
    ),
    "what torch asks for nothing": (lambda self, x: F.adaptive_avg_pool2d(x, (2, 1)), set()),
    "a constant's": (lambda self, x: x * self.weight.shape[0], set()),
}


@pytest.mark.parametrize("name", ASKING)
def test_questions_about_sizes_are_noted(name):
    function, expected = ASKING[name]
    run = recorded(function, torch.randn(1, 4, 8, 8))
    named = {("x" if value == run.inputs[0] else value, *rest) for value, *rest in run.questions}
    if name == "of a result":
        named = {(2, *rest) for _, *rest in named}
    if name == "inside torch":  # torch may ask more than once, and differently
        assert named >= {("x", -2, (4,))} and any(what in (-1, 2) for _, what, _ in named)
    else:
        assert {each for each in named if each[1] != -2 or name == "rank"} == expected
    fast = tb.optimize(Forward(function).eval(), torch.randn(1, 4, 8, 8), tune=False)
    for dims in [(1, 4, 8, 8), (2, 4, 8, 8), (1, 4, 12, 6), (3, 4, 5, 7)]:
        y = torch.randn(dims)
        torch.testing.assert_close(fast(y), function(Forward(None), y))


def test_strides_that_are_read_fix_the_sizes():
    run = recorded(lambda self, x: x * 2 if x.is_contiguous() else x, torch.randn(1, 4, 8, 8))
    assert run.fixed_sizes


def test_tensors_are_ordinary_after_a_capture():
    kept = []

    def forward(self, x):
        kept.append(x.relu())
        return kept[0] * 2

    model = Forward(forward).eval()
    with torch.no_grad():
        captures._record(model, (torch.randn(1, 4, 8, 8),), {})
    assert type(kept[0]) is torch.Tensor and kept[0].shape == (1, 4, 8, 8)


def test_blocked_values_that_never_change_are_no_constants():
    model = Forward(lambda self, x: (x - x).to_blocked().mean((2, 3)) + x.mean((2, 3))).eval()
    x = torch.randn(1, 16, 5, 4)
    torch.testing.assert_close(tb.optimize(model, x, tune=False)(x), model(x))


IMPORTS = """
import sys, torch, torch_blocked
from torch_blocked.bench import networks as models
x = torch.ones(1, 3, 64, 64)
for name in ("resnet18", "mobilenet_v2", "unet"):
    torch_blocked.optimize(models.MODELS[name].constructor().eval(), x, tune=False)(x)
print("sympy" in sys.modules, "torch._dynamo" in sys.modules)
"""


def test_optimize_imports_no_tracer(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-c", IMPORTS]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "False"]
