"""ShuffleNetV2 x1.0, with torchvision's parameter names.

Source: "ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture Design" (arXiv
1807.11164), table 5 and figure 3 (c) and (d)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# (channels, blocks); the first block of a stage has stride 2.
STAGES = ((116, 4), (232, 8), (464, 4))


def pointwise(in_channels: int, out_channels: int) -> list[nn.Module]:
    """1x1 convolution, batch normalization, ReLU."""
    return [
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    ]


def depthwise(channels: int, stride: int) -> list[nn.Module]:
    """3x3 depthwise convolution, batch normalization."""
    return [
        nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
    ]


def shuffle(x: Tensor, groups: int) -> Tensor:
    """Channel i of group g becomes channel i * groups + g: [N, C, H, W] -> [N, C, H, W]."""
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleUnit(nn.Module):
    """Two branches, concatenated and shuffled: [N, C, H, W] -> [N, OC, H/stride, W/stride].

    With stride 1, each branch has half of the channels, and the first is the identity."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.splits = stride == 1
        if self.splits:
            self.branch1 = nn.Sequential()
            in_channels = half
        else:
            self.branch1 = nn.Sequential(
                *depthwise(in_channels, stride), *pointwise(in_channels, half)
            )
        self.branch2 = nn.Sequential(
            *pointwise(in_channels, half), *depthwise(half, stride), *pointwise(half, half)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1) if self.splits else (x, x)
        return shuffle(torch.cat((self.branch1(first), self.branch2(second)), 1), 2)


class ShuffleNetV2(nn.Module):
    """Stem, three stages of units, head, classifier: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = 24
        self.conv1 = nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for i, (width, depth) in enumerate(STAGES, start=2):
            units = [ShuffleUnit(channels, width, 2)]
            units += [ShuffleUnit(width, width, 1) for _ in range(depth - 1)]
            setattr(self, f"stage{i}", nn.Sequential(*units))
            channels = width
        self.conv5 = nn.Sequential(*pointwise(channels, 1024))
        self.fc = nn.Linear(1024, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.conv1(x))
        x = self.conv5(self.stage4(self.stage3(self.stage2(x))))
        return self.fc(x.mean((2, 3)))


def shufflenet_v2() -> ShuffleNetV2:
    return ShuffleNetV2()
