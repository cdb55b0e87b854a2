"""What other systems run on blocked tensors, by their names: nothing of it runs on a dense copy,
forward or backward.

Sources: PyTorch's native_functions.yaml (kernels for MkldnnCPU), ncnn's src/layer/x86 (layers that
take packed input), Intel's extension for TensorFlow (onednn_layout). What they quantize, pack and
unpack has no counterpart here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_blocked

pytestmark = pytest.mark.any_isa

CHANNELS = 17
DIMS = (2, CHANNELS, 9, 7)


def values(*dims):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(dims, generator=generator, requires_grad=True)


def attention(x):
    tokens = x.flatten(2).transpose(1, 2)
    weights = values(3 * CHANNELS, CHANNELS), values(3 * CHANNELS)
    projection = values(CHANNELS, CHANNELS), values(CHANNELS)
    return F.multi_head_attention_forward(
        *[tokens.transpose(0, 1)] * 3, CHANNELS, 1, *weights, None, None, False, 0.0, *projection
    )[0]


def written(x):
    y = x * 1
    y[:, :, 2] = 0
    y[:, 3] = 1
    y[0] *= 2
    y[:, 8:16].mul_(3)
    return y


MKLDNN = {
    "add": lambda x: x + x.sigmoid(),
    "add_": lambda x: (x * 2).add_(x),
    "mul": lambda x: x * x.sigmoid(),
    "mul_": lambda x: (x * 2).mul_(3),
    "relu": F.relu,
    "relu_": lambda x: (x * 2).relu_(),
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: (x * 2).sigmoid_(),
    "tanh": torch.tanh,
    "tanh_": lambda x: (x * 2).tanh_(),
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "prelu": lambda x: F.prelu(x, values(CHANNELS)),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "softmax": lambda x: x.softmax(1),
    "linear": lambda x: F.linear(x, values(5, 7), values(5)),
    "linear-pooled": lambda x: F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), values(5, 17)),
    "convolution": lambda x: F.conv2d(x, values(9, CHANNELS, 3, 3), values(9)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, 2, 0, 2, ceil_mode=True),
    "max_pool2d-indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "max_pool3d": lambda x: F.max_pool3d(x.unsqueeze(2), (1, 2, 2)),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool3d": lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 2, 2)),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "batch_norm": lambda x: F.batch_norm(
        x, None, None, values(CHANNELS), values(CHANNELS), training=True
    ),
    "reshape": lambda x: x.reshape(2, -1),
    "view": lambda x: x.view(2, CHANNELS, -1),
    "transpose": lambda x: x.transpose(1, 2),
    "clone": torch.clone,
    "copy_": lambda x: torch.zeros_like(x).copy_(x),
    "copy_-dense": lambda x: torch.zeros(x.shape).copy_(x),
    "zero_": lambda x: (x * 2).zero_() + x,
}
NCNN = {
    "absval": torch.abs,
    "batchnorm": lambda x: F.batch_norm(x, torch.zeros(CHANNELS), torch.ones(CHANNELS)),
    "binaryop-sub": lambda x: x - x.sigmoid(),
    "binaryop-div": lambda x: x / (x.abs() + 1),
    "binaryop-max": lambda x: torch.maximum(x, x * 2),
    "binaryop-min": lambda x: torch.minimum(x, x * 2),
    "binaryop-pow": lambda x: x.abs() ** 1.5,
    "binaryop-rsub": lambda x: 1 - x,
    "binaryop-rdiv": lambda x: 1 / (x.abs() + 1),
    "binaryop-atan2": lambda x: torch.atan2(x, x.abs() + 1),
    "bnll": F.softplus,
    "cast": lambda x: x.double() * 2,
    "clip": lambda x: x.clamp(-0.5, 0.5),
    "concat": lambda x: torch.cat([x, x[:, :5]], 1),
    "concat-width": lambda x: torch.cat([x, x], 3),
    "convolution1d": lambda x: F.conv1d(x[:, :, 0], values(9, CHANNELS, 3)),
    "convolutiondepthwise": lambda x: F.conv2d(x, values(CHANNELS, 1, 3, 3), groups=CHANNELS),
    "crop": lambda x: x[:, 2:9, 1:-1, 2:],
    "deconvolution": lambda x: F.conv_transpose2d(x, values(CHANNELS, 5, 3, 3), stride=2),
    "deconvolutiondepthwise": lambda x: F.conv_transpose2d(
        x, values(CHANNELS, 1, 3, 3), groups=CHANNELS
    ),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x, 0.5),
    "eltwise": lambda x: x * 0.5 + x * 2,
    "elu": F.elu,
    "erf": torch.erf,
    "flatten": lambda x: x.flatten(1),
    "gemm": lambda x: x @ values(7, 5),
    "gridsample": lambda x: F.grid_sample(x, values(2, 4, 5, 2).tanh()),
    "groupnorm": lambda x: F.group_norm(x, 1, values(CHANNELS), values(CHANNELS)),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "innerproduct": lambda x: F.linear(x.flatten(1), values(5, CHANNELS * 63)),
    "interp-nearest": lambda x: F.interpolate(x, scale_factor=2),
    "interp-bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "interp-bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "layernorm": lambda x: F.layer_norm(x, x.shape[1:]),
    "mish": F.mish,
    "multiheadattention": attention,
    "padding-constant": lambda x: F.pad(x, (1, 2, 3, 4), value=2.0),
    "padding-reflect": lambda x: F.pad(x, (1, 2, 3, 4), mode="reflect"),
    "padding-replicate": lambda x: F.pad(x, (1, 2, 3, 4), mode="replicate"),
    "pooling-adaptive-max": lambda x: F.adaptive_max_pool2d(x, 3),
    "pooling-global": lambda x: x.amax((2, 3), keepdim=True),
    "rmsnorm": lambda x: F.rms_norm(x, x.shape[1:], values(*x.shape[1:])),
    "scale": lambda x: x * values(CHANNELS, 1, 1) + values(1, CHANNELS, 1, 1),
    "selu": F.selu,
    "shufflechannel": lambda x: F.channel_shuffle(x[:, :16], 4),
    "slice": lambda x: x.split([3, 8, 6], 1)[1],
    "swish": F.silu,
    **{
        f"unaryop-{name}": lambda x, name=name: getattr(torch, name)(x.abs() * 0.1 + 0.1)
        for name in (
            "neg", "floor", "ceil", "square", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tan",
            "asin", "acos", "atan", "reciprocal", "log10", "round", "trunc",
        )
    },
}  # fmt: skip
ITEX = {
    "AddN": lambda x: sum([x, x * 2, x * 3]),
    "InstanceNorm": lambda x: F.instance_norm(x, weight=values(CHANNELS), bias=values(CHANNELS)),
    "LayerNorm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,), values(CHANNELS)),
    "Slice": lambda x: x[:1, 8:16, :, ::2],
    "Reshape": lambda x: x.reshape(2, CHANNELS, 7, 9),
    "Transpose": lambda x: x.permute(0, 2, 3, 1),
    "LeakyRelu": F.leaky_relu,
    "Relu6": F.relu6,
    "MatMul": lambda x: values(4, 9) @ x,
    "BatchMatMul": lambda x: x @ x.transpose(2, 3),
    "ResizeNearest-grad": lambda x: F.interpolate(x, size=(5, 12)),
    "Pad+Conv": lambda x: F.conv2d(F.pad(x, (1, 0, 2, 1)), values(9, CHANNELS, 3, 3)),
}
OTHERS = {
    "local_response_norm": lambda x: F.local_response_norm(x, 3),
    "sum-dim": lambda x: x.sum(1),
    "mean-spatial": lambda x: x.mean((2, 3)),
    "amax": lambda x: x.amax((1, 2)),
    "var": lambda x: x.var((0, 2, 3)),
    "log_softmax": lambda x: x.log_softmax(2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x[:, :16], 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :8, :6], 2),
    "trilinear": lambda x: F.interpolate(x.unsqueeze(2), scale_factor=2, mode="trilinear"),
    "stack": lambda x: torch.stack([x, x * 2], 2),
    "stack-batch": lambda x: torch.stack([x, x * 2]),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "comparison": lambda x: (x < 0) * x,
    "masked_fill": lambda x: x.masked_fill(x > 0, 3.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "normalize": lambda x: F.normalize(x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.sigmoid(), 1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.sigmoid()),
    "squeeze-excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "einsum": lambda x: torch.einsum("nchw,nc->nchw", x, x.mean((2, 3))),
    "coordinates": lambda x: torch.cat([x, values(1, 1, 9, 1).expand(2, 1, 9, 7)], 1),
    "instance_norm-running": lambda x: nn.InstanceNorm2d(CHANNELS, track_running_stats=True)(x),
    "written": written,
}
LISTS = {"mkldnn": MKLDNN, "ncnn": NCNN, "itex": ITEX, "others": OTHERS}


def result_and_gradient(run, x):
    """Both dense; the gradient of a fixed weighted sum."""
    torch.manual_seed(0)
    out = run(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    (gradient,) = torch.autograd.grad((out * weights).sum(), x)
    return [v.to_dense() if torch_blocked.is_blocked(v) else v for v in (out.detach(), gradient)]


@pytest.mark.parametrize(
    ("system", "name"), [(system, name) for system, rows in LISTS.items() for name in rows]
)
def test_no_dense_copy(system, name):
    x = torch.randn(DIMS, generator=torch.Generator().manual_seed(0))
    run = LISTS[system][name]
    expected = result_and_gradient(run, x.clone().requires_grad_())
    with torch_blocked.strict():
        actual = result_and_gradient(run, x.to_blocked("nChw8c").requires_grad_())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, check_stride=False)
