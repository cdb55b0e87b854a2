"""U-Net with 32 channels at full resolution, with the parameter names of the brain-segmentation
checkpoint that PyTorch Hub lists.

Source: "U-Net: Convolutional Networks for Biomedical Image Segmentation" (arXiv 1505.04597), with
padded convolutions and batch normalization."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


def double_conv(name: str, in_channels: int, width: int) -> nn.Sequential:
    """Twice 3x3 convolution, batch normalization, ReLU: [N, C, H, W] -> [N, width, H, W]."""
    return nn.Sequential(
        OrderedDict(
            {
                f"{name}conv1": nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
                f"{name}norm1": nn.BatchNorm2d(width),
                f"{name}relu1": nn.ReLU(inplace=True),
                f"{name}conv2": nn.Conv2d(width, width, 3, padding=1, bias=False),
                f"{name}norm2": nn.BatchNorm2d(width),
                f"{name}relu2": nn.ReLU(inplace=True),
            }
        )
    )


class UNet(nn.Module):
    """Four levels down, four up, skips by concatenation: [N, 3, H, W] -> [N, 1, H, W] in (0, 1).

    H and W are multiples of 16."""

    def __init__(self, in_channels: int = 3, out_channels: int = 1, width: int = 32) -> None:
        super().__init__()
        self.encoder1 = double_conv("enc1", in_channels, width)
        self.pool1 = nn.MaxPool2d(2, 2)
        self.encoder2 = double_conv("enc2", width, width * 2)
        self.pool2 = nn.MaxPool2d(2, 2)
        self.encoder3 = double_conv("enc3", width * 2, width * 4)
        self.pool3 = nn.MaxPool2d(2, 2)
        self.encoder4 = double_conv("enc4", width * 4, width * 8)
        self.pool4 = nn.MaxPool2d(2, 2)
        self.bottleneck = double_conv("bottleneck", width * 8, width * 16)
        self.upconv4 = nn.ConvTranspose2d(width * 16, width * 8, 2, 2)
        self.decoder4 = double_conv("dec4", width * 16, width * 8)
        self.upconv3 = nn.ConvTranspose2d(width * 8, width * 4, 2, 2)
        self.decoder3 = double_conv("dec3", width * 8, width * 4)
        self.upconv2 = nn.ConvTranspose2d(width * 4, width * 2, 2, 2)
        self.decoder2 = double_conv("dec2", width * 4, width * 2)
        self.upconv1 = nn.ConvTranspose2d(width * 2, width, 2, 2)
        self.decoder1 = double_conv("dec1", width * 2, width)
        self.conv = nn.Conv2d(width, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.encoder1(x)
        skip2 = self.encoder2(self.pool1(skip1))
        skip3 = self.encoder3(self.pool2(skip2))
        skip4 = self.encoder4(self.pool3(skip3))
        x = self.bottleneck(self.pool4(skip4))
        x = self.decoder4(torch.cat((self.upconv4(x), skip4), 1))
        x = self.decoder3(torch.cat((self.upconv3(x), skip3), 1))
        x = self.decoder2(torch.cat((self.upconv2(x), skip2), 1))
        x = self.decoder1(torch.cat((self.upconv1(x), skip1), 1))
        return torch.sigmoid(self.conv(x))


def unet() -> UNet:
    return UNet()
