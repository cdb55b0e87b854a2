"""A network on blocked tensors: its gradients, and Python threads that share its modules."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import DIMS, TAG, as_dense, random_dense
from torch import nn

import torch_blocked
from torch_blocked import _C

pytestmark = pytest.mark.filterwarnings("ignore:torch_blocked")

# --- gradients


class Small(nn.Module):
    """Every kind of layer a residual network has."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 17, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(17)
        self.depthwise = nn.Conv2d(17, 17, 3, padding=1, groups=17, bias=False)
        self.bn2 = nn.BatchNorm2d(17)
        self.pointwise = nn.Conv2d(17, 17, 1)
        self.down = nn.Conv2d(17, 24, 3, stride=2, padding=1)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.stem(x)))
        x = x + F.silu(self.pointwise(self.bn2(self.depthwise(x))))
        x = F.max_pool2d(x, 3, 2, 1)
        x = F.hardswish(self.down(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def gradients(model, x):
    """Output, loss gradients of the input and of each parameter, and buffers after the step."""
    x = x.detach().requires_grad_()
    output = model(x)
    (output * torch.arange(output.numel()).reshape(output.shape)).sum().backward()
    found = {"input": x.grad, "output": output.detach()}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}


@pytest.mark.parametrize("tag", ("nChw8c", "nChw16c"))
@pytest.mark.parametrize("mode", ("train", "eval"))
def test_gradients_of_a_network(mode, tag):
    torch.manual_seed(0)
    model = getattr(Small(), mode)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    x = random_dense(3, 3, 11, 9)
    exact = gradients(copy.deepcopy(model).double(), x.double())
    dense = gradients(copy.deepcopy(model), x)
    ours = gradients(model, x.to_blocked(tag))
    for name, value in exact.items():
        if name != "input":
            assert not torch_blocked.is_blocked(ours[name]), name
        scale = value.abs().max()
        error = (as_dense(ours[name]).double() - value).abs().max()
        dense_error = (dense[name].double() - value).abs().max()
        assert error <= max(4 * dense_error, 1e-6 * scale), name


def test_second_derivatives():
    weight = random_dense(9, 9, 3, 3, dtype=torch.float64) / 9

    def function(x):
        y = F.conv2d(x.to_blocked(TAG), weight, padding=1)
        return F.avg_pool2d(F.silu(y), 2).to_dense()

    x = random_dense(1, 9, 4, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(function, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x,), fast_mode=True)


def test_gradients_add_up_over_formats():
    leaf = random_dense().to_blocked(TAG).requires_grad_()
    (leaf * 2).sum().backward()
    (leaf.to_dense() * 3).sum().backward()
    (leaf.to_blocked("nChw16c") * 4).sum().backward()
    assert torch.equal(as_dense(leaf.grad), torch.full(DIMS, 9.0))


def test_hooks_retain_grad_and_no_grad():
    x = random_dense().to_blocked(TAG).requires_grad_()
    y = x * 2
    y.retain_grad()
    seen = []
    y.register_hook(seen.append)
    y.sum().backward()
    assert torch.equal(as_dense(seen[0]), torch.ones(DIMS))
    assert torch.equal(as_dense(y.grad), torch.ones(DIMS))
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        inference = random_dense().to_blocked(TAG) * 2
    assert inference.is_inference()
    assert torch.equal(inference.to_dense(), random_dense() * 2)
    assert not x.detach().requires_grad


# --- threads


@pytest.mark.parametrize(
    "module",
    (nn.Conv2d(17, 24, 3, padding=1), nn.Conv2d(17, 17, 3, groups=17), nn.Conv2d(17, 8, 1)),
    ids=("3x3", "depthwise", "1x1"),
)
def test_python_threads_share_a_module(module):
    """Each has its own primitives and scratchpad; half of the time the weights are packed anew."""
    inputs = [random_dense(2, 17, 13, 11, seed=seed).to_blocked(TAG) for seed in range(4)]
    with torch.no_grad():
        expected = [module(x).to_dense() for x in inputs]
    failures, start = [], threading.Barrier(4)

    def work(index):
        start.wait()
        with torch.no_grad():
            for step in range(30):
                which = (index + step) % len(inputs)
                if index == 0 and step % 5 == 0:
                    _C.clear_packed_weights()
                if not torch.equal(module(inputs[which]).to_dense(), expected[which]):
                    failures.append((index, step))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("tag", ("nChw8c", "nChw16c"))
def test_number_of_threads_does_not_change_results(tag):
    """One module, one set of packed weights, from one thread to more than there are cores."""
    torch.manual_seed(0)
    model = Small().eval()
    x = random_dense(3, 3, 35, 33).to_blocked(tag)
    threads, results = torch.get_num_threads(), []
    packs = []
    try:
        for count in (2, 1, 3, 2):
            torch.set_num_threads(count)
            with torch.no_grad(), torch_blocked.profile() as p:
                results.append(model(x))
            packs.append(p.packs)
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert torch.equal(result, results[0])
    assert packs[1:] == [0, 0, 0], "packed weights depend on the number of threads"
