"""Max, average and adaptive pooling, 1-D to 3-D, and their gradients."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import implements
from torch_blocked.ops.images import per_image

aten = torch.ops.aten

# 1-D pooling reaches these through unsqueeze. adaptive_max_pool3d_backward is not here: in torch
# 2.13 it takes channels-last indices for contiguous ones, and gives wrong values.
implements(
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.max_unpool2d.default,
)(per_image)
