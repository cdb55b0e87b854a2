"""The generator of HiFi-GAN V2, which turns mel spectrograms into speech, with its authors'
parameter names after the removal of weight norms.

Source: "HiFi-GAN: Generative Adversarial Networks for Efficient and High Fidelity Speech Synthesis"
(arXiv 2010.05646), section 2.2 and table 5."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MELS = 80
CHANNELS = 128
# (factor, kernel) of the four upsamplings: 256 samples for each frame.
UPSAMPLINGS = ((8, 16), (8, 16), (2, 4), (2, 4))
KERNELS = (3, 7, 11)
DILATIONS = (1, 3, 5)
SLOPE = 0.1


def same_conv(channels: int, kernel: int, dilation: int) -> nn.Conv1d:
    """Convolution that keeps the length."""
    padding = dilation * (kernel - 1) // 2
    return nn.Conv1d(channels, channels, kernel, padding=padding, dilation=dilation)


class ResBlock(nn.Module):
    """Three times a dilated and a plain convolution with a shortcut: [N, C, L] -> [N, C, L]."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(same_conv(channels, kernel, d) for d in DILATIONS)
        self.convs2 = nn.ModuleList(same_conv(channels, kernel, 1) for _ in DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            out = dilated(F.leaky_relu(x, SLOPE))
            x = plain(F.leaky_relu(out, SLOPE)) + x
        return x


class Generator(nn.Module):
    """Spectrogram to waveform: [N, 80, frames] -> [N, 1, 256 frames] in (-1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        channels = CHANNELS
        self.conv_pre = nn.Conv1d(MELS, channels, 7, padding=3)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for factor, kernel in UPSAMPLINGS:
            self.ups.append(
                nn.ConvTranspose1d(channels, channels // 2, kernel, factor, (kernel - factor) // 2)
            )
            channels //= 2
            self.resblocks.extend(ResBlock(channels, kernel) for kernel in KERNELS)
        self.conv_post = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        count = len(KERNELS)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, SLOPE))
            blocks = self.resblocks[i * count : (i + 1) * count]
            total = blocks[0](x)
            for block in blocks[1:]:
                total = total + block(x)
            x = total / count
        return torch.tanh(self.conv_post(F.leaky_relu(x)))


def hifigan() -> Generator:
    return Generator()
