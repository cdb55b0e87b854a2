// The products of Winograd convolution: at each position a small matrix product, tiles x IC by IC x
// OC.
#include <array>
#include <utility>

#include "kernels/vector/register_tile.h"
#include "kernels/winograd/order.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

template <typename Products>
constexpr bool kIsFixed = requires { Products::kLargest; };

template <typename Products, int kTiles, int kVectors>
using SumsOf = Sums<typename Products::Sum, kTiles, kVectors>;

template <typename Products>
constexpr bool kIsWhole = std::is_same_v<typename Products::Sum, Index>;

// sums += v u, kLanes input channels at a time, of which there is a multiple. Prefetches `share`
// numbers from `ahead` on with each row of u.
template <int kLanes, typename Products, int kTiles, int kVectors>
TORCH_BLOCKED_INLINE inline void add_inputs(const typename Products::Number* v,
                                            const typename Products::Number* u, std::int64_t ic,
                                            const typename Products::Number* ahead,
                                            std::int64_t share,
                                            SumsOf<Products, kTiles, kVectors>& sums) {
  constexpr int kRow = kVectors * kWidth * Products::kChannels;
  constexpr int kStep = kLanes * Products::kChannels;
  // With Products::kSumVectors: the sums of the vectors before.
  [[maybe_unused]] SumsOf<Products, kTiles, kVectors> total = sums;
  for (; ic > 0; ic -= kWidth, v += kTiles * kWidth) {
    const auto add_lanes = [&](const auto* lane) TORCH_BLOCKED_INLINE {
      prefetch_share<kLanes>(ahead, share);
      unrolled<kLanes>([&]<int i>() TORCH_BLOCKED_INLINE {
        add_lane<Products, kTiles, kVectors>(EvenRows{lane + i * Products::kChannels, kWidth},
                                             u + i * kRow, sums.values);
      });
      u += kLanes * kRow;
      ahead += kLanes * share;
    };
    if constexpr (kStep == kWidth) {
      add_lanes(v);
    } else {
      const auto* end = v + std::min(ic, kWidth);
      for (const auto* lane = v; lane < end; lane += kStep) add_lanes(lane);
    }
    if constexpr (!Products::kSumVectors) continue;
    unrolled<kTiles * kVectors>([&]<int i>() TORCH_BLOCKED_INLINE {
      total.values[i] = total.values[i] + sums.values[i];
      sums.values[i] = typename Products::Sum(0);
    });
  }
  if constexpr (Products::kSumVectors) sums = total;
}

// v [IC vectors, kTiles, kWidth], u [ic, kVectors * kWidth] -> m [kTiles, kVectors * kWidth] = v u.
// Tiles of m lie `m_step` floats apart. u of 16 bits is [ic / 2, kVectors * kWidth, 2]. If m
// `is_begun`, the product is added. In fixed point each tile has a scale.
template <typename Products, int kTiles, int kVectors, typename Number = Products::Number>
void multiply(const Number* v, const Number* u, float* m, std::int64_t ic, const Number* ahead,
              std::int64_t share, bool is_begun, const float* scales, std::int64_t m_step) {
  using Sum = typename Products::Sum;
  constexpr int kUnrolled = kUnrolledLanes<Products>;
  Sum zeros[kVectors];
  unrolled<kVectors>([&]<int j>() TORCH_BLOCKED_INLINE { zeros[j] = Sum(0); });
  SumsOf<Products, kTiles, kVectors> sums(zeros);
  if (kUnrolled > 1 && ic % kUnrolled == 0) {
    add_inputs<kUnrolled, Products, kTiles, kVectors>(v, u, ic, ahead, share, sums);
  } else {
    add_inputs<1, Products, kTiles, kVectors>(v, u, ic, ahead, share, sums);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTiles; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      const Sum& all = sums(i, j);
      float* to = m + i * m_step + j * kWidth;
      if constexpr (kIsWhole<Products>) {
        const Vec value = kIsFixed<Products> ? to_floats(all) * Vec(scales[i]) : to_floats(all);
        (is_begun ? Vec::loadu(to) + value : value).store(to);
      } else {
        all.store(to);
      }
    }
  }
}

template <typename Number>
using Multiply = void (*)(const Number*, const Number*, float*, std::int64_t, const Number*,
                          std::int64_t, bool, const float*, std::int64_t);

template <typename Products, int... i>
constexpr std::array<std::array<Multiply<typename Products::Number>, 2>, sizeof...(i)> table_of(
    std::integer_sequence<int, i...>) {
  return {{{multiply<Products, i + 1, 1>, multiply<Products, i + 1, 2>}...}};
}

// [tiles - 1][vectors - 1]
template <typename Products>
constexpr auto kMultiply = table_of<Products>(std::make_integer_sequence<int, Products::kTiles>());

}  // namespace

template <typename Products>
void winograd_multiply(const WinogradShape& shape, PositionWeights weights, std::int64_t tiles,
                       std::int64_t group, const typename Products::Number* v,
                       const typename Products::Number* u, float* m) {
  using Number = typename Products::Number;
  const std::int64_t first_channel = group * kGroupChannels;
  const std::int64_t channels =
      std::min(kGroupChannels, padded_channels(shape.oc, shape.block) - first_channel);
  const std::int64_t padded_ic = round_up(shape.ic, kWidth),
                     rows = round_up(shape.ic, Products::kChannels);
  const auto positions = static_cast<std::int64_t>(weights.of.size());
  const std::int64_t m_step = m_stride(positions);
  const auto* scales =
      reinterpret_cast<const float*>(v + positions * v_stride<Products>(shape.ic, tiles));
  u += first_channel * weights.count * rows;
  // The next group's weights follow the last position.
  const auto u_of = [&](std::int64_t position) {
    const std::int64_t number =
        position < positions ? weights.of[static_cast<std::size_t>(position)] : weights.count;
    return u + number * rows * channels;
  };
  const std::int64_t share =
      ceil_div(channels * Products::kChannels, ceil_div(tiles, Products::kTiles));
  for (std::int64_t position = 0; position < positions; ++position) {
    // One position's U stays in L1 or L2 for all groups of tiles. Each group prefetches its
    // share of the next position's U. Without prefetching the first group waits for U, and
    // memory idles during the others. If the first group prefetched all of it, it would wait
    // too, because lines come more slowly than products are made. On a Zen 3 with U from
    // memory, 256@14 takes 1.00 ms like this and 1.16 if the first group prefetches all; 512@28
    // takes 11.6 and 12.5.
    const Number *own = u_of(position), *ahead = u_of(position + 1);
    for_groups(tiles, Products::kTiles, [&](std::int64_t first, std::int64_t count) {
      const auto& of_tiles = kMultiply<Products>[static_cast<std::size_t>(count - 1)];
      for (std::int64_t ic = 0; ic < shape.ic; ic += Products::kMostInputs) {
        of_tiles[static_cast<std::size_t>(channels / kWidth - 1)](
            v + first * padded_ic + ic * count, own + ic * channels, m + first * m_step,
            std::min(shape.ic - ic, Products::kMostInputs),
            ahead + ic / Products::kChannels * share, share, ic > 0, scales + first, m_step);
        if (Products::kMostInputs >= shape.ic) break;
      }
      ahead += rows / Products::kChannels * share;
    });
    v += v_stride<Products>(shape.ic, tiles);
    m += kGroupChannels;
  }
}

template void winograd_multiply<WinogradFloats>(const WinogradShape&, PositionWeights, std::int64_t,
                                                std::int64_t, const float*, const float*, float*);
template void winograd_multiply<WinogradBfloats>(const WinogradShape&, PositionWeights,
                                                 std::int64_t, std::int64_t, const std::uint16_t*,
                                                 const std::uint16_t*, float*);
template void winograd_multiply<WinogradWords<WordPairs>>(const WinogradShape&, PositionWeights,
                                                          std::int64_t, std::int64_t,
                                                          const std::int16_t*, const std::int16_t*,
                                                          float*);
template void winograd_multiply<WinogradFixed<WordPairs>>(const WinogradShape&, PositionWeights,
                                                          std::int64_t, std::int64_t,
                                                          const std::int16_t*, const std::int16_t*,
                                                          float*);
template void winograd_multiply<WinogradFixed<VnniWordPairs>>(const WinogradShape&, PositionWeights,
                                                              std::int64_t, std::int64_t,
                                                              const std::int16_t*,
                                                              const std::int16_t*, float*);
template void winograd_multiply<WinogradWords<VnniWordPairs>>(const WinogradShape&, PositionWeights,
                                                              std::int64_t, std::int64_t,
                                                              const std::int16_t*,
                                                              const std::int16_t*, float*);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
