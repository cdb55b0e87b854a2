// The inner order of V, U and M, which the Winograd sources share.
//
//   V [positions, | groups of tiles, IC vectors, tiles of the group, kWidth | + pad]
//   U [groups of OC, weights, IC, channels of the group]; of 16 bits
//     [groups of OC, weights, IC / 2, channels of the group, 2]
//   M [tiles, | positions, kGroupChannels | + pad]
//
// V lets the multiplication read a group's pixels at constant offsets, and the transform write
// whole vectors. M lets the transform of dst read a tile at constant offsets. The pad of one cache
// line keeps V's positions and M's tiles, which are touched together, out of the same cache sets.
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

// kTiles is the number of tiles in a register tile, each with 2 vectors of output channels.
//
// 16 registers hold 6 x 2 sums, 2 vectors of weights and 1 broadcast. 32 registers hold 7 x 2 sums
// twice. Each vector of input channels is summed on its own before it is added to the total. This
// brings the error from 10 times down to 3 times that of oneDNN's AVX-512 kernels, which sum like
// this too (AVX2: from 1.4 times), and costs no time.
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

// The rounding of sums is negligible beside that to bfloat16, so all registers can hold sums.
struct WinogradBfloats : Bfloats {
  static constexpr std::int64_t kMostInputs = std::numeric_limits<std::int64_t>::max();
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int kTiles = 14;
#else
  static constexpr int kTiles = 4;  // products of 16 bits also take registers
#endif
  static constexpr bool kSumVectors = false;
};

// Words made from bytes of src and weights by F(4x4) at whole points. The largest product is 18 *
// 255 times 49 * 128, and a sum of 74 of them stays within 32 bits. So sums of kMostInputs channels
// are exact. They are added up as float32.
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

// Words made from floats. Each tile of src and each output channel of weights has its own scale.
// The largest words of src are kLargest. The absolute values of weights in any kMostInputs input
// channels of a position add up to at most kLargestSum. So sums stay within 32 bits.
template <typename Pairs>
struct WinogradFixed : WinogradWords<Pairs> {
  static constexpr float kLargest = 32760, kLargestSum = 65500;
};

// Numbers between positions.
template <typename Products>
inline std::int64_t v_stride(std::int64_t ic, std::int64_t tiles) {
  return tiles * round_up(ic, kWidth) + kLine<typename Products::Number>;
}

// The distance between tiles of M: an odd number of groups of channels.
inline constexpr std::int64_t m_stride(std::int64_t positions) {
  return (positions | 1) * kGroupChannels;
}

// The output channels for which U and M have room: whole blocks and whole vectors.
inline std::int64_t padded_channels(std::int64_t oc, std::int64_t block) {
  return round_up(round_up(oc, block), kWidth);
}

// Calls f(first, count) for groups of at most `most` tiles, as even as possible.
template <typename F>
inline void for_groups(std::int64_t tiles, std::int64_t most, F&& f) {
  const std::int64_t groups = (tiles + most - 1) / most;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t first = group * tiles / groups;
    f(first, (group + 1) * tiles / groups - first);
  }
}

// Which of `count` transformed weights each position uses.
struct PositionWeights {
  std::span<const std::uint8_t> of;
  std::int64_t count;
};

// Computes M of all positions, by the kernels of multiply.cpp.
template <typename Products>
void winograd_multiply(const WinogradShape& shape, PositionWeights weights, std::int64_t tiles,
                       std::int64_t group, const typename Products::Number* v,
                       const typename Products::Number* u, float* m);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
