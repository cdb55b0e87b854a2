"""ConvNeXt-T, with torchvision's parameter names.

Source: "A ConvNet for the 2020s" (arXiv 2201.03545), figure 4 and table 9."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# (channels, blocks)
STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))
EPSILON = 1e-6


class Permute(nn.Module):
    """The dims of the input in another order."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class LayerNorm2d(nn.LayerNorm):
    """Layer normalization over the channels of each pixel: [N, C, H, W] -> [N, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise 7x7, then normalization and two linear layers per pixel, scaled, and a shortcut:
    [N, C, H, W] -> [N, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(channels, eps=EPSILON),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            Permute(0, 3, 1, 2),
        )
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.block(x)


class ConvNeXt(nn.Module):
    """Four stages, each after a convolution whose patches do not overlap, and a classifier:
    [N, 3, H, W] -> [N, classes]."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = STAGES[0][0]
        layers = [nn.Sequential(nn.Conv2d(3, channels, 4, 4), LayerNorm2d(channels, eps=EPSILON))]
        for width, depth in STAGES:
            if width != channels:
                norm = LayerNorm2d(channels, eps=EPSILON)
                layers.append(nn.Sequential(norm, nn.Conv2d(channels, width, 2, 2)))
            layers.append(nn.Sequential(*(Block(width) for _ in range(depth))))
            channels = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            LayerNorm2d(channels, eps=EPSILON), nn.Flatten(1), nn.Linear(channels, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)))


def convnext_tiny() -> ConvNeXt:
    return ConvNeXt()
