"""What PyTorch builds on autograd takes blocked activations: checkpoints, autocast, saved-tensor
hooks, accumulated gradients, double backward and torch.func. Results are those of dense inputs."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_blocked

pytestmark = pytest.mark.any_isa

TAG = "nChw8c"


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 17, 3, padding=1),
        nn.BatchNorm2d(17),
        nn.SiLU(),
        nn.Conv2d(17, 8, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2),
    )


def random_dense():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def as_dense(value):
    return value.to_dense() if torch_blocked.is_blocked(value) else value


def assert_same(actual, expected, **tolerance):
    actual, expected = map(torch.utils._pytree.tree_leaves, (actual, expected))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(as_dense(ours), theirs, **tolerance)


def saved_elsewhere(model, x):
    with save_on_cpu():
        return model(x)


def in_bfloat16(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def twice(model, x):
    """Gradients add up."""
    model(x).square().mean().backward()
    return model(x * 2)


BFLOAT16 = {"rtol": 0.05, "atol": 0.01}
WAYS = {
    "checkpoint": (lambda m, x: checkpoint(m, x, use_reentrant=False), {}),
    "reentrant checkpoint": (lambda m, x: checkpoint(m, x, use_reentrant=True), {}),
    "checkpoints": (lambda m, x: checkpoint_sequential(m, 3, x, use_reentrant=False), {}),
    "saved-tensor hooks": (saved_elsewhere, {}),
    "autocast": (in_bfloat16, BFLOAT16),
    "accumulated gradients": (twice, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients(way):
    run, tolerance = WAYS[way]
    results = []
    for tag in (TAG, None):
        model, input = network(), random_dense().requires_grad_()
        output = run(model, input.to_blocked(tag) if tag else input)
        output.square().mean().backward()
        found = [p.grad for p in model.parameters()]
        assert not any(torch_blocked.is_blocked(gradient) for gradient in found)
        results.append([output.detach(), input.grad, *found, *model.buffers()])
    assert torch_blocked.format_of(results[0][0]) == TAG
    assert_same(*results, **tolerance)


def test_double_backward():
    """Of the input and all parameters, through every layer."""
    results = []
    for tag in (TAG, None):
        model, input = network(), random_dense().requires_grad_()
        output = model(input.to_blocked(tag) if tag else input)
        (first,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [input, *model.parameters()]))
    assert_same(*results, rtol=1e-3, atol=1e-3)


def test_module_hooks():
    seen = []
    model, again = network(), network()
    for each in (model, again):
        each[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
        each[4].register_full_backward_pre_hook(lambda _module, grads: (grads[0] * 3,))
    model[3].register_full_backward_hook(lambda _module, inputs, outputs: seen.append(inputs[0]))
    model(random_dense().to_blocked(TAG)).square().mean().backward()
    again(random_dense()).square().mean().backward()
    assert [torch_blocked.format_of(gradient) for gradient in seen] == [TAG]
    assert_same([p.grad for p in model.parameters()], [p.grad for p in again.parameters()])


MODEL = network().eval()
PARAMETERS = {name: value.detach() for name, value in MODEL.named_parameters()}


def loss(parameters, x):
    return functional_call(MODEL, parameters, (x,)).square().mean()


def tangent(x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(torch.sin(dual * 2)).tangent


FUNCTIONS = {
    "grad of parameters": lambda x: grad(loss)(PARAMETERS, x),
    "grad of input": lambda x: grad(loss, 1)(PARAMETERS, x),
    "vjp": lambda x: vjp(MODEL, x)[1](torch.ones(2, 8, 8, 8)),
    "jvp": lambda x: jvp(lambda t: t.sin() * t, (x,), (x,)),
    "jacrev": lambda x: jacrev(lambda t: t.square().mean((0, 2, 3)))(x),
    "hessian": lambda x: hessian(lambda t: t[0, :, :2, :2].pow(3).sum())(x[:, :, :2, :2]),
    "vmap over images": lambda x: vmap(lambda image: (image * 2).sum())(x),
    "vmap beside it": lambda x: vmap(lambda scale: (x * scale).sum())(torch.arange(3.0)),
    "gradients of each image": lambda x: vmap(
        grad(lambda p, image: loss(p, image[None])), in_dims=(None, 0)
    )(PARAMETERS, x),
    "forward mode": tangent,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_functions(name):
    x, function = random_dense(), FUNCTIONS[name]
    assert_same(function(x.to_blocked(TAG)), function(x), rtol=1e-4, atol=1e-5)


def test_reorders_inside_functions_of_functions():
    """Differentiated, but not batched."""
    x = random_dense()

    def blocked_inside(x):
        return loss(PARAMETERS, x.to_blocked(TAG))

    assert_same(grad(blocked_inside)(x), grad(lambda x: loss(PARAMETERS, x))(x))
    with pytest.raises(NotImplementedError, match="torch_blocked::to_blocked: .*before torch.vmap"):
        vmap(lambda image: image[None].to_blocked(TAG))(x)


class _AsSequence(nn.Module):
    """Pixels as a sequence, as transformers with a convolutional stem have them."""

    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:torch_blocked")
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("blocked_norm", (True, False))
def test_batch_norm_gets_a_gradient_that_it_reads_right(blocked_norm, dtype, training):
    """Batch 1: it comes with strides [C, 1, W * C, C], with which torch's own is wrong."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6).to(dtype).train(training)
    x, weight = torch.randn(1, 6, 3, 4, dtype=dtype), torch.randn(6, 6, dtype=dtype)

    def gradients(function):
        leaf = x.clone().requires_grad_()
        loss = (function(leaf) @ weight).sin().sum()
        return torch.autograd.grad(loss, (leaf, *norm.parameters()))

    ours = gradients(
        lambda y: _AsSequence()(norm(y.to_blocked()) if blocked_norm else norm(y).to_blocked())
    )
    # Two images give two equal halves, and torch reads their strides right.
    norm, x = norm.double(), torch.cat([x, x]).double()
    weight = weight.double()
    pair = gradients(lambda y: _AsSequence()(norm(y)))
    exact = (pair[0][:1], *(value / 2 for value in pair[1:]))
    for value, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tag", (None, "nChw8c", "nChw16c"))
@pytest.mark.parametrize("normalized", ([7, 9, 6], [9, 6], [6]))
def test_layer_norm_reads_statistics_of_any_format(normalized, tag):
    torch.manual_seed(0)
    x, gradient = torch.randn(3, 7, 9, 6), torch.randn(3, 7, 9, 6)
    weight, bias = torch.randn(normalized), torch.randn(normalized)
    aten = torch.ops.aten
    _, *statistics = aten.native_layer_norm(x, normalized, weight, bias, 1e-5)
    expected = aten.native_layer_norm_backward(
        gradient, x, normalized, *statistics, weight, bias, [True] * 3
    )
    if tag:
        statistics = [each.to_blocked(tag) for each in statistics]
    found = aten.native_layer_norm_backward(
        gradient.to_blocked(TAG),
        x.to_blocked(TAG),
        normalized,
        *statistics,
        weight,
        bias,
        [True] * 3,
    )
    for value, reference in zip(found, expected, strict=True):
        value = value.to_dense() if torch_blocked.is_blocked(value) else value
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-4)
