"""3-D U-Net for volumes, at half the published width.

Source: "3D U-Net: Learning Dense Volumetric Segmentation from Sparse Annotation" (arXiv
1606.06650), figure 2, with padded convolutions. Its first convolution has 32 channels, here 16."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def double_conv(in_channels: int, middle: int, out_channels: int) -> nn.Sequential:
    """Twice 3x3x3 convolution, batch normalization, ReLU."""
    layers: list[nn.Module] = []
    for before, after in ((in_channels, middle), (middle, out_channels)):
        layers += [
            nn.Conv3d(before, after, 3, padding=1),
            nn.BatchNorm3d(after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet3d(nn.Module):
    """Three levels down, three up, skips by concatenation: [N, C, D, H, W] -> logits, same extent.

    width: channels of the first convolution, 32 as published. D, H and W are multiples of 8."""

    def __init__(self, in_channels: int = 3, out_channels: int = 3, width: int = 32) -> None:
        super().__init__()
        self.encoder1 = double_conv(in_channels, width, 2 * width)
        self.encoder2 = double_conv(2 * width, 2 * width, 4 * width)
        self.encoder3 = double_conv(4 * width, 4 * width, 8 * width)
        self.bottleneck = double_conv(8 * width, 8 * width, 16 * width)
        self.pool = nn.MaxPool3d(2, 2)
        self.upconv3 = nn.ConvTranspose3d(16 * width, 16 * width, 2, 2, bias=False)
        self.decoder3 = double_conv(24 * width, 8 * width, 8 * width)
        self.upconv2 = nn.ConvTranspose3d(8 * width, 8 * width, 2, 2, bias=False)
        self.decoder2 = double_conv(12 * width, 4 * width, 4 * width)
        self.upconv1 = nn.ConvTranspose3d(4 * width, 4 * width, 2, 2, bias=False)
        self.decoder1 = double_conv(6 * width, 2 * width, 2 * width)
        self.conv = nn.Conv3d(2 * width, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.encoder1(x)
        skip2 = self.encoder2(self.pool(skip1))
        skip3 = self.encoder3(self.pool(skip2))
        x = self.bottleneck(self.pool(skip3))
        x = self.decoder3(torch.cat((self.upconv3(x), skip3), 1))
        x = self.decoder2(torch.cat((self.upconv2(x), skip2), 1))
        x = self.decoder1(torch.cat((self.upconv1(x), skip1), 1))
        return self.conv(x)


def unet3d() -> UNet3d:
    return UNet3d(1, 2, width=16)
