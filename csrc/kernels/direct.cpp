#include <algorithm>
#include <array>
#include <utility>

#include "kernels/entries.h"
#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Accumulators: pixels x 2 vectors of output channels, plus 2 weights and 1 broadcast, in 32
// registers of AVX-512 or 16 of AVX2. 24 (12) independent FMAs hide their latency of 4 at 2 a
// cycle.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kTilePixels = 12;
#else
constexpr int kTilePixels = 6;
#endif
constexpr std::int64_t kChannels = 2 * kWidth;

// The 2 vectors of one output pixel to its channel blocks: a vector may be part of a block (AVX2
// and 16c) or several blocks (AVX-512 and 8c).
inline void store_pixel(const Vec* acc, const DirectRow& row, std::int64_t pixel) {
  for (std::int64_t channel = 0; channel < row.channels; channel += std::min(row.block, kWidth)) {
    float* dst = row.dst + channel / row.block * row.dst_block_stride + pixel * row.block +
                 channel % row.block;
    if (row.block >= kWidth) {
      acc[channel / kWidth].store(dst);
    } else {
      alignas(64) float lanes[kWidth];
      acc[channel / kWidth].store(lanes);
      std::copy_n(lanes + channel % kWidth, row.block, dst);
    }
  }
}

template <int kPixels>
void tile(const DirectRow& row, std::int64_t first) {
  Vec acc[kPixels][2];
#pragma GCC unroll 16
  for (int i = 0; i < kPixels; ++i) {
    acc[i][0] = Vec::loadu(row.bias);
    acc[i][1] = Vec::loadu(row.bias + kWidth);
  }
  const float* weights = row.weights;  // [taps, kw, ic, 2 vectors]
  const std::int64_t step = row.stride * row.ic;
  for (std::int64_t tap = 0; tap < row.taps; ++tap) {
    for (std::int64_t kw = 0; kw < row.kw; ++kw) {
      // [pixels at the stride, ic]
      const float* src =
          row.rows + (tap * row.row_pixels + first * row.stride + kw * row.dilation) * row.ic;
      for (std::int64_t ic = 0; ic < row.ic; ++ic, weights += kChannels) {
        const Vec w0 = Vec::loadu(weights), w1 = Vec::loadu(weights + kWidth);
#pragma GCC unroll 16
        for (int i = 0; i < kPixels; ++i) {
          const Vec x(src[i * step + ic]);
          acc[i][0] = at::vec::fmadd(x, w0, acc[i][0]);
          acc[i][1] = at::vec::fmadd(x, w1, acc[i][1]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kPixels; ++i) store_pixel(acc[i], row, first + i);
}

using Tile = void (*)(const DirectRow&, std::int64_t);

template <int... i>
constexpr std::array<Tile, sizeof...(i)> tiles_of(std::integer_sequence<int, i...>) {
  return {tile<i + 1>...};
}

// tile<1> .. tile<kTilePixels>
constexpr auto kTiles = tiles_of(std::make_integer_sequence<int, kTilePixels>());

}  // namespace

void direct_row(const DirectRow& row) {
  for (std::int64_t first = 0; first < row.pixels; first += kTilePixels) {
    const auto pixels = std::min<std::int64_t>(kTilePixels, row.pixels - first);
    kTiles[static_cast<std::size_t>(pixels - 1)](row, first);
  }
}

std::int64_t direct_channels() { return kChannels; }

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
