"""Small nets of random weights, each around one kind of layer: an activation, a norm, a way to
enlarge images, a block. What a kind costs beside other engines shows here, where models of many
layers hide it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Call(nn.Module):
    """A function of a layer and its input."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


def convolutions(act: Callable[[int], nn.Module], norm: Any = nn.BatchNorm2d, kernel: int = 3):
    """[1, 3, 224, 224] -> [1, 128, 28, 28]"""
    layers: list[nn.Module] = []
    channels = 3
    for i, outputs in enumerate((32, 64, 128, 128)):
        stride = 2 if i < 3 else 1
        layers.append(nn.Conv2d(channels, outputs, kernel, stride, kernel // 2))
        layers += [norm(outputs)] if norm else []
        layers.append(act(outputs))
        channels = outputs
    return nn.Sequential(*layers), torch.randn(1, 3, 224, 224)


def enlarging(layer: Callable[[int, int], nn.Module]):
    """[1, 3, 128, 128] -> [1, 128, 32, 32], and back."""
    layers: list[nn.Module] = [nn.Conv2d(3, 128, 3, 4, 1), nn.ReLU()]
    for inputs, outputs in ((128, 64), (64, 32)):
        layers += [layer(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 3, 3, 1, 1), nn.Tanh()), torch.randn(1, 3, 128, 128)


def resized(mode: str) -> Callable[[int, int], nn.Module]:
    return lambda i, o: nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), conv(i, o))


def conv(inputs: int, outputs: int, kernel: Any = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding="same", **more)


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def blocks(block: Callable[[int], nn.Module], size: int = 224, count: int = 4):
    """`count` residual blocks of 96 channels at a quarter of the size."""
    stem = nn.Conv2d(3, 96, 4, 4)
    return nn.Sequential(stem, *(Residual(block(96)) for _ in range(count))), torch.randn(
        1, 3, size, size
    )


def inverted(act: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda c: nn.Sequential(
        nn.Conv2d(c, 2 * c, 1),
        act(2 * c),
        conv(2 * c, 2 * c, groups=2 * c),
        act(2 * c),
        nn.Conv2d(2 * c, c, 1),
    )


def large_depthwise(kernel: int) -> Callable[[int], nn.Module]:
    return lambda c: nn.Sequential(conv(c, c, kernel, groups=c), nn.GELU(), nn.Conv2d(c, c, 1))


def norm_of_channels(channels: int) -> nn.Module:
    norm = nn.LayerNorm(channels)
    return Call(lambda x, norm: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm)


def response_norm(x: Tensor) -> Tensor:
    size = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
    return x * (size / (size.mean(1, keepdim=True) + 1e-6)) + x


def attention_of_channels(x: Tensor, layer: nn.Module, small: nn.Module, around: nn.Module):
    x = layer(x)
    gate = small(F.adaptive_avg_pool2d(x, 1)) + small(F.adaptive_max_pool2d(x, 1))
    x = x * torch.sigmoid(gate)
    pooled = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    return x * torch.sigmoid(around(pooled))


def cbam(c: int) -> nn.Module:
    small = nn.Sequential(nn.Conv2d(c, c // 8, 1), nn.ReLU(), nn.Conv2d(c // 8, c, 1))
    return Call(attention_of_channels, conv(c, c), small, conv(2, 1, 7))


def efficient_gate(x: Tensor, layer: nn.Module, along: nn.Module) -> Tensor:
    x = layer(x)
    gate = along(x.mean((2, 3))[:, None]).sigmoid().transpose(1, 2)[..., None]
    return x * gate


def non_local(x: Tensor, query: nn.Module, key: nn.Module, value: nn.Module, out: nn.Module):
    q, k, v = (layer(x).flatten(2) for layer in (query, key, value))
    weights = torch.softmax(q.transpose(1, 2) @ k, -1)
    return out((v @ weights.transpose(1, 2)).view(x.shape[0], -1, *x.shape[2:]))


def gated_waves(x: Tensor, first: nn.Module, *layers: nn.Module) -> Tensor:
    x = first(x)
    for layer, back in zip(layers[:-1:2], layers[1::2], strict=False):
        tanh, gate = layer(F.pad(x, (layer.dilation[0], 0))).chunk(2, 1)
        x = x + back(torch.tanh(tanh) * torch.sigmoid(gate))
    return layers[-1](F.relu(x))


def wavenet():
    layers: list[nn.Module] = [nn.Conv1d(1, 32, 1)]
    for i in range(16):
        layers += [nn.Conv1d(32, 64, 2, dilation=2 ** (i % 8)), nn.Conv1d(32, 32, 1)]
    return Call(gated_waves, *layers, nn.Conv1d(32, 256, 1)), torch.randn(1, 1, 8000)


def crnn():
    layers: list[nn.Module] = []
    for inputs, outputs, pool in ((1, 64, 2), (64, 128, 2), (128, 256, (8, 1))):
        layers += [conv(inputs, outputs), nn.ReLU(), nn.MaxPool2d(pool)]
    lstm = nn.LSTM(256, 128, bidirectional=True, batch_first=True)
    net = Call(
        lambda x, convs, lstm, out: out(lstm(convs(x).squeeze(2).transpose(1, 2))[0]),
        nn.Sequential(*layers),
        lstm,
        nn.Linear(256, 40),
    )
    return net, torch.randn(1, 1, 32, 256)


def gru():
    """[1, 100, 80] -> [1, 100, 40], as speech is read."""
    layers = nn.GRU(80, 256, num_layers=3, batch_first=True)
    net = Call(lambda x, layers, out: out(layers(x)[0]), layers, nn.Linear(256, 40))
    return net, torch.randn(1, 100, 80)


def mixer():
    def mixed(x: Tensor, norm: nn.Module, tokens: nn.Module, channels: nn.Module) -> Tensor:
        x = x + tokens(norm(x).transpose(1, 2)).transpose(1, 2)
        return x + channels(x)

    def two(size: int, hidden: int) -> list[nn.Module]:
        return [nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size)]

    layers = [
        Call(
            mixed,
            nn.LayerNorm(256),
            nn.Sequential(*two(196, 98)),
            nn.Sequential(nn.LayerNorm(256), *two(256, 1024)),
        )
        for _ in range(4)
    ]
    patches = Call(lambda x, conv: conv(x).flatten(2).transpose(1, 2), nn.Conv2d(3, 256, 16, 16))
    return nn.Sequential(patches, *layers), torch.randn(1, 3, 224, 224)


def encoder():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 4), torch.randn(1, 128, 256)


def temporal():
    layers: list[nn.Module] = []
    for d in (1, 2, 4, 8):
        layers += [nn.Conv1d(64, 64, 3, padding=d, dilation=d), nn.BatchNorm1d(64), nn.ELU()]
    return nn.Sequential(*layers), torch.randn(1, 64, 2000)


def volumes():
    net = nn.Sequential(
        *(nn.Conv3d(1, 16, 5, padding=2), nn.PReLU(16), nn.Conv3d(16, 32, 2, 2), nn.PReLU(32)),
        *(nn.Conv3d(32, 32, 5, padding=2), nn.PReLU(32), nn.ConvTranspose3d(32, 16, 2, 2)),
    )
    return net, torch.randn(1, 1, 32, 64, 64)


def sines():
    def layer(inputs: int) -> nn.Module:
        return Call(lambda x, conv: torch.sin(30 * conv(x)), nn.Conv2d(inputs, 128, 1))

    return nn.Sequential(layer(2), layer(128), nn.Conv2d(128, 3, 1)), torch.randn(1, 2, 96, 96)


def powers():
    net, x = convolutions(lambda c: nn.ReLU())
    mean = Call(lambda x: F.avg_pool2d(x.clamp(min=1e-6).pow(3), 28).pow(1 / 3))
    return nn.Sequential(net, mean), x


def perceptron():
    net = nn.Sequential(
        *(nn.Linear(512, 1024), nn.ELU(), nn.Linear(1024, 1024), nn.PReLU()),
        *(nn.Linear(1024, 512), nn.Sigmoid()),
    )
    return net, torch.randn(64, 512)


# By the name of a torch.nn module, which all layers of convolutions() have.
ACTIVATIONS = (
    "ReLU LeakyReLU ELU SELU CELU GELU SiLU Mish Hardswish Hardsigmoid Softplus Softsign Sigmoid "
    "Tanh Tanhshrink LogSigmoid"
).split()


def plain(name: str) -> Callable[[int], nn.Module]:
    return lambda c: getattr(nn, name)()


KINDS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    **{name: (lambda name=name: convolutions(plain(name))) for name in ACTIVATIONS},
    "PReLU": lambda: convolutions(nn.PReLU),
    "no norm": lambda: convolutions(plain("ReLU"), None),
    "GroupNorm": lambda: convolutions(plain("ReLU"), lambda c: nn.GroupNorm(8, c)),
    "InstanceNorm": lambda: convolutions(
        plain("ReLU"), lambda c: nn.InstanceNorm2d(c, affine=True)
    ),
    "LayerNorm of channels": lambda: convolutions(plain("ReLU"), norm_of_channels),
    "LocalResponseNorm": lambda: convolutions(plain("ReLU"), lambda c: nn.LocalResponseNorm(5)),
    "response norm": lambda: convolutions(plain("ReLU"), lambda c: Call(response_norm)),
    "5x5": lambda: convolutions(plain("ReLU"), kernel=5),
    "7x7": lambda: convolutions(plain("ReLU"), kernel=7),
    "transposed 2x2": lambda: enlarging(lambda i, o: nn.ConvTranspose2d(i, o, 2, 2)),
    "transposed 3x3": lambda: enlarging(lambda i, o: nn.ConvTranspose2d(i, o, 3, 2, 1, 1)),
    "transposed 4x4": lambda: enlarging(lambda i, o: nn.ConvTranspose2d(i, o, 4, 2, 1)),
    "pixel shuffle": lambda: enlarging(
        lambda i, o: nn.Sequential(conv(i, 4 * o), nn.PixelShuffle(2))
    ),
    "nearest": lambda: enlarging(resized("nearest")),
    "bilinear": lambda: enlarging(resized("bilinear")),
    "bicubic": lambda: enlarging(resized("bicubic")),
    "depthwise 13x13": lambda: blocks(large_depthwise(13)),
    "depthwise 31x31": lambda: blocks(large_depthwise(31)),
    "dilated": lambda: blocks(lambda c: nn.Sequential(conv(c, c, dilation=4), nn.ReLU())),
    "four groups": lambda: blocks(
        lambda c: nn.Sequential(conv(c, c, groups=4), nn.ReLU(), nn.Conv2d(c, c, 1))
    ),
    "1x7 and 7x1": lambda: blocks(
        lambda c: nn.Sequential(conv(c, c, (1, 7)), nn.ReLU(), conv(c, c, (7, 1)), nn.ReLU())
    ),
    "inverted, PReLU": lambda: blocks(inverted(nn.PReLU)),
    "norms before": lambda: blocks(
        lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), conv(c, c), nn.BatchNorm2d(c))
    ),
    "CBAM": lambda: blocks(cbam),
    "ECA": lambda: blocks(
        lambda c: Call(efficient_gate, conv(c, c), nn.Conv1d(1, 1, 3, padding=1, bias=False))
    ),
    "non-local": lambda: blocks(
        lambda c: Call(
            non_local, *(nn.Conv2d(c, c // 2, 1) for _ in range(3)), nn.Conv2d(c // 2, c, 1)
        ),
        size=112,
        count=2,
    ),
    "WaveNet": wavenet,
    "dilated 1-D": temporal,
    "CRNN": crnn,
    "GRU": gru,
    "MLP-Mixer": mixer,
    "transformer": encoder,
    "perceptron": perceptron,
    "3-D, PReLU": volumes,
    "sines": sines,
    "power mean": powers,
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A net in eval mode, whose batch norms have seen other numbers than 0 and 1, and its input."""
    torch.manual_seed(0)
    net, x = KINDS[name]()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_var is not None and module.running_mean is not None
            module.running_var.uniform_(0.5, 2)
            module.running_mean.normal_()
    return net.eval(), x
