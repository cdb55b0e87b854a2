// What the Winograd sources share: the inner order of V, U and M.
//
//   V [positions, | groups of tiles, IC vectors, tiles of the group, kWidth | + pad]
//   U [groups of OC, weights, IC, channels of the group]; of 16 bits
//     [groups of OC, weights, IC / 2, channels of the group, 2]
//   M [tiles, | positions, kGroupChannels | + pad]
//
// V lets the multiplication read a group's pixels at constant offsets, and the transform write
// whole vectors; M lets the transform of dst read a tile at constant offsets. The pad of one cache
// line keeps what is touched together, V's positions and M's tiles, from falling into the same
// cache sets.
#pragma once

#include <algorithm>
#include <span>

#include "format/sizes.h"
#include "kernels/vector/products.h"
#include "kernels/winograd/winograd.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

inline constexpr std::int64_t kGroupChannels = 2 * kWidth;
template <typename Number>
inline constexpr std::int64_t kLine = 64 / sizeof(Number);  // numbers of a cache line

// kTiles are the tiles of a register tile, each with 2 vectors of output channels.
//
// 16 registers hold 6 x 2 sums, 2 vectors of weights and 1 broadcast. 32 hold 7 x 2 sums twice:
// adding up each vector of input channels on its own brings the error from 10 times down to 3 times
// that of oneDNN's AVX-512 kernels, which sum so too (AVX2: from 1.4 times), and costs no time.
struct WinogradFloats : Floats {
  static constexpr std::int64_t kMostInputs = std::numeric_limits<std::int64_t>::max();
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int kTiles = 7;
  static constexpr bool kSumVectors = true;
#else
  static constexpr int kTiles = 6;
  static constexpr bool kSumVectors = false;
#endif
};

// Beside the rounding to bfloat16 that of the sums is nothing, so that all registers can hold sums.
struct WinogradBfloats : Bfloats {
  static constexpr std::int64_t kMostInputs = std::numeric_limits<std::int64_t>::max();
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int kTiles = 14;
#else
  static constexpr int kTiles = 4;  // products of 16 bits take registers, too
#endif
  static constexpr bool kSumVectors = false;
};

// Words of bytes of src and of weights in F(4x4) at whole points: the largest product is that of
// 18 * 255 and 49 * 128, of which a sum of 74 stays within 32 bits. Sums of kMostInputs channels
// are exact; they are added up as float32.
template <typename Pairs>
struct WinogradWords : Pairs {
  static constexpr std::int64_t kMostInputs = 64;
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int kTiles = 14;
#else
  static constexpr int kTiles = 6;
#endif
  static constexpr bool kSumVectors = false;
};

// Words of floats, each tile of src and each output channel of weights scaled for it: the largest
// words of src are kLargest, and the absolute values of weights in any kMostInputs input channels
// of a position add up to kLargestSum at most, so that sums stay within 32 bits.
template <typename Pairs>
struct WinogradFixed : WinogradWords<Pairs> {
  static constexpr float kLargest = 32760, kLargestSum = 65500;
};

// Numbers between positions.
template <typename Products>
inline std::int64_t v_stride(std::int64_t ic, std::int64_t tiles) {
  return tiles * round_up(ic, kWidth) + kLine<typename Products::Number>;
}

// From one tile of M to the next: an odd number of groups of channels.
inline constexpr std::int64_t m_stride(std::int64_t positions) {
  return (positions | 1) * kGroupChannels;
}

// Output channels for which U and M have room: whole blocks, whole vectors.
inline std::int64_t padded_channels(std::int64_t oc, std::int64_t block) {
  return round_up(round_up(oc, block), kWidth);
}

// The tiles in groups of at most `most`, as even as can be: f(first, count).
template <typename F>
inline void for_groups(std::int64_t tiles, std::int64_t most, F&& f) {
  const std::int64_t groups = (tiles + most - 1) / most;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t first = group * tiles / groups;
    f(first, (group + 1) * tiles / groups - first);
  }
}

// The number of each position's weights, of so many.
struct PositionWeights {
  std::span<const std::uint8_t> of;
  std::int64_t count;
};

// M of all positions, by the kernels of multiply.cpp.
template <typename Products>
void winograd_multiply(const WinogradShape& shape, PositionWeights weights, std::int64_t tiles,
                       std::int64_t group, const typename Products::Number* v,
                       const typename Products::Number* u, float* m);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
