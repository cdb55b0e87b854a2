"""Blocked tensors under torch's transforms: forward-mode derivatives, torch.jit.trace, and what a
DataLoader does with them."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torch_blocked

X, TANGENT = torch.randn(2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Joined(nn.Module):
    """Channels joined, cut and reduced."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        y = self.convolution(x)
        joined = torch.cat([y + 1, x * 2, y.mean((2, 3), keepdim=True).expand(-1, -1, 8, 8)], 1)
        return joined.clamp(-1, 1)[:, 1:]


MODELS = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9, track_running_stats=False), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(9, 16, 3, stride=2), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
    ),
    "inference": lambda: nn.Sequential(
        nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9), nn.Hardswish(), nn.AvgPool2d(2)
    ).eval(),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, groups=3), nn.GroupNorm(3, 12), nn.GELU(),
        nn.Upsample(scale_factor=2), nn.PixelShuffle(2),
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 12, 3, stride=2), nn.InstanceNorm2d(12, affine=True), nn.Softmax(1),
        nn.ReflectionPad2d(1),
    ),
    "joined": Joined,
    "linear": lambda: nn.Sequential(
        nn.Conv2d(3, 12, 1), nn.LeakyReLU(), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Flatten(), nn.Linear(12 * 16 * 16, 3),
    ),
}  # fmt: skip


def model_of(name):
    torch.manual_seed(1)
    return MODELS[name]()


def close(ours, exact):
    error = (torch_blocked.to_dense(ours).double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5, error


def by_jvp(model):
    return torch.func.jvp(lambda x: model(x.to_blocked("nChw8c")), (X,), (TANGENT,))


def by_dual(model):
    with forward_ad.dual_level():
        dual = model(forward_ad.make_dual(X, TANGENT).to_blocked("nChw8c"))
        return tuple(forward_ad.unpack_dual(dual))


def by_blocked_dual(model):
    with forward_ad.dual_level():
        tangent = TANGENT.to_blocked("nChw8c")
        return tuple(
            forward_ad.unpack_dual(model(forward_ad.make_dual(X.to_blocked("nChw8c"), tangent)))
        )


def by_linearize(model):
    out, derivative = torch.func.linearize(lambda x: model(x.to_blocked("nChw8c")).to_dense(), X)
    return out, derivative(TANGENT)


@pytest.mark.parametrize("way", (by_jvp, by_dual, by_blocked_dual, by_linearize))
@pytest.mark.parametrize("name", MODELS)
def test_forward_derivatives(name, way):
    model = model_of(name)
    exact = torch.func.jvp(copy.deepcopy(model).double(), (X.double(),), (TANGENT.double(),))
    for ours, expected in zip(way(model), exact, strict=True):
        close(ours, expected)


def test_the_tangent_is_blocked_as_its_primal():
    out, tangent = by_jvp(model_of("convolutions")[:4])
    assert out.format == tangent.format == "nChw8c"


@pytest.mark.parametrize("name", ("convolutions", "linear"))
def test_hessian_and_jacobians(name):
    model = model_of(name)
    exact = copy.deepcopy(model).double()
    x = X[:1].clone()

    def loss(model, x):
        return torch_blocked.to_dense(model(x)).square().sum()

    def blocked(x):
        return loss(model, x.to_blocked("nChw8c"))

    close(torch.func.hessian(blocked)(x), torch.func.hessian(lambda x: loss(exact, x))(x.double()))
    for jacobian in (torch.func.jacfwd, torch.func.jacrev):
        close(jacobian(blocked)(x), jacobian(lambda x: loss(exact, x))(x.double()))


def test_forward_derivatives_of_reorders_and_of_parameters():
    weight = torch.randn(9, 3, 3, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, TANGENT)
        turned = dual.to_blocked("nChw8c").to_blocked("nChw16c", torch.float64)
        back = turned.to_dense(memory_format=torch.channels_last)
        assert torch.equal(forward_ad.unpack_dual(back).tangent, TANGENT.double())
        y = F.conv2d(X.to_blocked(), forward_ad.make_dual(weight, weight + 1))
        close(forward_ad.unpack_dual(y).tangent, F.conv2d(X.double(), weight.double() + 1))


# --- torch.jit.trace


@pytest.mark.parametrize("gradients", (True, False))
@pytest.mark.parametrize("name", MODELS)
def test_traced_with_a_blocked_input(name, gradients):
    model = model_of(name).eval()
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(model, (X.to_blocked("nChw8c"),))
        for input in (TANGENT, TANGENT.to_blocked("nChw8c")):
            result, expected = traced(input), model(input)
            assert type(result) is type(expected)
            torch.testing.assert_close(*map(torch_blocked.to_dense, (result, expected)))


def test_a_reorder_inside_a_trace_is_refused_in_one_sentence():
    convolution = nn.Conv2d(3, 64, 3)
    with pytest.raises(NotImplementedError, match="a program that makes blocked tensors") as caught:
        torch.jit.trace(lambda x: convolution(x.to_blocked()).to_dense(), (X,))
    assert len(str(caught.value)) < 200


# --- data loaders


class Samples(Dataset):
    """Blocked images of a batch of one, or [C, H, W] of a blocked batch."""

    def __init__(self, keeps_batch: bool):
        self.images, self.keeps_batch = X.to_blocked("nChw8c"), keeps_batch

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index : index + 1] if self.keeps_batch else self.images[index]


@pytest.mark.parametrize("workers", (0, 1))
@pytest.mark.parametrize("keeps_batch", (True, False))
def test_samples_are_stacked_as_dense_ones(keeps_batch, workers):
    """A new dim in front: [B, 1, C, H, W] has no channels in dim 1 that a format could block."""
    (batch,) = DataLoader(Samples(keeps_batch), batch_size=2, num_workers=workers)
    assert type(batch) is torch.Tensor
    assert torch.equal(batch, X.unsqueeze(1) if keeps_batch else X)


@pytest.mark.parametrize("workers", (0, 1))
def test_samples_joined_by_cat_stay_blocked(workers):
    loader = DataLoader(Samples(True), batch_size=2, num_workers=workers, collate_fn=torch.cat)
    (batch,) = loader
    assert torch_blocked.is_blocked(batch) and torch.equal(batch.to_dense(), X)
