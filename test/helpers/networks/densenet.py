"""DenseNet-121, with torchvision's parameter names.

Source: "Densely Connected Convolutional Networks" (arXiv 1608.06993), table 1."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

GROWTH = 32
BOTTLENECK = 4 * GROWTH
DEPTHS = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """BN, ReLU, 1x1, BN, ReLU, 3x3 on all earlier features: [N, C, H, W] -> [N, 32, H, W]."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, BOTTLENECK, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(BOTTLENECK, GROWTH, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseBlock(nn.ModuleDict):
    """`depth` dense layers: [N, C, H, W] -> [N, C + 32 depth, H, W]."""

    def __init__(self, in_channels: int, depth: int) -> None:
        super().__init__()
        for i in range(depth):
            self[f"denselayer{i + 1}"] = DenseLayer(in_channels + i * GROWTH)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def transition(in_channels: int) -> nn.Sequential:
    """Halves the channels and the spatial sizes."""
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(in_channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(in_channels, in_channels // 2, 1, bias=False),
            pool=nn.AvgPool2d(2, 2),
        )
    )


class DenseNet(nn.Module):
    """Stem, four dense blocks with transitions, classifier: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = 64
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            norm0=nn.BatchNorm2d(channels),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        for i, depth in enumerate(DEPTHS, start=1):
            layers[f"denseblock{i}"] = DenseBlock(channels, depth)
            channels += depth * GROWTH
            if i < len(DEPTHS):
                layers[f"transition{i}"] = transition(channels)
                channels //= 2
        layers["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.features(x), inplace=True)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.classifier(torch.flatten(x, 1))


def densenet121() -> DenseNet:
    return DenseNet()
