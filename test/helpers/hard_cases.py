"""Models with one layer each that is hard to keep blocked. Each is a factory without arguments, as
`python -m torch_blocked explain` takes it; CASES has their example inputs."""

import warnings

import torch
from torch import nn

import torch_blocked

torch.library.define("torch_blocked_test::halved", "(Tensor x) -> Tensor")


@torch.library.impl("torch_blocked_test::halved", "CPU")
def _(x):
    return x / 2


@torch.library.register_fake("torch_blocked_test::halved")
def _(x):
    return torch.empty_like(x)


class Between(nn.Module):
    """A convolution, `layer`, and another convolution."""

    def __init__(self, layer, channels=16, inputs=16, outputs=None):
        super().__init__()
        self.before = nn.Conv2d(inputs, channels, 3, padding=1)
        self.layer = layer
        self.after = nn.Conv2d(outputs or channels, 16, 3, padding=1)
        self.eval()

    def forward(self, x):
        return self.after(self.layer(self.before(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def grouped4():
    return Between(nn.Conv2d(16, 16, 3, padding=1, groups=4))


def dilated():
    return Between(nn.Conv2d(16, 16, 3, padding=2, dilation=2))


def three_channels():
    return Between(nn.ReLU(), inputs=3)


def transposed():
    return Between(nn.ConvTranspose2d(16, 16, 2, stride=2))


def permuted():
    return Between(Function(lambda x: x.permute(0, 1, 3, 2).contiguous()))


def custom_op():
    return Between(Function(torch.ops.torch_blocked_test.halved))


def complex_numbers():
    return Between(Function(lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 2).real))


class ComplexInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.after = nn.Conv2d(16, 16, 3, padding=1)
        self.eval()

    def forward(self, x):
        return self.after((x * 2).real)


def seventeen():
    return Between(nn.Conv2d(17, 17, 3, padding=1), channels=17)


def control_flow():
    class Branches(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 1e30 else x.exp()

    return Between(Branches())


def shared():
    conv = nn.Conv2d(16, 16, 3, padding=1)
    return Between(nn.Sequential(conv, nn.Sigmoid(), conv))


def sliced():
    return Between(Function(lambda x: x[:, 3:10].contiguous()), outputs=7)


def int8():
    def through_int8(x):
        return (x * 20).round().clamp(-128, 127).to(torch.int8).float() * 0.05

    return Between(Function(through_int8))


def quantized():
    def through_qint8(x):
        return torch.relu(torch.quantize_per_tensor(x, 0.05, 0, torch.qint8)).dequantize()

    return Between(Function(through_qint8))


def sorted_channels():
    return Between(Function(lambda x: x.sort(dim=1).values))


def through_nhwc():
    def flipped(x):
        return x.permute(0, 2, 3, 1).flip(1).permute(0, 3, 1, 2)

    return Between(Function(flipped))


def classifier():
    layers = nn.Sequential(nn.Flatten(), nn.Linear(16 * 144, 16), nn.Unflatten(1, (16, 1, 1)))
    return Between(layers)


def image(n=1, channels=16):
    return torch.randn(n, channels, 12, 12, generator=torch.Generator().manual_seed(0))


# name: (factory, input)
CASES = {
    "grouped4": (grouped4, image()),
    "dilated": (dilated, image()),
    "three_channels": (three_channels, image(channels=3)),
    "transposed": (transposed, image()),
    "permuted": (permuted, image()),
    "custom_op": (custom_op, image()),
    "complex_numbers": (complex_numbers, image()),
    "complex_input": (ComplexInput, image().to(torch.complex64)),
    "seventeen": (seventeen, image()),
    "empty_batch": (dilated, image(0)),
    "control_flow": (control_flow, image()),
    "shared": (shared, image()),
    "channels_last": (dilated, image().to(memory_format=torch.channels_last)),
    "sliced": (sliced, image()),
    "int8": (int8, image()),
    "quantized": (quantized, image()),
    "sorted_channels": (sorted_channels, image()),
    "through_nhwc": (through_nhwc, image()),
    "classifier": (classifier, image()),
}


def explained(name):
    """What explain() finds in a case, without tuning: by estimates a plan is the same on every
    run."""
    factory, x = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch_blocked.explain(factory(), (x,), tune=False)
