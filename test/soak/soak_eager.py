"""Eager blocked tensors of the soak: formats, ops, training and writes, with the dense results."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from helpers.nets import Block
from torch import Tensor, nn

import torch_blocked as tb

CHANNELS, STEPS = 19, 3  # of no whole block
TAGS = ("nChw8c", "nChw16c", "nChw4c", None)

FORMATS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: tb.to_blocked(x, "nChw8c"),
    lambda x: tb.to_blocked(x, "nChw16c"),
    lambda x: tb.to_format(x, "nchw"),
    lambda x: tb.to_format(x, "nhwc"),
    lambda x: tb.to_format(x, "nChw4c"),
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: tb.to_dense(x) if tb.is_blocked(x) else x.clone(),
)


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2).add_(x).relu_()
    y[:, 1:4] = 0.5
    y[0, :, 2:5].mul_(3)
    y.clamp_(max=2)
    return y


_WEIGHT = torch.randn(24, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(1)) / 13

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda x: F.conv2d(x, _WEIGHT, stride=2, padding=1),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 1),
    "pooling": lambda x: F.max_pool2d(x, 3, 2, 1),
    "softmax": lambda x: x.softmax(1),
    "concat": lambda x: torch.cat([x, x.relu(), x], 1),
    "resampling": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "padding": lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
    "gate": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "channels": lambda x: x[:, 3:11].sum(1),
    "sorted, on a dense copy": lambda x: x.sort(3).values,
    "written in place": _written,
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=1e-3),
}


def fill_caches() -> None:
    """Meets more sizes than a thread keeps plans of (1024). They would fill its caches for an hour,
    with some 20 KiB each, which is no leak."""
    for width in range(3, 1103):
        F.conv2d(tb.to_blocked(torch.zeros(1, CHANNELS, 3, width), "nChw8c"), _WEIGHT)


def trained(learner: nn.Module, optimizer: str, tag: str | None) -> Tensor:
    """The loss after some steps, in the format of this tag; "nchw" is dense."""
    steps = OPTIMIZERS[optimizer](learner.parameters())
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    x = x if tag == "nchw" else tb.to_blocked(x, tag)

    def loss() -> Tensor:
        y = learner(x)
        return (y.to_dense() if tb.is_blocked(y) else y).square().mean()

    for _ in range(STEPS):
        steps.zero_grad()
        loss().backward()
        steps.step()
    with torch.no_grad():
        return loss()


# Each doubles the weights.
WRITES: tuple[Callable[[nn.Conv2d], object], ...] = (
    lambda conv: conv.weight.mul_(2),
    lambda conv: conv.weight.data.mul_(2),
    lambda conv: conv.weight.detach().numpy().__imul__(2),
    lambda conv: setattr(conv, "weight", nn.Parameter(conv.weight.detach() * 2)),
    lambda conv: conv.load_state_dict({"weight": conv.weight.detach() * 2}),
)


class Expected:
    """The inputs and the dense results."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.image = torch.randn(2, CHANNELS, 13, 11)
        self._learner = nn.Sequential(Block(3, 18), nn.Conv2d(18, 20, 3, 2, 1), nn.SiLU())
        self._convolution = nn.Conv2d(CHANNELS, 24, 3, padding=1, bias=False)
        self.losses = {name: trained(self.learner(), name, "nchw") for name in OPTIMIZERS}
        with torch.no_grad():
            self.of_ops = {name: op(self.image) for name, op in OPS.items()}
            self.convolved = self._convolution(self.image)

    def learner(self) -> nn.Module:
        return copy.deepcopy(self._learner)

    def convolution(self) -> nn.Conv2d:
        return copy.deepcopy(self._convolution)
