"""Convolutions of quantized_decomposed's ops, and what their bytes must be."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers the ops

from helpers.optimized import blocked

OPS = torch.ops.quantized_decomposed


def fake(x: Tensor, scale: float, zero: int, dtype=torch.uint8, least=0, most=255) -> Tensor:
    """x as bytes, and numbers again."""
    arguments = (scale, zero, least, most, dtype)
    return OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *arguments), *arguments)


class Conv(nn.Module):
    """A convolution of bytes, and what follows it."""

    def __init__(
        self,
        inputs,
        outputs,
        kernel=3,
        *,
        ndim=2,
        bias=True,
        then=None,
        to=(0.05, 117),
        src=(0.03, 101),
        residual=None,
        transposed=False,
        **geometry,
    ):
        super().__init__()
        kind = f"Conv{'Transpose' * transposed}{ndim}d"
        conv = getattr(nn, kind)(inputs, outputs, kernel, bias=bias, **geometry)
        weight, self.axis = conv.weight.detach(), int(transposed)
        scale = weight.transpose(0, self.axis).flatten(1).abs().amax(1).clamp(min=1e-3) / 127
        shape = [1] * self.axis + [-1] + [1] * (weight.dim() - 1 - self.axis)
        self.register_buffer("weight", (weight / scale.view(shape)).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("zeros", torch.zeros(len(scale), dtype=torch.int64))
        self.register_buffer("bias", conv.bias.detach() if bias else None)
        self.conv = getattr(F, f"conv{'_transpose' * transposed}{ndim}d")
        names = ["stride", "padding", "dilation", "groups"] + ["output_padding"] * transposed
        self.geometry = {name: getattr(conv, name) for name in names}
        self.then, self.to, self.src, self.residual = then, to, src, residual

    def forward(self, x, *others):
        weight = OPS.dequantize_per_channel(
            self.weight, self.scale, self.zeros, self.axis, -127, 127, torch.int8
        )
        y = self.conv(fake(x, *self.src), weight, self.bias, **self.geometry)
        if self.residual:
            y = y + fake(others[0], *self.residual)
        if self.then:
            y = self.then(y)
        return fake(y, *self.to) if self.to else y


@torch.no_grad()
def check(model: Conv, *inputs: Tensor, ops=1, by=("dots", "winograd_words")) -> None:
    """Bytes differ by one at most, and few do; the same bits twice; and it runs on bytes."""
    model = model.eval()
    fast = blocked(model, *inputs, verify=False)
    expected, result = model(*inputs), fast(*inputs)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    if model.to:
        apart = ((result - expected) / model.to[0]).round().abs()
        assert apart.numel() == 0 or apart.max() <= 1, apart.max()
        assert (apart > 0).float().mean() < 0.01 or apart.sum() <= 2
    else:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(fast(*inputs), result)
    if result.numel():
        names = [step.implementation for step in fast.steps()]
        assert sum(name.startswith(by) for name in names) == ops, fast.plan()


ACTIVATIONS = [
    F.relu,
    F.relu6,
    F.hardswish,
    F.silu,
    F.gelu,
    F.leaky_relu,
    None,
    lambda x: F.hardtanh(x, -0.5, 0.25),
]


class Padded(Conv):
    """What tools make of "same" padding: more of it at the far ends, before the bytes."""

    def forward(self, x):
        return super().forward(F.pad(x, (0, 1, 1, 2)))
