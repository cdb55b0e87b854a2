"""torch.compile and torch.export of what takes, makes or returns blocked tensors.

One graph, with the results of eager."""

import copy
import io
import tempfile

import pytest
import torch
import torch._dynamo.backends.common
import torch._dynamo.convert_frame
import torch.nn.functional as F
from helpers.networks import MODELS
from torch import nn
from torch.utils import _pytree as pytree

import torch_blocked
from torch_blocked import _C

pytestmark = pytest.mark.any_isa

TAG = "nChw8c"
WEIGHT = torch.randn(8, 17, 3, 3, generator=torch.Generator().manual_seed(1))


def random_dense(*dims, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dims or (2, 17, 6, 5), generator=generator)


def as_dense(value):
    return value.to_dense() if torch_blocked.is_blocked(value) else value


def assert_same(actual, expected, **tolerance):
    """The same types, and the same values."""
    for ours, theirs in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, torch.Tensor):
            assert torch_blocked.format_of(ours) == torch_blocked.format_of(theirs)
            torch.testing.assert_close(as_dense(ours), as_dense(theirs), **tolerance)
        else:
            assert ours == theirs


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


# --- torch.compile

OF_DENSE = {
    "method": lambda x: F.conv2d(x.to_blocked(TAG), WEIGHT).relu().to_dense(),
    "default format": lambda x: torch_blocked.to_dense(torch_blocked.to_blocked(x) * 2),
    "returned": lambda x: torch_blocked.to_blocked(x, TAG).sigmoid(),
    "created": lambda x: torch_blocked.zeros(2, 17, 6, 5, format=TAG) + x.to_blocked(TAG),
    "ones": lambda x: torch_blocked.ones(x.shape, format=TAG) * torch_blocked.to_blocked(x, TAG),
    "to_format": lambda x: torch_blocked.to_format(torch_blocked.to_format(x, TAG) + 1, "nhwc"),
    "chwn": lambda x: torch_blocked.to_format(torch_blocked.to_format(x, TAG) + 1, "chwn"),
    "permuted": lambda x: torch_blocked.to_format(x, "bacd") + 1,
    "reblocked": lambda x: torch_blocked.to_blocked(x.to_blocked(TAG), "nChw16c"),
    "tag": lambda x: x + 1 if torch_blocked.format_of(x.to_blocked(TAG)) == TAG else x,
}
OF_BLOCKED = {
    "convolution": lambda x: F.conv2d(x, WEIGHT).relu(),
    "dense result": lambda x: F.max_pool2d(x, 2).to_dense(),
    "several results": lambda x: (x * 2, x.to_dense(), x.mean((2, 3))),
    "in place": lambda x: x.mul_(2) + 1,
    "properties": lambda x: x * x.block if x.format == TAG else x,
    "concatenation": lambda x: torch.cat([x, x.relu()], 1)[:, 8:],
}


@pytest.mark.parametrize("name", OF_DENSE)
def test_functions_of_dense(name):
    assert_same(compiled(OF_DENSE[name])(random_dense()), OF_DENSE[name](random_dense()))


@pytest.mark.parametrize("name", OF_BLOCKED)
def test_functions_of_blocked(name):
    function, input = OF_BLOCKED[name], random_dense().to_blocked(TAG)
    again = input.clone()
    assert_same(compiled(function)(again), function(input))
    assert_same(again, input)  # what was written in place too


def test_inductor(monkeypatch):
    # Inductor would reuse code made for another instruction set: it is not in the cache's key.
    cache = f"{tempfile.gettempdir()}/torch_blocked_test_{torch_blocked.env()['isa']}"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)

    def function(x):
        y = F.conv2d((x * 2).relu(), WEIGHT)
        return F.max_pool2d(y, 2)

    inputs = [random_dense().to_blocked(TAG).requires_grad_() for _ in range(2)]
    results = [function(inputs[0]), compiled(function, "inductor")(inputs[1])]
    assert_same(results[1], results[0])
    for result in results:
        result.square().sum().backward()
    assert_same(inputs[1].grad, inputs[0].grad)


@pytest.mark.parametrize("blocked", (False, True), ids=("mark_dynamic", "dynamic=True"))
def test_dynamic_shapes(blocked):
    """One graph for every batch and every picture."""
    graphs = []

    def function(x):
        y = F.conv2d(x if blocked else x.to_blocked(TAG), WEIGHT, padding=1).relu()
        return F.avg_pool2d(y, 2).to_dense()

    def counted(graph, _inputs):
        graphs.append(graph)
        return graph

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=counted)
    run = compiled(function, backend, dynamic=True if blocked else None)
    for n, h, w in ((2, 6, 10), (4, 9, 12), (5, 7, 11)):  # none of them a size of the weight
        x = random_dense(n, 17, h, w)
        if blocked:
            x = x.to_blocked(TAG)
        else:
            for dim in (0, 2, 3):
                torch._dynamo.mark_dynamic(x, dim)
        assert_same(run(x), function(x))
    assert len(graphs) == 1


def gradients(run, model, input):
    """The output, and the gradients of the input and of all parameters."""
    input = input.detach().requires_grad_()
    output = run(input)
    output.square().mean().backward()
    return output.detach(), input.grad, [parameter.grad for parameter in model.parameters()]


def test_resnet18_of_a_blocked_input():
    """Forward and backward in one graph each, with the bits of eager."""
    torch.manual_seed(0)
    model = MODELS["resnet18"].constructor().train()
    again = copy.deepcopy(model)
    input = random_dense(2, 3, 32, 32).to_blocked()
    expected = gradients(model, model, input)
    with torch_blocked.strict():
        result = gradients(compiled(again), again, input)
    assert_same(result, expected)
    assert_same(list(again.buffers()), list(model.buffers()))


# --- torch.export


class Exported(nn.Module):
    """Makes blocked tensors inside; dense in, dense out."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(17, 24, 3, padding=1)
        self.norm = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        y = self.norm(self.convolution(x.to_blocked(TAG))).relu_()
        y = torch.cat([y, torch_blocked.zeros(x.shape[0], 8, 6, 5, format=TAG)], 1)[:, 8:]
        y = F.max_pool2d(y * y.mean((2, 3), keepdim=True).sigmoid(), 2)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


@pytest.mark.parametrize("strict", (False, True), ids=("non-strict", "strict"))
def test_export(strict):
    torch.manual_seed(0)
    model = Exported().eval()
    inputs = [random_dense(), random_dense(3, 17, 6, 5, seed=1)]
    shapes = {"x": {0: torch.export.Dim("n", min=2, max=16)}}
    with torch.no_grad():
        expected = [model(input) for input in inputs]
    program = torch.export.export(model, (inputs[0],), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for form in (program, program.run_decompositions(), torch.export.load(file)):
        ops = {str(node.target).partition(".")[0] for node in form.graph.nodes}
        assert "torch_blocked" in ops
        for input, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(form.module()(input), wanted)


def test_export_refuses_a_blocked_result():
    """torch.export would keep it as a constant without values."""
    with pytest.raises(RuntimeError, match="expected a program that returns dense tensors"):
        torch.export.export(_ReturnsBlocked(), (random_dense(),))


class _ReturnsBlocked(nn.Module):
    def forward(self, x):
        return x.to_blocked(TAG) * 2


def test_export_leaves_nothing_behind():
    """After it, tensors are the ordinary kind again, and so is the dispatcher."""
    model = Exported().eval()
    torch.export.export(model, (random_dense(),))
    with pytest.raises(Exception, match="expected a tag"):
        torch.export.export(_Fails(), (random_dense(),))
    blocked = random_dense().to_blocked(TAG)
    assert type(blocked) is type(blocked * 2) is torch_blocked.BlockedTensor
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.PreDispatch)


class _Fails(nn.Module):
    def forward(self, x):
        return (x.to_blocked(TAG) * 2).to_blocked("nhwc")


class AroundRecurrence(nn.Module):
    """Dynamo leaves a GRU and a backward pass out of its graphs."""

    def __init__(self):
        super().__init__()
        self.conv, self.gru = nn.Conv2d(17, 12, 3, padding=1), nn.GRU(12, 5, batch_first=True)

    def forward(self, x, steps):
        y = F.local_response_norm(self.conv(x.to_blocked(TAG)), 3)
        rows = y[:, :, 0].transpose(1, 2)
        result = self.gru(rows)[0].sum() + y[:, 3:5].square().mean() + y.to_dense().sum()
        if steps:
            result.backward()
        return result.detach()


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("backend", ["torch_blocked", "eager"])
def test_dynamo_does_not_see_what_runs_behind_an_op(backend, steps):
    """It would compile each function of ours on its own, and fail in some."""
    torch.manual_seed(1)
    model = AroundRecurrence()
    torch._dynamo.reset()
    fast = torch.compile(model, backend=backend)
    for size in (6, 9):
        x = random_dense(2, 17, size, 5)
        with torch.set_grad_enabled(steps):
            torch.testing.assert_close(fast(x, steps), model(x, steps), rtol=1e-4, atol=1e-4)
    seen = torch._dynamo.convert_frame.input_codes.seen
    codes = [code for each in seen if (code := each()) is not None]
    ours = {code.co_name for code in codes if "torch_blocked/" in code.co_filename}
    assert any(code.co_name == "forward" for code in codes)
    assert not ours & {"__torch_dispatch__", "dispatch", "backward", "_dense_gradient"}
    assert not {code.co_name for code in codes if "shadow.py" in code.co_filename}


@pytest.mark.usefixtures("in_bfloat16")
@torch.no_grad()
def test_options_are_those_of_optimize():
    model, x = nn.Sequential(nn.Conv2d(17, 16, 3), nn.ReLU()).eval(), torch.randn(2, 17, 9, 8)

    def run(**options):
        return torch.compile(model, backend="torch_blocked", options=options)(x)

    torch.testing.assert_close(run(tune=False), model(x), rtol=1e-4, atol=1e-4)
    result = run(dtype=torch.bfloat16)
    assert result.dtype == torch.float32
    assert 1e-4 < (result - model(x)).abs().max() < 0.1 or not _C.multiplies_bfloats()
    with pytest.raises(
        Exception, match="expected the options 'tune', 'dtype' and 'keep', got 'mode'"
    ):
        run(mode=1)
