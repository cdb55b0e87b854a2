"""ResNet-18, ResNet-50 v1.5 and ResNeXt-50 32x4d, with torchvision's parameter names.

Source: "Deep Residual Learning for Image Recognition" (arXiv 1512.03385); v1.5 puts the stride of a
bottleneck on its 3x3 convolution instead of its first 1x1. "Aggregated Residual Transformations for
Deep Neural Networks" (arXiv 1611.05431), table 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: [N, C, H, W] -> [N, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = projection(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and a shortcut: [N, C, H, W] -> [N, 4 width, H/stride, W/stride].

    The 3x3 convolution has `groups` groups, and `inner` channels for each 64 of width."""

    expansion = 4
    groups, inner = 1, 64

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        inner = width * self.inner // 64
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=self.groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class GroupedBottleneck(Bottleneck):
    """32 groups of 4 channels in the first stage, of 32 in the last."""

    groups, inner = 32, 128


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The 1x1 convolution of a shortcut whose dims change, or None where they do not."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """Stem, four stages of `depths` blocks each, classifier: [N, 3, H, W] -> [N, classes]."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: tuple[int, int, int, int],
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = stage(block, 64, 64, depths[0], 1)
        self.layer2 = stage(block, 64 * block.expansion, 128, depths[1], 2)
        self.layer3 = stage(block, 128 * block.expansion, 256, depths[2], 2)
        self.layer4 = stage(block, 256 * block.expansion, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def stage(
    block: type[BasicBlock | Bottleneck],
    in_channels: int,
    width: int,
    depth: int,
    stride: int,
) -> nn.Sequential:
    """`depth` blocks, the first of which changes the channels and takes the stride."""
    blocks = [block(in_channels, width, stride)]
    blocks += [block(width * block.expansion, width, 1) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def resnet18() -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2))


def resnet50() -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3))


def resnext50_32x4d() -> ResNet:
    return ResNet(GroupedBottleneck, (3, 4, 6, 3))
