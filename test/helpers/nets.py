"""Small networks that several test modules run."""

import torch
from torch import nn
from torch.nn import functional as F


class Op(nn.Module):
    """A function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Between(nn.Module):
    """A convolution, an op and a convolution."""

    def __init__(self, op, channels, rank=2, out=None):
        super().__init__()
        Conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
        self.first = Conv(5, channels, 3, padding=1)
        self.op = op
        self.last = Conv(out or channels, 7, 3, padding=1)

    def forward(self, x):
        return self.last(F.relu(self.op(self.first(x))))


class Block(nn.Module):
    """A convolution, a batch norm and a ReLU."""

    def __init__(self, inputs, channels):
        super().__init__()
        self.conv = nn.Conv2d(inputs, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))
