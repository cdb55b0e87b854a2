// Arguments of the kernels of local response normalization.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// A channel of a pixel is divided by s^beta, where s = k + alpha * the sum of squares over a
// window. The window is the channel itself, `before` channels before it and `after` channels after
// it, with zeros beyond the first and the last channel. An image is [ceil(channels / block),
// pixels, block].
struct ChannelWindows {
  static constexpr std::int64_t kTile = 16;  // pixels at a time

  std::int64_t channels, block, pixels, before, after;
  float alpha, beta, k;

  // The floats of a row, which has a pixel's channels in order between zeros.
  std::int64_t row() const { return before + (channels + block - 1) / block * block + after; }
  // The floats of a kernel's scratchpad: two rows for each pixel of a tile.
  std::int64_t scratch() const { return 2 * kTile * row(); }
};

}  // namespace torch_blocked::kernels
