"""What runs while requests for memory fail. Each scenario prepares, and returns what is run: it
computes all anew and gives tensors and texts that are the same each time."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked import Descriptor

Values = list[Tensor | str]
Run = Callable[[], Values]

LARGE = 4, 24, 64, 64  # from the pool of large blocks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 17, 3, padding=1), nn.BatchNorm2d(17), nn.ReLU())
        self.grouped = nn.Conv2d(17, 17, 3, padding=1, groups=17)
        self.one = nn.Conv2d(17, 17, 1)
        self.last = nn.Linear(17, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = F.max_pool2d(y + F.silu(self.one(self.grouped(y))), 2)
        return self.last(y.mean((2, 3)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def image(size: int = 16) -> Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(size))


def formats() -> Run:
    x, large = torch.randn(2, 11, 9, 9), torch.randn(LARGE)

    def run() -> Values:
        y, z = tb.to_blocked(x, "nChw8c"), tb.to_blocked(large)
        again = tb.to_format(y, "nChw16c")
        return [tb.to_dense(again), (z + z).to_dense(), str(tb.format_of(again)), y[:, 2:9].clone()]

    return run


def convolution() -> Run:
    x = torch.randn(1, 17, 12, 12)
    layers = [
        nn.Conv2d(17, 20, 3, padding=1),
        nn.Conv2d(17, 17, 5, groups=17),
        nn.Conv2d(17, 20, 1),
        nn.Conv2d(17, 20, 3, stride=2),
        nn.ConvTranspose2d(17, 20, 2, stride=2),
    ]

    def run() -> Values:
        tb.clear_packed_weights()
        with torch.no_grad():
            return [layer(x.to_blocked()).to_dense() for layer in layers]

    return run


def layers() -> Run:
    x = torch.randn(2, 20, 12, 12)
    norm, group = nn.BatchNorm2d(20).eval(), nn.GroupNorm(4, 20)

    def run() -> Values:
        y = x.to_blocked()
        with torch.no_grad():
            results = [
                norm(y),
                group(y),
                F.max_pool2d(y, 2),
                F.avg_pool2d(y, 3),
                F.adaptive_avg_pool2d(y, 1),
                F.interpolate(y, scale_factor=2),
                F.interpolate(y, size=(7, 9), mode="bilinear"),
                F.softmax(y, 1),
                F.local_response_norm(y, 5),
                F.pixel_shuffle(y, 2),
                torch.cat([y, y], 1),
                y + y,
                y[:, 3:11],
                y.sum(1),
                y.argmax(1),
            ]
            return [each.to_dense() if tb.is_blocked(each) else each for each in results]

    return run


def training() -> Run:
    x = image()
    model = net().train()
    first = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> Values:
        model.load_state_dict(first)
        model.zero_grad()
        loss = model(x.to_blocked()).to_dense().square().sum()
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters())]

    return run


@torch.no_grad()
def optimized() -> Run:
    model, x, other = net(), image(), image(22)

    @torch.no_grad()
    def run() -> Values:
        fast = tb.optimize(model, x, tune=False, verify=False)
        fast.plan()
        return [fast(x), fast(other)]

    return run


@torch.no_grad()
def tuned() -> Run:
    model, x = net(), image(12)

    @torch.no_grad()
    def run() -> Values:
        return [tb.optimize(model, x)(x)]

    return run


@torch.no_grad()
def saved() -> Run:
    x = image()
    fast = tb.optimize(net(), x, tune=False, verify=False)

    @torch.no_grad()
    def run() -> Values:
        file = io.BytesIO()
        fast.save(file)
        file.seek(0)
        return [tb.load(file)(x)]

    return run


@torch.no_grad()
def released() -> Run:
    x = image()
    file = io.BytesIO()
    tb.optimize(net(), x, tune=False, verify=False).save(file)

    @torch.no_grad()
    def run() -> Values:
        file.seek(0)
        fast = tb.load(file)
        fast.release()
        return [fast(x)]

    return run


@torch.no_grad()
def quantized() -> Run:
    x, other = image(), image(22)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        tb.optimize(tb.quantize(net(), [x, x + 1]), x, tune=False, verify=False).save(file)

    @torch.no_grad()
    def run() -> Values:
        file.seek(0)
        fast = tb.load(file)
        return [fast(x), fast(other)]

    return run


def descriptors() -> Run:
    def run() -> Values:
        desc = Descriptor((2, 17, 5, 4), torch.float32, "nChw16c")
        texts = [desc, desc.strides(), desc.get_size(), desc.padded_dims()]
        texts += [tb.canonical_tag("acdb"), tb.physical_shape((2, 17, 5, 4), "nChw8c")]
        texts += [desc.matches_tag("nChw16c"), desc.offset((1, 16, 3, 2)), tb.native_blocks()]
        try:
            Descriptor((2, 17), torch.float32, "nChw16c")
        except ValueError as error:
            texts.append(error)
        return [str(each) for each in texts]

    return run


def explained() -> Run:
    model, x = net(), image(12)

    def run() -> Values:
        with torch.no_grad(), tb.profile() as p:
            y = model(x.to_blocked())
        # Their numbers are times, so only the result is compared.
        p.table(), tb.explain(model, x).table()
        return [y]

    return run


SCENARIOS = {
    each.__name__: each
    for each in (
        formats,
        convolution,
        layers,
        training,
        optimized,
        tuned,
        saved,
        released,
        quantized,
        descriptors,
        explained,
    )
}
