"""SegFormer-B0 for the 150 classes of ADE20K, with its authors' parameter names.

Source: "SegFormer: Simple and Efficient Design for Semantic Segmentation with Transformers" (arXiv
2105.15203), section 3 and table 6."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (channels, heads, reduction of keys and values, kernel and stride of the patches)
STAGES = ((32, 1, 8, 7, 4), (64, 2, 4, 3, 2), (160, 5, 2, 3, 2), (256, 8, 1, 3, 2))
DEPTH = 2
EXPANSION = 4
DECODER = 256
EPSILON = 1e-6


def tokens(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, H W, C]."""
    return x.flatten(2).transpose(1, 2)


def pixels(x: Tensor, height: int, width: int) -> Tensor:
    """[N, H W, C] -> [N, C, H, W]."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], height, width)


class PatchEmbed(nn.Module):
    """Convolution whose patches overlap, and normalization: [N, C, H, W] -> [N, OC, H', W']."""

    def __init__(self, in_channels: int, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        x = self.proj(x)
        return self.norm(tokens(x)), x.shape[2], x.shape[3]


class Attention(nn.Module):
    """Attention to keys and values of `reduction` squared fewer pixels: [N, H W, C], same."""

    def __init__(self, channels: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(channels, channels)
        self.kv = nn.Linear(channels, 2 * channels)
        self.reduces = reduction > 1
        if self.reduces:
            self.sr = nn.Conv2d(channels, channels, reduction, reduction)
            self.norm = nn.LayerNorm(channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        n, length, channels = x.shape
        size = channels // self.heads
        # [N, heads, H W, size]
        query = self.q(x).reshape(n, length, self.heads, size).transpose(1, 2)
        if self.reduces:
            x = self.norm(tokens(self.sr(pixels(x, height, width))))
        # [N, heads, H W / reduction^2, size]
        key, value = self.kv(x).chunk(2, -1)
        key = key.reshape(n, -1, self.heads, size).transpose(1, 2)
        value = value.reshape(n, -1, self.heads, size).transpose(1, 2)
        x = F.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).reshape(n, length, channels))


class DepthwiseConv(nn.Module):
    """Depthwise 3x3 on tokens, which tells them their place: [N, H W, C] -> [N, H W, C]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        return tokens(self.dwconv(pixels(x, height, width)))


class MixFFN(nn.Module):
    """Linear, depthwise 3x3, GELU, linear: [N, H W, C] -> [N, H W, C]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, EXPANSION * channels)
        self.dwconv = DepthwiseConv(EXPANSION * channels)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(EXPANSION * channels, channels)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        return self.fc2(self.act(self.dwconv(self.fc1(x), height, width)))


class Block(nn.Module):
    """Attention and MixFFN, each normalized before and with a shortcut: [N, H W, C], same."""

    def __init__(self, channels: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels, eps=EPSILON)
        self.attn = Attention(channels, heads, reduction)
        self.norm2 = nn.LayerNorm(channels, eps=EPSILON)
        self.mlp = MixFFN(channels)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        x = x + self.attn(self.norm1(x), height, width)
        return x + self.mlp(self.norm2(x), height, width)


class MixTransformer(nn.Module):
    """The encoder: [N, 3, H, W] -> features [N, C, H', W'] at 1/4, 1/8, 1/16 and 1/32."""

    def __init__(self) -> None:
        super().__init__()
        in_channels = 3
        for i, (channels, heads, reduction, kernel, stride) in enumerate(STAGES, start=1):
            blocks = nn.ModuleList(Block(channels, heads, reduction) for _ in range(DEPTH))
            setattr(self, f"patch_embed{i}", PatchEmbed(in_channels, channels, kernel, stride))
            setattr(self, f"block{i}", blocks)
            setattr(self, f"norm{i}", nn.LayerNorm(channels, eps=EPSILON))
            in_channels = channels

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for i in range(1, len(STAGES) + 1):
            x, height, width = getattr(self, f"patch_embed{i}")(x)
            for block in getattr(self, f"block{i}"):
                x = block(x, height, width)
            x = pixels(getattr(self, f"norm{i}")(x), height, width)
            features.append(x)
        return features


class Projection(nn.Module):
    """Linear layer per pixel: [N, C, H, W] -> [N, 256, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, DECODER)

    def forward(self, x: Tensor) -> Tensor:
        return pixels(self.proj(tokens(x)), x.shape[2], x.shape[3])


class Fusion(nn.Module):
    """1x1 convolution, batch normalization, ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(len(STAGES) * DECODER, DECODER, 1, bias=False)
        self.bn = nn.BatchNorm2d(DECODER)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Decoder(nn.Module):
    """All features at 256 channels and 1/4, fused: -> [N, classes, H/4, W/4]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        for i, (channels, *_) in enumerate(STAGES, start=1):
            setattr(self, f"linear_c{i}", Projection(channels))
        self.linear_fuse = Fusion()
        self.dropout = nn.Dropout2d(0.1)
        self.linear_pred = nn.Conv2d(DECODER, classes, 1)

    def forward(self, features: list[Tensor]) -> Tensor:
        size = features[0].shape[2:]
        projected = [self.linear_c1(features[0])]
        for i, feature in enumerate(features[1:], start=2):
            x = getattr(self, f"linear_c{i}")(feature)
            projected.insert(0, F.interpolate(x, size=size, mode="bilinear", align_corners=False))
        return self.linear_pred(self.dropout(self.linear_fuse(torch.cat(projected, 1))))


class SegFormer(nn.Module):
    """Encoder and decoder: [N, 3, H, W] -> logits [N, classes, H/4, W/4]."""

    def __init__(self, classes: int = 150) -> None:
        super().__init__()
        self.backbone = MixTransformer()
        self.decode_head = Decoder(classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode_head(self.backbone(x))


def segformer_b0() -> SegFormer:
    return SegFormer()
