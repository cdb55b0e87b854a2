// Convolution as a matrix product of short numbers: [pixels, groups] x [groups, output channels]. A
// group is 32 bits of src: four bytes, two words or two bfloat16.
//
// A register tile has kPixels x kVectors sums. Each group costs kVectors loads of weights and
// kPixels broadcasts for kPixels * kVectors dot products, of which a Zen 4 starts one a cycle.
#include "kernels/dots/dots.h"

#include <algorithm>
#include <utility>

#include "kernels/dots/dot_ends.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The most pixels of a tile with 1, 2 and 4 vectors; registers are used as in direct.cpp. Four
// vectors are for few pixels, whose sums would otherwise wait for each other. Without AVX2 a vector
// is not a register, so tiles are small rather than fast.
#if defined(CPU_CAPABILITY_AVX512)
constexpr std::array<int, 5> kTilePixels{0, 14, 14, 0, 6};
#elif defined(CPU_CAPABILITY_AVX2)
constexpr std::array<int, 5> kTilePixels{0, 12, 6, 0, 2};
#else
constexpr std::array<int, 5> kTilePixels{0, 2, 2, 0, 2};
#endif

constexpr std::int64_t kBits = 4;  // bytes of a group

// Unsigned bytes of src times signed bytes of the weights.
struct Bytes {
  using Sum = Index;
  TORCH_BLOCKED_INLINE static Sum start(const DotChannels& c) {
    return Index::loadu(c.start.data());
  }
  TORCH_BLOCKED_INLINE static Sum dot(const Sum& sum, const Index& x, const Index& w) {
    return dot_bytes(sum, x, w);
  }
};

// Bytes widened to words.
struct Words {
  using Sum = Index;
  TORCH_BLOCKED_INLINE static Sum start(const DotChannels& c) {
    return Index::loadu(c.start.data());
  }
  TORCH_BLOCKED_INLINE static Sum dot(const Sum& sum, const Index& x, const Index& w) {
    return dot_words(sum, x, w);
  }
};

struct Bfloats {
  using Sum = Vec;
  TORCH_BLOCKED_INLINE static Sum start(const DotChannels&) { return Vec(0.f); }
  TORCH_BLOCKED_INLINE static Sum dot(const Sum& sum, const Index& x, const Index& w) {
    return dot_bfloats(sum, x, w);
  }
};

// How the 32-bit groups of a pixel's src reach the lanes: the same group in all lanes (Same), or
// each lane its own.
template <typename Dot>
struct Same : Dot {
  explicit Same(const DotTiles&) {}
  // `src` points to a group, which lies `offset` bytes after the first group of its segment.
  TORCH_BLOCKED_INLINE Index lanes(const std::uint8_t* src, std::int64_t) const {
    return repeat_bits(src);
  }
};

template <typename Dot, int kBytes>
struct Spread : Dot {
  Index first;

  explicit Spread(const DotTiles& t) : first(Index::loadu(t.lanes)) {}
  TORCH_BLOCKED_INLINE Index lanes(const std::uint8_t* src, std::int64_t offset) const {
    const Index at = first + Index(static_cast<std::int32_t>(offset / kBits));
    return spread_bits<kBytes>(src - offset, at);
  }
};

template <typename Dot, int kPixels, int kVectors>
struct Sums {
  typename Dot::Sum values[kPixels * kVectors];

  // Always constructed with values: otherwise GCC clears them in memory and leaves them there.
  template <int... i>
  TORCH_BLOCKED_INLINE Sums(const DotChannels* channels, std::integer_sequence<int, i...>)
      : values{Dot::start(channels[i % kVectors])...} {}
  TORCH_BLOCKED_INLINE explicit Sums(const DotChannels* channels)
      : Sums(channels, std::make_integer_sequence<int, kPixels * kVectors>()) {}
};

template <typename Dot, int kPixels, int kVectors>
TORCH_BLOCKED_INLINE inline Sums<Dot, kPixels, kVectors> multiply(const DotTiles& t,
                                                                  const std::uint8_t* first) {
  constexpr std::int64_t kVector = kWidth * kBits, kAhead = 8192;
  const Dot bits(t);
  Sums<Dot, kPixels, kVectors> sums(t.channels);
  const std::uint8_t* weights = t.weights;
  constexpr int kHalf = kPixels / 2;  // pixels of the first of two rows
  const std::int64_t second = t.src_row > 0 ? t.src_row : kHalf * t.src_step;
  const DotSegment* end = t.segments + t.count;
  for (const DotSegment* segment = t.segments; segment < end; ++segment) {
    const std::uint8_t* begin = first + segment->offset;
    const std::uint8_t* src = begin;
    for (const std::uint8_t* src_end = src + segment->groups * kBits; src < src_end; src += kBits) {
      Index w[kVectors];
      TORCH_BLOCKED_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        w[j] = Index::loadu(weights + j * kVector);
        __builtin_prefetch(weights + j * kVector + kAhead);
      }
      TORCH_BLOCKED_UNROLL
      for (int i = 0; i < kPixels; ++i) {
        const std::int64_t at = i < kHalf ? i * t.src_step : second + (i - kHalf) * t.src_step;
        const Index x = bits.lanes(src + at, src - begin);
        TORCH_BLOCKED_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          auto& sum = sums.values[i * kVectors + j];
          sum = Dot::dot(sum, x, w[j]);
        }
      }
      weights += kVectors * kVector;
    }
  }
  return sums;
}

// Whether bytes of four pixels can be stored at a time. Besides its products, a vector then costs 3
// instructions instead of 6, which are most of a 1x1 convolution of 16 channels.
template <typename Number>
bool has_quads(const DotTiles& t) {
  return std::is_same_v<Number, std::uint8_t> && !t.end && t.dst_step == kWidth &&
         std::all_of(t.channels, t.channels + t.vectors,
                     [](const DotChannels& c) { return c.is_small; });
}

// Stores finished(scaled sum, at) of all sums to dst, within the bounds.
template <bool kQuads, typename Dot, int kPixels, int kVectors, typename Finished>
TORCH_BLOCKED_INLINE inline void store_finished(const DotTiles& t, std::int64_t pixel,
                                                const Sums<Dot, kPixels, kVectors>& sums,
                                                Finished&& finished) {
  using Number = NumberOf<typename Dot::Sum>;
  constexpr int kInQuads = kQuads ? kPixels / 4 * 4 : 0;
  auto* dst = static_cast<Number*>(t.dst);
  const auto value = [&](int i, int j) TORCH_BLOCKED_INLINE {
    return finished(scaled(t.channels[j], typename Dot::Sum(sums.values[i * kVectors + j])),
                    t.dst_offsets[j] + (pixel + i) * t.dst_step);
  };
  if constexpr (kInQuads > 0) {
    TORCH_BLOCKED_UNROLL
    for (int n = 0; n < kInQuads / 4 * kVectors; ++n) {
      const int i = n / kVectors * 4, j = n % kVectors;
      store_quad(nearest(value(i, j)), nearest(value(i + 1, j)), nearest(value(i + 2, j)),
                 nearest(value(i + 3, j)), Index::loadu(t.channels[j].least_bytes.data()),
                 Index::loadu(t.channels[j].most_bytes.data()),
                 dst + t.dst_offsets[j] + (pixel + i) * kWidth);
    }
  }
  TORCH_BLOCKED_UNROLL
  for (int n = 0; n < (kPixels - kInQuads) * kVectors; ++n) {
    const int i = kInQuads + n / kVectors, j = n % kVectors;
    store_numbers(bounded(t.channels[j], value(i, j)),
                  dst + t.dst_offsets[j] + (pixel + i) * t.dst_step);
  }
}

template <bool kQuads, typename Dot, int kPixels, int kVectors>
TORCH_BLOCKED_INLINE inline void store_tile(const DotTiles& t, std::int64_t pixel,
                                            const Sums<Dot, kPixels, kVectors>& sums) {
  if (t.residual) {
    const auto* residual = static_cast<const NumberOf<typename Dot::Sum>*>(t.residual);
    const Vec scale(t.residual_scale);
    store_finished<kQuads>(t, pixel, sums, [&](const Vec& x, std::int64_t at) TORCH_BLOCKED_INLINE {
      return at::vec::fmadd(load_numbers(residual + at), scale, x);
    });
  } else {
    store_finished<kQuads>(t, pixel, sums,
                           [](const Vec& x, std::int64_t) TORCH_BLOCKED_INLINE { return x; });
  }
}

// `values` [pixels, vectors, lanes] -> dst, by the general end.
template <typename Number>
[[gnu::noinline]] void finish_values(const DotTiles& t, std::int64_t pixel, std::int64_t pixels,
                                     const float* values) {
  const std::int64_t size = t.is_float32 ? sizeof(float) : sizeof(Number);
  const auto* residual = static_cast<const Number*>(t.residual);
  for (std::int64_t i = 0; i < pixels; ++i) {
    for (std::int64_t j = 0; j < t.vectors; ++j, values += kWidth) {
      const std::int64_t at = t.dst_offsets[static_cast<std::size_t>(j)] + (pixel + i) * t.dst_step;
      finish_vector(*t.end, t.channels[j], Vec::loadu(values), residual ? residual + at : nullptr,
                    static_cast<char*>(t.dst) + at * size, t.is_float32);
    }
  }
}

// Runs `count` tiles from `pixel` on, of one row.
template <typename Dot, int kPixels, int kVectors>
TORCH_BLOCKED_INLINE inline void row_tiles(const DotTiles& t, std::int64_t pixel,
                                           std::int64_t count, bool has_quads) {
  using Number = NumberOf<typename Dot::Sum>;
  for (; count > 0; --count, pixel += kPixels) {
    const auto sums = multiply<Dot, kPixels, kVectors>(t, t.src + pixel * t.src_step);
    if constexpr (std::is_same_v<Number, std::uint8_t> && kPixels >= 4) {
      if (has_quads) {
        store_tile<true>(t, pixel, sums);
        continue;
      }
    }
    if (!t.end) {
      store_tile<false>(t, pixel, sums);
      continue;
    }
    alignas(64) float values[kPixels * kVectors * kWidth];
    TORCH_BLOCKED_UNROLL
    for (int n = 0; n < kPixels * kVectors; ++n) {
      scaled(t.channels[n % kVectors], typename Dot::Sum(sums.values[n]))
          .store(values + n * kWidth);
    }
    finish_values<Number>(t, pixel, kPixels, values);
  }
}

template <typename Dot, int kPixels, int kVectors>
void tiles(const DotTiles& first, std::int64_t pixel, std::int64_t count) {
  DotTiles t = first;  // moves from row to row
  const bool quads = has_quads<NumberOf<typename Dot::Sum>>(t);
  for (std::int64_t row = 0; row < t.rows; ++row) {
    row_tiles<Dot, kPixels, kVectors>(t, pixel, count, quads);
    t.src += t.rows_src;
    t.dst = static_cast<char*>(t.dst) + t.rows_dst;
    if (t.residual) t.residual = static_cast<const char*>(t.residual) + t.rows_residual;
  }
}

using Tiles = void (*)(const DotTiles&, std::int64_t, std::int64_t);
constexpr std::size_t kMostPixels = *std::ranges::max_element(kTilePixels);

template <typename Dot, int kVectors, int... i>
constexpr std::array<Tiles, kMostPixels> tiles_of(std::integer_sequence<int, i...>) {
  return {tiles<Dot, i + 1, kVectors>...};
}

// [vectors][pixels - 1]
template <typename Dot>
constexpr std::array<std::array<Tiles, kMostPixels>, 5> kTiles{
    std::array<Tiles, kMostPixels>{},
    tiles_of<Dot, 1>(std::make_integer_sequence<int, kTilePixels[1]>()),
    tiles_of<Dot, 2>(std::make_integer_sequence<int, kTilePixels[2]>()),
    std::array<Tiles, kMostPixels>{},
    tiles_of<Dot, 4>(std::make_integer_sequence<int, kTilePixels[4]>())};

// Runs the pixels in tiles that differ by at most one pixel, so that no small tile is left over.
void run(const DotTiles& t, const std::array<Tiles, kMostPixels>& row) {
  const std::int64_t most = kTilePixels[static_cast<std::size_t>(t.vectors)];
  const std::int64_t count = (t.pixels + most - 1) / most;
  const std::int64_t least = t.pixels / count, larger = t.pixels % count;
  if (larger > 0) row[static_cast<std::size_t>(least)](t, 0, larger);
  row[static_cast<std::size_t>(least - 1)](t, larger * (least + 1), count - larger);
}

template <typename Dot>
void run(const DotTiles& t) {
  run(t, kTiles<Same<Dot>>[static_cast<std::size_t>(t.vectors)]);
}

// Runs one vector at a time.
template <typename Dot>
void run_spread(const DotTiles& t) {
  static constexpr auto kRow = tiles_of<Dot, 1>(std::make_integer_sequence<int, kTilePixels[1]>());
  run(t, kRow);
}

}  // namespace

extern const DotSizes dot_sizes;
constinit const DotSizes dot_sizes{
    .width = kWidth, .pixels = {0, kTilePixels[1], kTilePixels[2], 0, kTilePixels[4]}};

void dot_byte_tiles(const DotTiles& t) { run<Bytes>(t); }

void dot_word_tiles(const DotTiles& t) { run<Words>(t); }

void dot_bfloat_tiles(const DotTiles& t) { run<Bfloats>(t); }

void dot_byte_spread_tiles(const DotTiles& t) { run_spread<Spread<Bytes, kWidth>>(t); }

void dot_word_spread_tiles(const DotTiles& t) { run_spread<Spread<Words, 16>>(t); }

void widen_bytes(const std::uint8_t* src, std::int16_t* dst, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) dst[i] = src[i];
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
