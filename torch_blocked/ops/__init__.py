"""Handlers of torch ops on blocked tensors: one file per family, filled into ops.table on import."""

from torch_blocked.ops import (
    batch_norm,
    concat,
    convolution,
    copy,
    padding,
    pointwise,
    pooling,
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
    "reduction",
    "reorder",
    "resampling",
    "view",
]
