"""MobileNetV3-Large and EfficientNet-B0: inverted residuals with squeeze and excitation, with
torchvision's parameter names.

Source: "Searching for MobileNetV3" (arXiv 1905.02244), table 1; "EfficientNet" (arXiv 1905.11946),
table 1; "Squeeze-and-Excitation Networks" (arXiv 1709.01507)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]

# (kernel, hidden channels, channels, squeeze and excitation, hard swish, stride)
MOBILENET_V3_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)

# (expansion, kernel, stride of the first block, channels, blocks)
EFFICIENTNET_B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class SqueezeExcitation(nn.Module):
    """x times a gate for each channel, made from the means of all: [N, C, H, W] -> the same."""

    def __init__(
        self, channels: int, squeezed: int, activation: type[nn.Module], gate: type[nn.Module]
    ) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation()
        self.scale_activation = gate()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


def convolution(
    in_channels: int,
    out_channels: int,
    kernel: int,
    norm: Norm,
    activation: type[nn.Module] | None,
    stride: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    """Convolution with "same" padding, batch normalization, activation."""
    layers = [
        nn.Conv2d(
            in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False
        ),
        norm(out_channels),
    ]
    if activation:
        layers.append(activation())
    return nn.Sequential(*layers)


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise, squeeze and excitation, project 1x1: [N, C, H, W] ->
    [N, OC, ceil(H / stride), ceil(W / stride)]."""

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        kernel: int,
        stride: int,
        norm: Norm,
        activation: type[nn.Module],
        excitation: SqueezeExcitation | None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if hidden != in_channels:
            layers.append(convolution(in_channels, hidden, 1, norm, activation))
        layers.append(convolution(hidden, hidden, kernel, norm, activation, stride, hidden))
        if excitation:
            layers.append(excitation)
        layers.append(convolution(hidden, out_channels, 1, norm, None))
        self.block = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.has_shortcut else self.block(x)


class Classifier(nn.Module):
    """Features, their means, linear layers: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def whole_eights(channels: float) -> int:
    """The multiple of 8 next to `channels`, not below 0.9 of it."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def mobilenet_v3_large(classes: int = 1000) -> Classifier:
    norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)
    layers: list[nn.Module] = [convolution(3, 16, 3, norm, nn.Hardswish, 2)]
    channels = 16
    for kernel, hidden, width, excites, swishes, stride in MOBILENET_V3_LARGE:
        excitation = (
            SqueezeExcitation(hidden, whole_eights(hidden // 4), nn.ReLU, nn.Hardsigmoid)
            if excites
            else None
        )
        activation = nn.Hardswish if swishes else nn.ReLU
        layers.append(
            InvertedResidual(channels, hidden, width, kernel, stride, norm, activation, excitation)
        )
        channels = width
    layers.append(convolution(channels, 6 * channels, 1, norm, nn.Hardswish))
    head = (
        nn.Linear(6 * channels, 1280),
        nn.Hardswish(),
        nn.Dropout(0.2),
        nn.Linear(1280, classes),
    )
    return Classifier(nn.Sequential(*layers), nn.Sequential(*head))


def efficientnet_b0(classes: int = 1000) -> Classifier:
    norm = nn.BatchNorm2d
    layers: list[nn.Module] = [convolution(3, 32, 3, norm, nn.SiLU, 2)]
    channels = 32
    for expansion, kernel, stride, width, blocks in EFFICIENTNET_B0:
        stage = []
        for i in range(blocks):
            hidden = channels * expansion
            excitation = SqueezeExcitation(hidden, channels // 4, nn.SiLU, nn.Sigmoid)
            step = stride if i == 0 else 1
            stage.append(
                InvertedResidual(channels, hidden, width, kernel, step, norm, nn.SiLU, excitation)
            )
            channels = width
        layers.append(nn.Sequential(*stage))
    layers.append(convolution(channels, 4 * channels, 1, norm, nn.SiLU))
    head = (nn.Dropout(0.2), nn.Linear(4 * channels, classes))
    return Classifier(nn.Sequential(*layers), nn.Sequential(*head))
