"""The convolutions of well-known models, as data: what `python -m torch_blocked bench conv` times.

A line is `[N]x IC-OC@SIZE kK [sS] [pP] [dD] [gG] [t]`: N layers of IC input and OC output channels
on an input of SIZE, with kernel K, stride S (1), padding P (default: that which keeps the size at
stride 1), dilation D (1), G groups (1), t: transposed. One size or kernel stands for all dims."""

from __future__ import annotations

import re
from dataclasses import dataclass

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A convolution without bias sizes and batch; `count` of them in the model."""

    count: int
    in_channels: int
    out_channels: int
    size: Dims
    kernel: Dims
    stride: int
    padding: Dims
    dilation: int
    groups: int
    transposed: bool

    @property
    def id(self) -> str:
        """The line without its count: `64-64@56 k3`."""
        words = [f"{self.in_channels}-{self.out_channels}@{_short(self.size)}"]
        words.append(f"k{_short(self.kernel)}")
        words += [f"s{self.stride}"] * (self.stride > 1)
        words += [f"p{_short(self.padding)}"] * (self.padding != _same(self.kernel, self.dilation))
        words += [f"d{self.dilation}"] * (self.dilation > 1)
        words += [f"g{self.groups}"] * (self.groups > 1)
        words += ["t"] * self.transposed
        return " ".join(words)

    @property
    def weight_dims(self) -> Dims:
        """As ATen has them."""
        if self.transposed:
            return (self.in_channels, self.out_channels // self.groups, *self.kernel)
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    def flops(self, batch: int) -> int:
        """Multiplications and additions of a direct convolution.

        Source: each input pixel of a transposed convolution meets each weight once, as does each
        output pixel of another."""
        pixels = batch
        for size, kernel, padding in zip(self.size, self.kernel, self.padding, strict=True):
            reach = self.dilation * (kernel - 1) + 1
            pixels *= size if self.transposed else (size + 2 * padding - reach) // self.stride + 1
        weights = self.in_channels * self.out_channels // self.groups
        for kernel in self.kernel:
            weights *= kernel
        return 2 * pixels * weights


_LINE = re.compile(
    r"(?:(?P<count>\d+)x )?(?P<ic>\d+)-(?P<oc>\d+)@(?P<size>[\dx]+) k(?P<k>[\dx]+)"
    r"(?: s(?P<s>\d+))?(?: p(?P<p>[\dx]+))?(?: d(?P<d>\d+))?(?: g(?P<g>\d+))?(?P<t> t)?"
)


def _dims(text: str, ndim: int) -> Dims:
    values = tuple(map(int, text.split("x")))
    return values * ndim if len(values) == 1 else values


def _short(dims: Dims) -> str:
    return "x".join(map(str, dims[:1] if len(set(dims)) == 1 else dims))


def _same(kernel: Dims, dilation: int) -> Dims:
    return tuple(dilation * (size - 1) // 2 for size in kernel)


def parse(line: str, ndim: int) -> Layer:
    """The layer of a line for `ndim` spatial dims. Raises ValueError for another text."""
    match = _LINE.fullmatch(line)
    if not match:
        raise ValueError(f"torch_blocked.bench: expected IC-OC@SIZE kK ..., got {line!r}")
    kernel = _dims(match["k"], ndim)
    dilation = int(match["d"] or 1)
    return Layer(
        count=int(match["count"] or 1),
        in_channels=int(match["ic"]),
        out_channels=int(match["oc"]),
        size=_dims(match["size"], ndim),
        kernel=kernel,
        stride=int(match["s"] or 1),
        padding=_dims(match["p"], ndim) if match["p"] else _same(kernel, dilation),
        dilation=dilation,
        groups=int(match["g"] or 1),
        transposed=bool(match["t"]),
    )


def _layers(ndim: int, *lines: str) -> tuple[Layer, ...]:
    return tuple(parse(line, ndim) for text in lines for line in text.split(", "))


def _hifigan() -> tuple[Layer, ...]:
    """The V2 generator on 64 mel frames: each residual block has kernels 3, 7 and 11, and of each
    one layer of dilation 3, one of 5 and four of 1."""
    blocks = [
        f"{count}x {channels}-{channels}@{length} k{kernel}" + (f" d{dilation}" * (dilation > 1))
        for channels, length in ((64, 512), (32, 4096), (16, 8192), (8, 16384))
        for kernel in (3, 7, 11)
        for dilation, count in ((1, 4), (3, 1), (5, 1))
    ]
    return _layers(
        1,
        "80-128@64 k7",
        "128-64@64 k16 s8 p4 t, 64-32@512 k16 s8 p4 t",
        "32-16@4096 k4 s2 p1 t, 16-8@8192 k4 s2 p1 t",
        *blocks,
        "8-1@16384 k7",
    )


LAYERS: dict[str, tuple[Layer, ...]] = {
    "resnet18": _layers(
        2,
        "3-64@224 k7 s2, 4x 64-64@56 k3",
        "64-128@56 k3 s2, 64-128@56 k1 s2 p0, 3x 128-128@28 k3",
        "128-256@28 k3 s2, 128-256@28 k1 s2 p0, 3x 256-256@14 k3",
        "256-512@14 k3 s2, 256-512@14 k1 s2 p0, 3x 512-512@7 k3",
    ),
    "resnet50": _layers(
        2,
        "3-64@224 k7 s2, 64-64@56 k1, 3x 64-64@56 k3, 4x 64-256@56 k1, 2x 256-64@56 k1",
        "256-128@56 k1, 128-128@56 k3 s2, 256-512@56 k1 s2",
        "4x 128-512@28 k1, 3x 512-128@28 k1, 3x 128-128@28 k3",
        "512-256@28 k1, 256-256@28 k3 s2, 512-1024@28 k1 s2",
        "6x 256-1024@14 k1, 5x 1024-256@14 k1, 5x 256-256@14 k3",
        "1024-512@14 k1, 512-512@14 k3 s2, 1024-2048@14 k1 s2",
        "3x 512-2048@7 k1, 2x 2048-512@7 k1, 2x 512-512@7 k3",
    ),
    "vgg16": _layers(
        2,
        "3-64@224 k3, 64-64@224 k3, 64-128@112 k3, 128-128@112 k3",
        "128-256@56 k3, 2x 256-256@56 k3, 256-512@28 k3, 2x 512-512@28 k3, 3x 512-512@14 k3",
    ),
    "mobilenet_v2": _layers(
        2,
        "3-32@224 k3 s2, 32-32@112 k3 g32, 32-16@112 k1",
        "16-96@112 k1, 96-96@112 k3 s2 g96, 96-24@56 k1",
        "2x 24-144@56 k1, 144-144@56 k3 g144, 144-24@56 k1",
        "144-144@56 k3 s2 g144, 144-32@28 k1",
        "3x 32-192@28 k1, 2x 192-192@28 k3 g192, 2x 192-32@28 k1",
        "192-192@28 k3 s2 g192, 192-64@14 k1",
        "4x 64-384@14 k1, 4x 384-384@14 k3 g384, 3x 384-64@14 k1, 384-96@14 k1",
        "3x 96-576@14 k1, 2x 576-576@14 k3 g576, 2x 576-96@14 k1",
        "576-576@14 k3 s2 g576, 576-160@7 k1",
        "3x 160-960@7 k1, 3x 960-960@7 k3 g960, 2x 960-160@7 k1, 960-320@7 k1, 320-1280@7 k1",
    ),
    "resnext50": _layers(
        2,
        "3-64@224 k7 s2, 64-128@56 k1, 3x 128-128@56 k3 g32, 3x 128-256@56 k1, 64-256@56 k1",
        "2x 256-128@56 k1, 256-256@56 k1, 256-256@56 k3 s2 g32, 256-512@56 k1 s2",
        "4x 256-512@28 k1, 3x 512-256@28 k1, 3x 256-256@28 k3 g32",
        "512-512@28 k1, 512-512@28 k3 s2 g32, 512-1024@28 k1 s2",
        "6x 512-1024@14 k1, 5x 1024-512@14 k1, 5x 512-512@14 k3 g32",
        "1024-1024@14 k1, 1024-1024@14 k3 s2 g32, 1024-2048@14 k1 s2",
        "3x 1024-2048@7 k1, 2x 2048-1024@7 k1, 2x 1024-1024@7 k3 g32",
    ),
    "hifigan": _hifigan(),
    "unet3d": _layers(
        3,
        "1-16@32x48x48 k3, 16-32@32x48x48 k3, 32-32@16x24x24 k3, 32-64@16x24x24 k3",
        "64-64@8x12x12 k3, 64-128@8x12x12 k3, 128-128@4x6x6 k3, 128-256@4x6x6 k3",
        "256-256@4x6x6 k2 s2 p0 t, 384-128@8x12x12 k3, 128-128@8x12x12 k3",
        "128-128@8x12x12 k2 s2 p0 t, 192-64@16x24x24 k3, 64-64@16x24x24 k3",
        "64-64@16x24x24 k2 s2 p0 t, 96-32@32x48x48 k3, 32-32@32x48x48 k3, 32-2@32x48x48 k1",
    ),
}
