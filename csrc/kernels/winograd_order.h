// What the Winograd sources share: the inner order of V, U and M.
//
//   V [positions, | groups of tiles, IC vectors, tiles of the group, kWidth | + pad]
//   U [groups of OC, positions, IC, channels of the group]
//   M [positions, | tiles, kGroupChannels | + pad]
//
// V lets the multiplication read a group's pixels at constant offsets, and the transform write
// whole vectors. The pad of one cache line keeps the positions, which the transforms touch
// together, from falling into the same cache sets.
#pragma once

#include <algorithm>

#include "format/sizes.h"
#include "kernels/lanes.h"
#include "kernels/winograd.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// Tiles of a register tile, each with 2 vectors of output channels. 16 registers hold 6 x 2 sums, 2
// vectors of weights and 1 broadcast. 32 hold 7 x 2 sums twice: adding up each vector of input
// channels on its own brings the error from 10 times down to 3 times that of oneDNN's AVX-512
// kernels, which sum so too (AVX2: from 1.4 times), and costs no time.
#if defined(CPU_CAPABILITY_AVX512)
inline constexpr int kGroupTiles = 7;
inline constexpr bool kSumVectors = true;
#else
inline constexpr int kGroupTiles = 6;
inline constexpr bool kSumVectors = false;
#endif
inline constexpr std::int64_t kGroupChannels = 2 * kWidth;
inline constexpr std::int64_t kPad = 16;

inline std::int64_t v_stride(std::int64_t ic, std::int64_t tiles) {
  return tiles * round_up(ic, kWidth) + kPad;
}

inline std::int64_t m_stride(std::int64_t tiles) { return tiles * kGroupChannels + kPad; }

// Output channels for which U and M have room: whole blocks, whole vectors.
inline std::int64_t padded_channels(std::int64_t oc, std::int64_t block) {
  return round_up(round_up(oc, block), kWidth);
}

// The tiles in groups of at most kGroupTiles, as even as can be: f(first, count).
template <typename F>
inline void for_groups(std::int64_t tiles, F&& f) {
  const std::int64_t groups = (tiles + kGroupTiles - 1) / kGroupTiles;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t first = group * tiles / groups;
    f(first, (group + 1) * tiles / groups - first);
  }
}

// M of all positions, by the kernels of winograd_multiply.cpp.
void winograd_multiply(const WinogradShape& shape, std::int64_t positions, std::int64_t tiles,
                       std::int64_t group, const float* v, const float* u, float* m);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
