#include "kernels/entries.h"
#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

extern const Kernels table;
const Kernels table{
    .block_channels = block_channels,
    .unblock_channels = unblock_channels,
    .block_planes = block_planes,
    .unblock_planes = unblock_planes,
    .affine = affine,
    .copy_lanes = copy_lanes,
    .sum_pixels = sum_pixels,
    .moments = moments,
    .gradient_sums = gradient_sums,
    .normalisation_gradient = normalisation_gradient,
    .gather_lanes = gather_lanes,
    .softmax = softmax,
    .log_softmax = log_softmax,
    .softmax_gradient = softmax_gradient,
    .log_softmax_gradient = log_softmax_gradient,
    .channel_sum = channel_sum,
    .channel_argmax = channel_argmax,
    .sample_pixels = sample_pixels,
    .spread_pixels = spread_pixels,
    .dot_pixels = dot_pixels,
    .depthwise_gradient = depthwise_gradient,
    .outer_products = outer_products,
    .linear_rows = linear_rows,
    .gate_pixels = gate_pixels,
    .width = kWidth,
    .depthwise = depthwise,
    .grouped_broadcast = grouped_broadcast,
    .grouped_permute = grouped_permute,
    .grouped_gather = grouped_gather,
    .direct_sizes = &direct_sizes,
    .direct_tiles = direct_tiles,
    .direct_plane_tiles = direct_plane_tiles,
    .direct_band = direct_band,
    .direct_plane_band = direct_plane_band,
    .finish = finish,
    .fma_rounds = fma_rounds,
    .winograd_gradient = &winograd_gradient,
    .winograd2 = &winograd2,
    .winograd4 = &winograd4,
    .winograd2_3d = &winograd2_3d,
    .winograd4_3d = &winograd4_3d,
    .winograd3 = &winograd3,
};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
