// Arguments of the kernels of local response normalization.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// What a channel of a pixel is divided by: s^beta, s = k + alpha * the sum of squares over a
// window, which is the channel itself, those `before` it and those `after` it; beyond the first and
// the last channel are zeros. An image is [ceil(channels / block), pixels, block].
struct ChannelWindows {
  static constexpr std::int64_t kTile = 16;  // pixels at a time

  std::int64_t channels, block, pixels, before, after;
  float alpha, beta, k;

  // Floats of a row, in which a pixel's channels stand in order between zeros.
  std::int64_t row() const { return before + (channels + block - 1) / block * block + after; }
  // Floats of the memory that a kernel works in: two rows for each pixel of a tile.
  std::int64_t scratch() const { return 2 * kTile * row(); }
};

}  // namespace torch_blocked::kernels
