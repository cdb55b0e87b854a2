"""Sampling at the points of a grid, 2-D and 3-D, and the gradients of image and grid."""

from __future__ import annotations

import torch

from torch_blocked.ops.contract import implements
from torch_blocked.ops.operands import gradient_like
from torch_blocked.tensor import BlockedTensor

aten = torch.ops.aten
_tb = torch.ops.torch_blocked


@implements(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    takes="input: blocked, grid: dense",
)
def grid_sampler(func, input, grid, interpolation_mode, padding_mode, align_corners):
    """input [N, C, *in] blocked, grid [N, *out, dims] -> [N, C, *out] blocked."""
    physical, channels = input._physical, input._channels
    modes = (interpolation_mode, padding_mode, align_corners)
    return BlockedTensor(_tb.grid_sampler(physical, channels, grid, *modes), channels)


@implements(
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    takes="input: blocked, grid: dense",
)
def grid_sampler_backward(
    func, grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask
):
    """-> gradients of input (blocked) and grid (dense). Every run gives the same bits."""
    grad_input, grad_grid = _tb.grid_sampler_backward(
        gradient_like(grad_output, input._channels, input),
        input._physical,
        input._channels,
        grid,
        interpolation_mode,
        padding_mode,
        align_corners,
        output_mask,
    )
    return (
        BlockedTensor(grad_input, input._channels) if output_mask[0] else None,
        grad_grid if output_mask[1] else None,
    )


@torch.library.register_fake("torch_blocked::grid_sampler")
def _(input, channels, grid, interpolation_mode, padding_mode, align_corners):
    return input.new_empty(*input.shape[:2], *grid.shape[1:-1], input.shape[-1])


@torch.library.register_fake("torch_blocked::grid_sampler_backward")
def _(
    grad_output, input, channels, grid, interpolation_mode, padding_mode, align_corners,
    output_mask,
):  # fmt: skip
    none = input.new_empty(0)
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format) if output_mask[0] else none,
        torch.empty_like(grid, memory_format=torch.contiguous_format)
        if output_mask[1]
        else none.clone(),
    )
