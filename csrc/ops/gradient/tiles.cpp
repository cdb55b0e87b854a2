#include "ops/gradient/tiles.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/rows/reorder.h"
#include "runtime/memory/memory_pool.h"

namespace torch_blocked {

GradientTiles::GradientTiles(std::int64_t ic, std::int64_t vectors, GradientTileSize most)
    : ic(ic),
      vectors(vectors),
      channels(most.channels),
      across(ceil_div(ic, most.channels)),
      down(ceil_div(vectors, most.vectors)) {}

GradientTile GradientTiles::operator[](std::int64_t i) const {
  const std::int64_t first_ic = i % across * channels, row = i / across;
  const std::int64_t first = row * vectors / down;
  return {first_ic, std::min(channels, ic - first_ic), first, (row + 1) * vectors / down - first};
}

PackedGradient empty_packed_gradient(const ConvolutionProblem& p, const at::Tensor& diff_weight,
                                     std::int64_t width) {
  const std::int64_t ic = p.src_dims[1], taps = diff_weight.numel() / (p.dst_dims[1] * ic);
  const bool last = !diff_weight.is_contiguous() && is_channels_last(diff_weight);
  return {.sums = empty_pooled({ceil_div(p.dst_dims[1], width) * ic * taps * width},
                               diff_weight.options()),
          .width = width,
          .ic_stride = last ? width : taps * width,
          .tap_stride = last ? ic * width : width,
          .vector_stride = ic * taps * width};
}

void unpack_gradient(const PackedGradient& packed, const GradientTile& tile,
                     const at::Tensor& diff_weight) {
  // The sums are a blocked image whose channels are OC and whose pixels are IC * taps.
  const std::int64_t pixels = packed.vector_stride / packed.width,
                     first = tile.vector * packed.width;
  const kernels::ImageReorder reorder{
      .src = packed.sums.const_data_ptr<float>() + tile.vector * packed.vector_stride,
      .dst = diff_weight.mutable_data_ptr<float>() + first * pixels,
      .channels = std::min(tile.vectors * packed.width, diff_weight.size(0) - first),
      .block = packed.width,
      .pixels = pixels,
      .stream = false};
  const auto kernel = kernels::kernels_for(packed.width).unblock_planes;
  const std::int64_t ic_step = packed.ic_stride / packed.width,
                     tap_step = packed.tap_stride / packed.width;
  if (tap_step == 1) return kernel(reorder, tile.ic * ic_step, (tile.ic + tile.ic_count) * ic_step);
  for (std::int64_t at = tile.ic; at < pixels; at += tap_step) {
    kernel(reorder, at, at + tile.ic_count);
  }
}

}  // namespace torch_blocked
