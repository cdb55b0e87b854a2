// The products of Winograd convolution: at each position a small matrix product, tiles x IC by IC x
// OC.
#include <array>
#include <utility>

#include "kernels/winograd_order.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// v [IC vectors, kTiles, kWidth], u [ic, kVectors * kWidth] -> m [kTiles, kGroupChannels] = v u.
// Prefetches a line of each row of `ahead`, which is as large as u.
template <int kTiles, int kVectors>
void multiply(const float* v, const float* u, float* m, std::int64_t ic, const float* ahead) {
  constexpr int kSums = kTiles * kVectors;
  Vec total[kSums], sum[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) total[i] = sum[i] = Vec(0.f);
  for (; ic > 0; ic -= kWidth, v += kTiles * kWidth) {
    const float* end = v + std::min(ic, kWidth);
    for (const float* lane = v; lane < end;
         ++lane, u += kVectors * kWidth, ahead += kVectors * kWidth) {
      __builtin_prefetch(ahead, 0, 2);
      Vec w[kVectors];
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) w[j] = Vec::loadu(u + j * kWidth);
#pragma GCC unroll 16
      for (int i = 0; i < kTiles; ++i) {
        const Vec x(lane[i * kWidth]);
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
          sum[i * kVectors + j] = at::vec::fmadd(x, w[j], sum[i * kVectors + j]);
        }
      }
    }
    if constexpr (!kSumVectors) continue;
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      total[i] = total[i] + sum[i];
      sum[i] = Vec(0.f);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTiles; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      (kSumVectors ? total : sum)[i * kVectors + j].store(m + i * kGroupChannels + j * kWidth);
    }
  }
}

using Multiply = void (*)(const float*, const float*, float*, std::int64_t, const float*);

constexpr std::int64_t kLine = 16;  // floats of a cache line

template <int... i>
constexpr std::array<std::array<Multiply, 2>, sizeof...(i)> table_of(
    std::integer_sequence<int, i...>) {
  return {{{multiply<i + 1, 1>, multiply<i + 1, 2>}...}};
}

// [tiles - 1][vectors - 1]
constexpr auto kMultiply = table_of(std::make_integer_sequence<int, kGroupTiles>());

}  // namespace

void winograd_multiply(const WinogradShape& shape, std::int64_t positions, std::int64_t tiles,
                       std::int64_t group, const float* v, const float* u, float* m) {
  const std::int64_t first_channel = group * kGroupChannels;
  const std::int64_t channels =
      std::min(kGroupChannels, padded_channels(shape.oc, shape.block) - first_channel);
  const std::int64_t padded_ic = round_up(shape.ic, kWidth);
  u += first_channel * positions * shape.ic;
  for (std::int64_t position = 0; position < positions; ++position) {
    // One position's U stays in L1 or L2 for all groups of tiles. Where there are several, they
    // prefetch the next position's U: otherwise the first group waits for it, while memory idles
    // during the others. 256@14 takes 0.71 ms with it, 0.80 without (AVX2: 0.74 and 0.95).
    const float* ahead = tiles > kGroupTiles ? u + shape.ic * channels : u;
    std::int64_t line = 0;
    for_groups(tiles, [&](std::int64_t first, std::int64_t count) {
      kMultiply[static_cast<std::size_t>(count - 1)]
               [static_cast<std::size_t>(channels / kWidth - 1)](
                   v + first * padded_ic, u, m + first * kGroupChannels, shape.ic, ahead + line);
      line = (line + kLine) % channels;
    });
    v += v_stride(shape.ic, tiles);
    u += shape.ic * channels;
    m += m_stride(tiles);
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
