"""The convolutions that a model runs, each distinct one once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

Dims = tuple[int, ...]
Convolution = nn.modules.conv._ConvNd


@dataclass(frozen=True)
class Layer:
    """A convolution without bias sizes and batch; `count` of them in the model."""

    count: int
    in_channels: int
    out_channels: int
    size: Dims
    kernel: Dims
    stride: Dims
    padding: Dims
    dilation: Dims
    groups: int
    transposed: bool

    @property
    def id(self) -> str:
        """`IC-OC@SIZE kK [sS] [pP] [dD] [gG] [t]`, as `64-64@56 k3`: stride S where it is not 1,
        padding P where it is not that which keeps the size at stride 1, dilation D, G groups, t:
        transposed. One number stands for all dims."""
        ones = (1,) * len(self.size)
        words = [f"{self.in_channels}-{self.out_channels}@{_short(self.size)}"]
        words.append(f"k{_short(self.kernel)}")
        words += [f"s{_short(self.stride)}"] * (self.stride != ones)
        words += [f"p{_short(self.padding)}"] * (self.padding != _same(self.kernel, self.dilation))
        words += [f"d{_short(self.dilation)}"] * (self.dilation != ones)
        words += [f"g{self.groups}"] * (self.groups > 1)
        words += ["t"] * self.transposed
        return " ".join(words)

    @property
    def weight_dims(self) -> Dims:
        """As ATen has them."""
        if self.transposed:
            return (self.in_channels, self.out_channels // self.groups, *self.kernel)
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    def flops(self, output: Dims) -> int:
        """Multiplications and additions of a direct convolution with an output of such dims.

        Each input pixel of a transposed convolution meets each weight once, as does each output
        pixel of another."""
        pixels = output[0]
        for extent in self.size if self.transposed else output[2:]:
            pixels *= extent
        weights = self.in_channels * self.out_channels // self.groups
        for kernel in self.kernel:
            weights *= kernel
        return 2 * pixels * weights


def _short(dims: Dims) -> str:
    return "x".join(map(str, dims[:1] if len(set(dims)) == 1 else dims))


def _same(kernel: Dims, dilation: Dims) -> Dims:
    return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))


def layer_of(module: Convolution, input: Tensor) -> Layer:
    padding = module.padding
    if isinstance(padding, str):
        zeros = (0,) * len(module.kernel_size)
        padding = zeros if padding == "valid" else _same(module.kernel_size, module.dilation)
    return Layer(
        1,
        module.in_channels,
        module.out_channels,
        tuple(input.shape[2:]),
        module.kernel_size,
        module.stride,
        padding,
        module.dilation,
        module.groups,
        module.transposed,
    )


def layers_of(model: nn.Module, input: Tensor) -> list[Layer]:
    """The distinct convolution modules that a run of the model goes through, in the order of their
    first call."""
    found: Counter[Layer] = Counter()
    hooks = [
        module.register_forward_hook(lambda m, args, _: found.update([layer_of(m, args[0])]))
        for module in model.modules()
        if isinstance(module, Convolution)
    ]
    try:
        with torch.no_grad():
            model(input)
    finally:
        for hook in hooks:
            hook.remove()
    return [replace(layer, count=count) for layer, count in found.items()]
