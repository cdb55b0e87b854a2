"""Models of other packages for peers.py (timed.txt): one of each kind that people run, as its
authors wrote it.

Their packages are those of third_party.txt. Weights are what the package itself draws, after a
fixed seed, but weights that it begins with zeros are drawn, and the statistics of batch norms are
those of one random batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from torch_blocked.bench.networks.weights import set_statistics
from zoo.row import call, cells, declare_torchvision_ops, dims

SEED = 0
IMAGES = 8  # of two a head's batch norm would see two numbers a channel, some of them equal


@dataclass(frozen=True)
class Timed:
    """A model of another package. input_dims: [C, *spatial] of one input."""

    build: Callable[[], nn.Module]
    input_dims: tuple[int, ...]
    package: str  # on PyPI
    note: str

    def model(self) -> nn.Module:
        """In evaluation mode, float32."""
        declare_torchvision_ops()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(SEED)
            model = self.build().eval()
            fill_zeros(model)
            set_statistics(model, torch.randn(IMAGES, *self.input_dims))
        return model


def fill_zeros(model: nn.Module) -> None:
    """Draws the weights that are all zeros, as timm's at the end of residual branches: training
    would not leave them so, and a converter that drops x * 0 drops the branch."""
    for name, parameter in model.named_parameters():
        if not name.endswith(("bias", "biases")) and not parameter.any():
            parameter.uniform_(0.5, 1.5)


TIMED = {
    name: Timed(call(text), dims(size), package, note)
    for name, package, size, note, text in cells(Path(__file__).with_name("timed.txt"))
}
