"""The table of problems, and the one check that every result passes.

A row says how to run an op on a tensor of any N and C; tests expand it over channels, batches and
blocks. Adding an op is adding its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.implementations import FUNCTIONS
from torch_blocked.environment import tuning_file
from torch_blocked.ops.local_response_norm import local_response_norm
from torch_blocked.profile import profile
from torch_blocked.tensor import BlockedTensor, format_name, tail_is_zero, to_blocked

Dims = tuple[int, ...]

# The blocks with fast kernels and the channels around each: alone, below, at and above it, and two
# blocks and one lane.
CHANNELS_AROUND = {8: (1, 7, 8, 9, 17), 16: (3, 15, 16, 17, 33)}
CHANNELS = (1, 3, 7, 8, 9, 15, 16, 17, 33)  # all of them
BATCHES = (0, 1, 3)
SPATIAL = {3: (11,), 4: (9, 7), 5: (5, 6, 7)}

# A direct kernel may be this much further from float64 than ATen's float32 is (Winograd: twice) ...
ERROR_FACTOR = 2.0
WINOGRAD_ERROR_FACTOR = 4.0
# ... or this far, relative to the largest value, where ATen happens to be nearly exact.
RELATIVE_FLOOR = 2e-6


@dataclass(frozen=True)
class Problem:
    """run(input, *operands) with input [N, C, *spatial]; operand_dims gives the dense operands."""

    family: str  # stem of the files that implement it
    name: str
    ndim: int
    run: Callable[..., Tensor]
    operand_dims: Callable[[Dims], tuple[Dims, ...]] = lambda dims: ()
    keeps_format: bool = True  # the result is blocked
    step: str = ""  # in optimize, between convolutions, it is this step, blocked and by our kernel
    error_factor: float = ERROR_FACTOR

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}"


def _weight(out: int | None, *kernel: int, groups: int = 1):
    """Weight and bias for C input channels; out=None keeps C."""
    return lambda dims: ((out or dims[1], dims[1] // groups, *kernel), (out or dims[1],))


def _depthwise(*kernel: int):
    return lambda dims: ((dims[1], 1, *kernel), (dims[1],))


def _transposed(out: int, *kernel: int):
    return lambda dims: ((dims[1], out, *kernel), (out,))


def _per_channel(count: int):
    return lambda dims: ((dims[1],),) * count


def _batch_norm(x, weight, bias, mean, var):
    mean, var = mean.detach(), var.detach().abs() + 0.5
    return F.batch_norm(x, mean, var, weight, bias, training=False)


def _batch_norm_training(x, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _group_norm(x, weight, bias):
    """As many groups as divide C, up to 4."""
    groups = next(count for count in (4, 3, 2, 1) if x.shape[1] % count == 0)
    return F.group_norm(x, groups, weight, bias)


def _layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def _response_norm(size, alpha=1.0, beta=0.75, k=1.0):
    return lambda x: local_response_norm(x, size, alpha, beta, k)


def _response_norm_of_ops(x):
    """As in models from before torch had it."""
    squares = F.pad(x.pow(2).unsqueeze(1), (0, 0, 0, 0, 2, 2))
    return x / (2 + 0.5 * F.avg_pool3d(squares, (5, 1, 1), stride=1).squeeze(1)) ** 0.75


def _spread_and_mean(x):
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return var + mean


def _pooled(x):
    return F.max_pool2d(x, 2, return_indices=True)


def _targets(x):
    """A class per pixel, some of them ignored."""
    n, c, h, w = x.shape
    return torch.arange(n * h * w).view(n, h, w) % (c + 1) - 1


def _cross_entropy(x):
    return F.cross_entropy(x, _targets(x), ignore_index=-1, reduction="sum")


def _nll(x, weight):
    return F.nll_loss(x, _targets(x), weight.detach().abs(), ignore_index=-1, reduction="sum")


def _grid_sampler(mode, padding, align_corners):
    return lambda x, grid: F.grid_sample(
        x, grid, mode=mode, padding_mode=padding, align_corners=align_corners
    )


def _convolution(
    name, ndim, operand_dims, transposed=False, error_factor=ERROR_FACTOR, **arguments
):
    function = FUNCTIONS[ndim - 2, transposed]

    def run(x, weight, bias):
        groups = x.shape[1] if arguments.get("groups") == "depthwise" else 1
        return function(x, weight, bias, **{**arguments, "groups": groups})

    return Problem("convolution", name, ndim, run, operand_dims, error_factor=error_factor)


PROBLEMS: tuple[Problem, ...] = (
    _convolution("1x1", 4, _weight(24, 1, 1)),
    _convolution("3x3p1", 4, _weight(17, 3, 3), error_factor=WINOGRAD_ERROR_FACTOR, padding=1),
    _convolution("3x3s2p1", 4, _weight(16, 3, 3), padding=1, stride=2),
    _convolution("5x3s2x1p2x1", 4, _weight(8, 5, 3), padding=(2, 1), stride=(2, 1)),
    _convolution("3x3d2p2", 4, _weight(9, 3, 3), padding=2, dilation=2),
    _convolution("3x3d4p4", 4, _weight(9, 3, 3), padding=4, dilation=4),
    _convolution("7x7s2p3", 4, _weight(33, 7, 7), padding=3, stride=2),
    _convolution("depthwise3x3", 4, _depthwise(3, 3), padding=1, groups="depthwise"),
    _convolution("depthwise5x5s2", 4, _depthwise(5, 5), padding=2, stride=2, groups="depthwise"),
    _convolution("1d-k3p1", 3, _weight(17, 3), padding=1),
    _convolution("1d-k9p4", 3, _weight(8, 9), padding=4),
    _convolution("1d-depthwise", 3, _depthwise(3), padding=1, groups="depthwise"),
    _convolution("3d-k3p1", 5, _weight(9, 3, 3, 3), error_factor=WINOGRAD_ERROR_FACTOR, padding=1),
    _convolution(
        "3d-k1x3x3p0x1x1",
        5,
        _weight(17, 1, 3, 3),
        error_factor=WINOGRAD_ERROR_FACTOR,
        padding=(0, 1, 1),
    ),
    _convolution("3d-k1x2x2s1x2x2", 5, _weight(16, 1, 2, 2), stride=(1, 2, 2)),
    _convolution("transposed2x2s2", 4, _transposed(17, 2, 2), True, stride=2),
    _convolution(
        "transposed4x4s2p1op1", 4, _transposed(8, 4, 4), True, stride=2, padding=1, output_padding=1
    ),
    _convolution("1d-transposed-k4s2p1", 3, _transposed(9, 4), True, stride=2, padding=1),
    _convolution("3d-transposed-k2s2", 5, _transposed(8, 2, 2, 2), True, stride=2),
    Problem("batch_norm", "inference", 4, _batch_norm, _per_channel(4)),
    Problem("batch_norm", "1d", 3, _batch_norm, _per_channel(4)),
    Problem("batch_norm", "3d", 5, _batch_norm, _per_channel(4)),
    Problem("batch_norm", "training", 4, _batch_norm_training, _per_channel(2)),
    Problem("batch_norm", "training-1d", 3, _batch_norm_training, _per_channel(2)),
    Problem("batch_norm", "training-3d", 5, _batch_norm_training, _per_channel(2)),
    Problem("pointwise", "relu", 4, F.relu),
    Problem("pointwise", "relu_", 4, lambda x: x.clone().relu_()),
    Problem("pointwise", "relu6", 4, F.relu6),
    Problem("pointwise", "sigmoid", 4, torch.sigmoid),
    Problem("pointwise", "exp", 5, torch.exp),
    Problem("pointwise", "silu", 4, F.silu),
    Problem("pointwise", "gelu", 3, F.gelu),
    Problem("pointwise", "hardswish", 4, F.hardswish),
    Problem("pointwise", "hardsigmoid", 4, F.hardsigmoid),
    Problem("pointwise", "mish", 4, F.mish),
    Problem("pointwise", "clamp", 4, lambda x: x.clamp(0.25, 2.0)),
    Problem("pointwise", "prelu", 4, F.prelu, _per_channel(1)),
    Problem("pointwise", "add-scalar", 4, lambda x: x + 1.5),
    Problem("pointwise", "rsub-scalar", 4, lambda x: 1.0 - x),
    Problem("pointwise", "add", 4, lambda x: x + x.abs()),
    Problem("pointwise", "add_-alpha", 4, lambda x: x.clone().add_(x, alpha=0.5)),
    Problem("pointwise", "div", 4, lambda x: x / (x.abs() + 1.0)),
    Problem("pointwise", "reciprocal", 4, lambda x: (x * x + 1.0).reciprocal()),
    Problem("pointwise", "pow", 4, lambda x: (x * x) ** 1.5),
    Problem("pointwise", "add-dense", 4, lambda x, y: x + y, lambda dims: (dims,)),
    Problem("pointwise", "dense-sub", 4, lambda x, y: y - x, lambda dims: (dims,)),
    Problem("pointwise", "mul-nc11", 4, lambda x, y: x * y, lambda d: ((d[0], d[1], 1, 1),)),
    Problem("pointwise", "add-c11", 4, lambda x, y: x + y, lambda d: ((d[1], 1, 1),)),
    Problem("pointwise", "mul-hw", 4, lambda x, y: x * y, lambda d: (d[2:],)),
    Problem("pointwise", "add-n1hw", 4, lambda x, y: x + y, lambda d: ((d[0], 1, *d[2:]),)),
    Problem("pointwise", "gt", 4, lambda x: x > 0.5),
    Problem("pointwise", "where", 4, lambda x: torch.where(x > 0, x, x * 0.1)),
    Problem("pointwise", "masked_fill", 4, lambda x: x.masked_fill(x > 0, 3.0)),
    Problem("pointwise", "squeeze-excite", 4, lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    Problem("pooling", "max3x3s2p1", 4, lambda x: F.max_pool2d(x, 3, 2, 1)),
    Problem("pooling", "max2x2-ceil", 4, lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True)),
    Problem("pooling", "max3x3d2", 4, lambda x: F.max_pool2d(x, 3, 1, 0, dilation=2)),
    Problem("pooling", "max-1d", 3, lambda x: F.max_pool1d(x, 3, 2, 1)),
    Problem("pooling", "max-3d", 5, lambda x: F.max_pool3d(x, 2)),
    Problem("pooling", "avg3x3s2p1", 4, lambda x: F.avg_pool2d(x, 3, 2, 1)),
    Problem("pooling", "avg-ceil", 4, lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    Problem("pooling", "avg-ceil-nopad", 4, lambda x: F.avg_pool2d(x, 2, 2, 0, True, False)),
    Problem("pooling", "avg-divisor", 4, lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=7)),
    Problem("pooling", "avg-nopad", 4, lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
    Problem("pooling", "avg-1d", 3, lambda x: F.avg_pool1d(x, 2)),
    Problem("pooling", "avg-3d", 5, lambda x: F.avg_pool3d(x, 2, ceil_mode=True)),
    Problem("pooling", "adaptive-avg3x2", 4, lambda x: F.adaptive_avg_pool2d(x, (3, 2))),
    Problem("pooling", "adaptive-avg1", 4, lambda x: F.adaptive_avg_pool2d(x, 1)),
    Problem("pooling", "adaptive-avg-1d", 3, lambda x: F.adaptive_avg_pool1d(x, 3)),
    Problem("pooling", "adaptive-avg-3d", 5, lambda x: F.adaptive_avg_pool3d(x, 2)),
    Problem("pooling", "adaptive-max3", 4, lambda x: F.adaptive_max_pool2d(x, 3)),
    Problem("resampling", "nearest2d", 4, lambda x: F.interpolate(x, scale_factor=2)),
    Problem(
        "resampling", "nearest-exact", 4, lambda x: F.interpolate(x, (5, 9), mode="nearest-exact")
    ),
    Problem("resampling", "bilinear", 4, lambda x: F.interpolate(x, (13, 5), mode="bilinear")),
    Problem(
        "resampling",
        "bilinear-corners",
        4,
        lambda x: F.interpolate(x, (13, 5), mode="bilinear", align_corners=True),
    ),
    Problem("resampling", "bicubic", 4, lambda x: F.interpolate(x, (13, 5), mode="bicubic")),
    Problem("resampling", "nearest1d", 3, lambda x: F.interpolate(x, scale_factor=2)),
    Problem("resampling", "linear1d", 3, lambda x: F.interpolate(x, 17, mode="linear")),
    Problem("resampling", "nearest3d", 5, lambda x: F.interpolate(x, scale_factor=2)),
    Problem("resampling", "trilinear", 5, lambda x: F.interpolate(x, (7, 3, 9), mode="trilinear")),
    Problem("padding", "constant0", 4, lambda x: F.pad(x, (1, 2, 0, 3))),
    Problem("padding", "constant-crop", 4, lambda x: F.pad(x, (1, -2, -1, 3), value=2.0)),
    Problem("padding", "reflect", 4, lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect")),
    Problem("padding", "replicate1d", 3, lambda x: F.pad(x, (3, 2), mode="replicate")),
    Problem("padding", "replicate3d", 5, lambda x: F.pad(x, (1,) * 6, mode="replicate")),
    Problem("concat", "channels", 4, lambda x: torch.cat([x, x * 2, x.relu()], 1)),
    Problem(
        "concat", "dense", 4, lambda x, y: torch.cat([y, x], 1), lambda d: ((d[0], 5, *d[2:]),)
    ),
    Problem("concat", "height", 4, lambda x: torch.cat([x, x * 2], 2)),
    Problem("concat", "batch-3d", 5, lambda x: torch.cat([x, -x], 0)),
    Problem("concat", "slice", 4, lambda x: x[:, x.shape[1] // 3 :]),
    Problem("concat", "slice-height", 4, lambda x: x[:, :, 1:7:2]),
    Problem("concat", "shuffled", 4, lambda x: torch.cat(x.split([1, x.shape[1] - 1], 1)[::-1], 1)),
    Problem("concat", "channels-1d", 3, lambda x: torch.cat([x, x + 1], -2)),
    Problem("reduction", "mean-hw-keepdim", 4, lambda x: x.mean((2, 3), keepdim=True)),
    Problem("reduction", "mean-hw", 4, lambda x: x.mean((2, 3)), keeps_format=False),
    Problem("reduction", "centred", 4, lambda x: x - x.mean((2, 3), keepdim=True).expand(x.shape)),
    Problem("reduction", "sum-w", 4, lambda x: x.sum(-1), keeps_format=False),
    Problem("reduction", "amax-h", 4, lambda x: x.amax(2, keepdim=True)),
    Problem(
        "view",
        "flatten-pooled",
        4,
        lambda x: x.mean((2, 3), keepdim=True).flatten(1),
        keeps_format=False,
    ),
    Problem("reduction", "mean-c", 4, lambda x: x.mean(1), keeps_format=False),
    Problem("reduction", "mean-ch-keepdim", 4, lambda x: x.mean((1, 2), keepdim=True)),
    Problem("reduction", "amax-c-keepdim", 4, lambda x: x.amax(1, keepdim=True)),
    Problem("reduction", "amin-cw", 4, lambda x: (x.abs() + 1).amin((1, 3)), keeps_format=False),
    Problem("reduction", "var-cw", 4, lambda x: x.var((1, 3)), keeps_format=False),
    Problem("reduction", "std-hw-keepdim", 4, lambda x: x.std((2, 3), keepdim=True)),
    Problem("reduction", "var_mean-c", 3, _spread_and_mean),
    Problem("reduction", "norm-c-keepdim", 4, lambda x: x.norm(dim=1, keepdim=True)),
    Problem("reduction", "normalize", 4, lambda x: F.normalize(x, dim=1)),
    Problem("reduction", "logsumexp-c", 4, lambda x: x.logsumexp(1), keeps_format=False),
    Problem("reduction", "max-c", 4, lambda x: x.max(1)[0], keeps_format=False),
    Problem("reduction", "max-c-keepdim-3d", 5, lambda x: x.max(1, keepdim=True)[0]),
    Problem("reduction", "argmax-c", 4, lambda x: x.argmax(1), keeps_format=False),
    Problem("reduction", "argmin-w", 4, lambda x: x.argmin(3), keeps_format=False),
    Problem("reduction", "max-h", 4, lambda x: x.max(2, keepdim=True)[0]),
    Problem("reduction", "prod-c", 3, lambda x: x.detach().prod(1), keeps_format=False),
    Problem("reduction", "all-c", 4, lambda x: (x < 9).all(1), keeps_format=False),
    Problem("scan", "cumsum-h", 4, lambda x: x.cumsum(2)),
    Problem("scan", "sort-w", 4, lambda x: x.sort(3)[0]),
    Problem("softmax", "channels", 4, lambda x: x.softmax(1)),
    Problem("softmax", "channels-1d", 3, lambda x: (x * 5).softmax(1)),
    Problem("softmax", "channels-3d", 5, lambda x: x.softmax(1)),
    Problem("softmax", "width", 4, lambda x: x.softmax(-1)),
    Problem("softmax", "log-channels", 4, lambda x: x.log_softmax(1)),
    Problem("softmax", "log-height", 4, lambda x: x.log_softmax(2)),
    Problem(
        "group_norm",
        "groups1",
        4,
        lambda x, w, b: F.group_norm(x, 1, w, b),
        _per_channel(2),
        step="aten::group_norm",
    ),
    Problem(
        "group_norm",
        "channels",
        4,
        lambda x, w, b: F.group_norm(x, len(w), w, b),
        _per_channel(2),
        step="aten::group_norm",
    ),
    *(
        Problem("group_norm", name, rank, _group_norm, _per_channel(2), step="aten::group_norm")
        for name, rank in (("groups", 4), ("groups-1d", 3), ("groups-3d", 5))
    ),
    Problem("group_norm", "plain-offset", 4, lambda x: F.group_norm(x + 30, 1)),
    # Rows of equal values, whose rounding a layer norm multiplies by 1 / sqrt(eps).
    Problem("layer_norm", "equal", 3, lambda x: F.layer_norm(x * 0 + 7.3, x.shape[-1:])),
    Problem("group_norm", "layer-chw", 4, _layer_norm, lambda d: (d[1:], d[1:])),
    Problem("group_norm", "layer-cw", 3, _layer_norm, lambda d: (d[1:], d[1:])),
    Problem("group_norm", "layer-hw", 4, _layer_norm, lambda d: (d[2:], d[2:])),
    Problem("group_norm", "layer-w", 4, lambda x: F.layer_norm(x, x.shape[3:])),
    *(
        Problem(
            "local_response_norm", name, rank, _response_norm(*window), step="local_response_norm"
        )
        for name, rank, window in (
            ("size5", 4, (5,)),
            ("size4-1d", 3, (4, 0.5, 1.0, 2.0)),
            ("size3-3d", 5, (3, 2.0, 0.5, 0.0)),  # lanes of the tail would be 0 / 0
            ("size9-power", 4, (9, 3.0, 1.3, 0.5)),
            ("size40", 4, (40, 20.0)),
            ("size1", 4, (1, 0.1)),
        )
    ),
    Problem(
        "local_response_norm", "written-out", 4, _response_norm_of_ops, step="local_response_norm"
    ),
    Problem("batch_norm", "instance", 4, lambda x: F.instance_norm(x)),
    Problem(
        "batch_norm",
        "instance-affine-1d",
        3,
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        _per_channel(2),
    ),
    Problem("pooling", "lp-norm", 4, lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 3, 2)),
    Problem("pooling", "max-indices", 4, lambda x: F.max_pool2d(x, 2, return_indices=True)[1]),
    Problem("pooling", "unpool", 4, lambda x: F.max_unpool2d(*_pooled(x), 2, output_size=x.shape)),
    Problem("padding", "circular", 4, lambda x: F.pad(x, (1, 2, 2, 1), mode="circular")),
    Problem("padding", "channels", 4, lambda x: F.pad(x, (0, 1, 0, 0, 3, 2))),
    Problem("padding", "channels-value", 4, lambda x: F.pad(x, (0, 0, 1, 0, 1, 5), value=1.5)),
    Problem("padding", "batch", 3, lambda x: F.pad(x, (0, 0, 0, 0, 1, 1))),
    Problem("concat", "stack", 4, lambda x: torch.stack([x, x * 2], 2)),
    Problem("concat", "stack-last", 3, lambda x: torch.stack([x, x.relu()], -1)),
    Problem(
        "concat", "slice_scatter", 4, lambda x: x.slice_scatter(x[:, 1:] * 2, 1, 1, x.shape[1])
    ),
    Problem("view", "select-height", 4, lambda x: x[:, :, 3] * 2),
    Problem("view", "select-batch", 4, lambda x: x.sum(0, keepdim=True)[0], keeps_format=False),
    Problem("view", "transpose-hw", 4, lambda x: x.transpose(2, 3) * 2),
    Problem("view", "unbind-width", 4, lambda x: x.unbind(3)[2] * 2),
    Problem("view", "flatten-spatial", 5, lambda x: x.flatten(2) * 2),
    Problem(
        "shuffle",
        "index_select-c",
        4,
        lambda x: x.index_select(1, torch.tensor([x.shape[1] - 1, 0, 0])),
    ),
    Problem("shuffle", "index-h", 4, lambda x: x[:, :, torch.tensor([5, 1, 1])]),
    Problem("shuffle", "index-c", 4, lambda x: x[:, torch.tensor([-1, 0, 0, 0])]),
    Problem("shuffle", "flip-cw", 4, lambda x: x.flip(1, 3)),
    Problem("shuffle", "roll-c", 4, lambda x: x.roll(2, 1)),
    Problem("shuffle", "roll-hw", 4, lambda x: x.roll((2, -1), (2, 3))),
    Problem("shuffle", "repeat", 4, lambda x: x.repeat(2, 3, 1, 2)),
    Problem("shuffle", "channels", 4, lambda x: F.channel_shuffle(x.repeat(1, 4, 1, 1), 4)),
    Problem("shuffle", "pixels", 4, lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2)),
    Problem("shuffle", "pixels3", 4, lambda x: F.pixel_shuffle(x.repeat(1, 9, 1, 1), 3)),
    Problem("shuffle", "unpixels3", 4, lambda x: F.pixel_unshuffle(x[:, :, :, :6], 3)),
    Problem("glu", "channels", 4, lambda x: F.glu(torch.cat([x, x * 2], 1), 1)),
    Problem("glu", "width", 3, lambda x: F.glu(x[:, :, 1:], 2)),
    Problem("gather", "rows", 4, lambda x: x.gather(2, (x[:, :, :4] > 0).long())),
    Problem("loss", "cross_entropy", 4, _cross_entropy, keeps_format=False),
    Problem("loss", "nll-weight", 4, _nll, _per_channel(1), keeps_format=False),
    Problem(
        "loss",
        "mse",
        4,
        lambda x, y: F.mse_loss(x, y, reduction="sum"),
        lambda d: (d,),
        keeps_format=False,
    ),
    Problem(
        "loss",
        "smooth_l1",
        4,
        lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
        lambda d: (d,),
    ),
    Problem(
        "loss",
        "bce-logits",
        4,
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="sum"),
        lambda d: (d,),
        keeps_format=False,
    ),
    Problem(
        "loss",
        "soft_margin",
        3,
        lambda x, y: F.soft_margin_loss(x, y.detach().sign(), reduction="sum"),
        lambda d: (d,),
        keeps_format=False,
    ),
    *(
        Problem(
            "grid_sampler",
            f"{mode}-{padding}",
            4,
            _grid_sampler(mode, padding, corners),
            lambda d: ((d[0], 4, 6, 2),),
        )
        for mode, padding, corners in (
            ("bilinear", "zeros", False),
            ("bilinear", "border", True),
            ("bilinear", "reflection", False),
            ("bicubic", "zeros", True),
            ("bicubic", "reflection", False),
            ("nearest", "border", False),
        )
    ),
    Problem(
        "grid_sampler",
        "trilinear",
        5,
        _grid_sampler("bilinear", "zeros", False),
        lambda d: ((d[0], 3, 4, 2, 3),),
    ),
    Problem("pointwise", "logsigmoid", 4, F.logsigmoid),
    Problem("pointwise", "hardshrink", 4, F.hardshrink),
    Problem("pointwise", "softshrink", 4, F.softshrink),
    Problem("pointwise", "hardtanh", 4, lambda x: F.hardtanh(x, -0.5, 0.25)),
    Problem("pointwise", "threshold", 4, lambda x: F.threshold(x, 0.1, 2.0)),
    Problem("pointwise", "leaky_relu", 4, F.leaky_relu),
    Problem("pointwise", "elu", 4, F.elu),
    Problem("pointwise", "celu", 3, F.celu),
    Problem("pointwise", "selu", 3, F.selu),
    Problem("pointwise", "softplus", 4, F.softplus),
    Problem("pointwise", "softsign", 3, F.softsign),
    Problem("pointwise", "tanh", 4, torch.tanh),
    Problem("pointwise", "rsub-dense", 4, lambda x, y: torch.rsub(x, y), lambda d: (d,)),
    Problem("pointwise", "one-channel", 4, lambda x, y: x[:, :1] * y, lambda d: ((d[1], 1, 1),)),
    Problem("view", "unsqueeze-squeeze", 3, lambda x: x.unsqueeze(2).squeeze(2)),
    Problem("copy", "clone", 4, torch.clone),
    Problem("copy", "to-double", 4, lambda x: x.to(torch.float64)),
)


def problems(family: str | None = None) -> Iterator[Problem]:
    return (p for p in PROBLEMS if family in (None, p.family))


def dims_of(problem: Problem, batch: int, channels: int) -> Dims:
    return (batch, channels, *SPATIAL[problem.ndim])


def make_tensors(problem: Problem, dims: Dims, seed: int = 0) -> tuple[Tensor, ...]:
    """The input and its operands, dense float32, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (dims, *problem.operand_dims(dims))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def implementations(p: profile) -> set[str]:
    """Of the ops that ran."""
    return {row.implementation for row in p.rows} - {""}


def assert_matches_dense(problem: Problem, dims: Dims, block: int, fallbacks: int = 0) -> None:
    """Runs the problem blocked and asserts: values near ATen's in float64, dims, dtype, format,
    zero tail, the same bits again, untouched input, no more fallbacks than given. One thread gives
    the same bits by the same implementation, by another one its own.
    """
    dense, *operands = make_tensors(problem, dims)
    blocked = to_blocked(dense, format_name(len(dims), block))
    with torch.no_grad():
        with profile() as p:
            result = problem.run(blocked, *operands)
        with profile() as of_one, threads(1):
            again = problem.run(blocked, *operands)
        alone = again
        # Estimates count threads: one may take another implementation, with other roundings.
        if not implementations(of_one) <= implementations(p):
            again = problem.run(blocked, *operands)
    assert p.fallbacks + of_one.fallbacks <= fallbacks, p.table() + of_one.table()
    assert isinstance(result, BlockedTensor) == problem.keeps_format
    if problem.keeps_format:
        assert result.block == block
        assert tail_is_zero(result)
    assert torch.equal(blocked.to_dense(), dense), "the input was written"
    with torch.no_grad():
        expected = problem.run(dense, *operands)
        exact = problem.run(dense.double(), *(operand.double() for operand in operands))
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    values = result.to_dense() if problem.keeps_format else result
    same = again.to_dense() if problem.keeps_format else again
    assert torch.equal(values, same), "a second run gave other bits"
    for each in (values, alone.to_dense() if problem.keeps_format else alone):
        assert_close(each, expected, exact, problem.error_factor)


def assert_gradients_match_dense(
    problem: Problem, dims: Dims, block: int, fallbacks: int = 0
) -> None:
    """Differentiates the problem blocked and asserts of the gradients of the input and of every
    operand what assert_matches_dense asserts of results; that of the input is blocked with a zero
    tail, those of dense operands are dense."""
    tensors = make_tensors(problem, dims)
    expected = _gradients(problem, tensors)
    exact = _gradients(problem, [tensor.double() for tensor in tensors])
    inputs = [to_blocked(tensors[0], format_name(len(dims), block)), *tensors[1:]]
    with profile() as p:
        gradients = _gradients(problem, inputs)
        again = _gradients(problem, inputs)
    assert p.fallbacks <= fallbacks, p.table()
    assert len(gradients) == len(expected)
    for index, gradient in enumerate(gradients):
        if index == 0 and isinstance(gradient, BlockedTensor):
            assert gradient.block == block
            assert tail_is_zero(gradient)
        elif index > 0:
            assert type(gradient) is Tensor
        assert gradient.shape == expected[index].shape
        assert gradient.dtype == expected[index].dtype
        values = _dense(gradient)
        assert torch.equal(values, _dense(again[index])), "a second run gave other bits"
        assert_close(values, expected[index], exact[index], problem.error_factor)


def _gradients(problem: Problem, tensors) -> list[Tensor]:
    """Gradients of a fixed weighted sum of the result; none if it is not differentiable."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = problem.run(*leaves)
    if not result.requires_grad:
        return []
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(result.shape, generator=generator, dtype=torch.float32)
    weights = weights.to(result.dtype)
    if isinstance(result, BlockedTensor):
        weights = to_blocked(weights, result.format)
    used = torch.autograd.grad(result, leaves, weights, allow_unused=True)
    return [gradient for gradient in used if gradient is not None]


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if isinstance(tensor, BlockedTensor) else tensor


def assert_close(
    values: Tensor, expected: Tensor, exact: Tensor, error_factor: float = ERROR_FACTOR
) -> None:
    """values: ours; expected: ATen's float32; exact: ATen's float64."""
    if not expected.dtype.is_floating_point:
        assert torch.equal(values, expected)
        return
    if not expected.numel():
        return
    error = (values.double() - exact).abs().max()
    dense_error = (expected.double() - exact).abs().max()
    allowed = max(error_factor * dense_error, RELATIVE_FLOOR * exact.abs().max())
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, ATen's {dense_error:.3g}"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch.set_num_threads(count), and back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prefer(optimized: torch.nn.Module, implementation: str, where: str) -> None:
    """Lets the file of measured times say that an implementation is the fastest of all problems of
    this module's plans whose key has `where` in it, and that what was found for the others takes a
    second. The plans know problems that the file does not have: times that a busy machine
    disturbed are not kept."""
    rows = []
    for form in optimized._forms:
        for problem, (found, _) in form.compiled.times().items():
            name, time = (implementation, 0.1) if where in problem else (found, 1e6)
            rows.append(f"{problem}\t{name}\t{time}\n")
    with Path(tuning_file()).open("a") as file:
        file.writelines(rows)
