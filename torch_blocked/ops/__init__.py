"""Handlers of torch ops on blocked tensors: a file per family; importing fills ops.table."""

from torch_blocked.ops import (
    batch_norm,
    concat,
    convolution,
    copy,
    padding,
    pointwise,
    pooling,
    random,
    reduction,
    reorder,
    resampling,
    view,
)

__all__ = [
    "batch_norm",
    "concat",
    "convolution",
    "copy",
    "padding",
    "pointwise",
    "pooling",
    "random",
    "reduction",
    "reorder",
    "resampling",
    "view",
]
