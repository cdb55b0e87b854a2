// Depthwise convolution of bytes. The pixels under a row of the kernel, four at a time for each
// lane (or two as words), meet the weights of that row. Such a vector of pixels serves all output
// rows that see it. Words may be paired before, once for all columns and rows that see them.
#include <algorithm>
#include <array>
#include <utility>

#include "kernels/dots/dot_ends.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

constexpr std::int64_t kBits = 4, kVector = kBits * kWidth;

struct Quads {
  static constexpr std::int64_t kPixels = 4, kStep = kWidth;  // bytes from pixel to pixel
  TORCH_BLOCKED_INLINE static Index pixels(const std::uint8_t* src) { return pixel_quads(src); }
  TORCH_BLOCKED_INLINE static Index dot(const Index& sum, const Index& x, const Index& w) {
    return dot_bytes(sum, x, w);
  }
};

struct Pairs {
  static constexpr std::int64_t kPixels = 2, kStep = kWidth;
  TORCH_BLOCKED_INLINE static Index pixels(const std::uint8_t* src) {
    return pixel_pair(src, src + kWidth);
  }
  TORCH_BLOCKED_INLINE static Index dot(const Index& sum, const Index& x, const Index& w) {
    return dot_words(sum, x, w);
  }
};

// Pairs that pair_pixels() has made, one for each pixel.
struct Paired : Pairs {
  static constexpr std::int64_t kStep = kVector;
  TORCH_BLOCKED_INLINE static Index pixels(const std::uint8_t* src) { return Index::loadu(src); }
};

inline void store(const DotDepthwise& d, const Index& sum, std::int64_t at) {
  const Vec value = scaled(*d.channels, sum);
  if (!d.end)
    return store_bytes(bounded(*d.channels, value), static_cast<std::uint8_t*>(d.dst) + at);
  finish_vector<std::uint8_t>(*d.end, *d.channels, value, nullptr,
                              static_cast<char*>(d.dst) + at * (d.is_float32 ? 4 : 1),
                              d.is_float32);
}

// How many output columns a vector of four pixels serves. Three taps leave one pixel free, so the
// next column at stride 1 uses the same pixels with weights that are one pixel later.
template <typename Dot, int kKernel, int kStride>
constexpr int kColumns = Dot::kPixels == 4 && kKernel == 3 && kStride == 1 ? 2 : 1;

// Weights of a kernel, [columns][rows of the kernel][parts].
template <int kColumns, int kWeights>
using WeightsOfColumns = std::array<std::array<Index, kWeights>, kColumns>;

// Adds to the sums [columns][rows] of kColumns columns of kRows output rows. The first tap is at
// src.
template <typename Dot, int kKernel, int kStride, int kRows, int kColumns, int kWeights>
TORCH_BLOCKED_INLINE inline void add_columns(const DotDepthwise& d, const std::uint8_t* src,
                                             const WeightsOfColumns<kColumns, kWeights>& w,
                                             Index (*sums)[kRows]) {
  constexpr int kParts = kWeights / kKernel;
  TORCH_BLOCKED_UNROLL
  for (int r = 0; r < (kRows - 1) * kStride + kKernel; ++r) {
    TORCH_BLOCKED_UNROLL
    for (int q = 0; q < kParts; ++q) {
      const Index pixels = Dot::pixels(src + r * d.src_row + q * Dot::kPixels * Dot::kStep);
      TORCH_BLOCKED_UNROLL
      for (int i = 0; i < kColumns * kRows; ++i) {
        const int column = i / kRows, o = i % kRows, tap = r - o * kStride;
        if (tap >= 0 && tap < kKernel) {
          sums[column][o] = Dot::dot(sums[column][o], pixels, w[column][tap * kParts + q]);
        }
      }
    }
  }
}

// Makes kRows output rows from `row` on. Bytes of four columns are stored at a time, as in
// dots.cpp.
template <typename Dot, int kKernel, int kStride, int kRows>
void rows(const DotDepthwise& d, std::int64_t row) {
  constexpr int kParts = (kKernel + Dot::kPixels - 1) / Dot::kPixels, kWeights = kKernel * kParts;
  constexpr int kTogether = kColumns<Dot, kKernel, kStride>;
  WeightsOfColumns<kTogether, kWeights> w;
  TORCH_BLOCKED_UNROLL
  for (int i = 0; i < kWeights; ++i) {
    w[0][i] = Index::loadu(d.weights + i * kVector);
    if constexpr (kTogether > 1) w[1][i] = w[0][i] << Index(8);
  }
  const DotChannels& c = *d.channels;
  const Index start = Index::loadu(c.start.data());
  const std::uint8_t* src = d.src + row * kStride * d.src_row;
  const std::int64_t to = row * d.dst_row;
  const bool quads = !d.end && c.is_small && d.columns >= 4;
  for (std::int64_t next = 0; quads && next < d.columns; next += 4) {
    const std::int64_t x = std::min(next, d.columns - 4);  // the last quad may make columns again
    Index values[4][kRows];
    TORCH_BLOCKED_UNROLL
    for (int first = 0; first < 4; first += kTogether) {
      TORCH_BLOCKED_UNROLL
      for (int n = 0; n < kTogether * kRows; ++n) values[first + n / kRows][n % kRows] = start;
      add_columns<Dot, kKernel, kStride, kRows, kTogether, kWeights>(
          d, src + (x + first) * kStride * Dot::kStep, w, values + first);
      TORCH_BLOCKED_UNROLL
      for (int n = 0; n < kTogether * kRows; ++n) {
        Index& value = values[first + n / kRows][n % kRows];
        value = nearest(scaled(c, value));
      }
    }
    TORCH_BLOCKED_UNROLL
    for (int o = 0; o < kRows; ++o) {
      store_quad(values[0][o], values[1][o], values[2][o], values[3][o],
                 Index::loadu(c.least_bytes.data()), Index::loadu(c.most_bytes.data()),
                 static_cast<std::uint8_t*>(d.dst) + to + o * d.dst_row + x * kWidth);
    }
  }
  for (std::int64_t x = quads ? d.columns : 0; x < d.columns; ++x) {
    Index sums[1][kRows];
    TORCH_BLOCKED_UNROLL
    for (int o = 0; o < kRows; ++o) sums[0][o] = start;
    add_columns<Dot, kKernel, kStride, kRows, 1, kWeights>(d, src + x * kStride * Dot::kStep,
                                                           {w[0]}, sums);
    TORCH_BLOCKED_UNROLL
    for (int o = 0; o < kRows; ++o) store(d, sums[0][o], to + o * d.dst_row + x * kWidth);
  }
}

// Chooses the rows at a time so that no single row is left over, whose pixels would serve it alone.
template <typename Dot, int kKernel, int kStride>
void all_rows(const DotDepthwise& d) {
  constexpr int kMost = kKernel > 5 ? 2 : 4;
  static constexpr auto kRows = []<int... i>(std::integer_sequence<int, i...>) {
    return std::array{rows<Dot, kKernel, kStride, i + 1>...};
  }(std::make_integer_sequence<int, kMost>());
  const std::int64_t count = (d.rows + kMost - 1) / kMost;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = i * d.rows / count, next = (i + 1) * d.rows / count;
    kRows[static_cast<std::size_t>(next - row - 1)](d, row);
  }
}

// Takes any kernel and stride.
template <typename Dot>
void any_rows(const DotDepthwise& d) {
  const std::int64_t parts = (d.kernel[1] + Dot::kPixels - 1) / Dot::kPixels;
  for (std::int64_t row = 0; row < d.rows; ++row) {
    for (std::int64_t x = 0; x < d.columns; ++x) {
      Index sum = Index::loadu(d.channels->start.data());
      const std::uint8_t* weights = d.weights;
      for (std::int64_t kh = 0; kh < d.kernel[0]; ++kh) {
        const std::uint8_t* src =
            d.src + (row * d.stride[0] + kh) * d.src_row + x * d.stride[1] * Dot::kStep;
        for (std::int64_t q = 0; q < parts; ++q, weights += kVector) {
          sum = Dot::dot(sum, Dot::pixels(src + q * Dot::kPixels * Dot::kStep),
                         Index::loadu(weights));
        }
      }
      store(d, sum, row * d.dst_row + x * kWidth);
    }
  }
}

template <typename Dot>
void depthwise(const DotDepthwise& d) {
#if !defined(CPU_CAPABILITY_DEFAULT)  // the registers of DEFAULT hold no columns of pixels
  const auto is = [&](std::int64_t kernel, std::int64_t stride) {
    return d.kernel == std::array{kernel, kernel} && d.stride == std::array{stride, stride};
  };
  if (is(3, 1)) return all_rows<Dot, 3, 1>(d);
  if (is(3, 2)) return all_rows<Dot, 3, 2>(d);
  if (is(5, 1)) return all_rows<Dot, 5, 1>(d);
  if (is(5, 2)) return all_rows<Dot, 5, 2>(d);
  if (is(7, 1)) return all_rows<Dot, 7, 1>(d);
#endif
  any_rows<Dot>(d);
}

}  // namespace

void dot_byte_depthwise(const DotDepthwise& d) { depthwise<Quads>(d); }

void dot_word_depthwise(const DotDepthwise& d) { depthwise<Pairs>(d); }

void dot_paired_depthwise(const DotDepthwise& d) { depthwise<Paired>(d); }

void pair_pixels(const DotPairs& pairs) {
  const DotPairs p = pairs;  // GCC would load it again after each store of bytes
  alignas(64) std::uint8_t zero[kWidth];
  std::fill_n(zero, kWidth, p.zero);
  const std::int64_t first = std::clamp<std::int64_t>(p.before, 0, p.columns),
                     last = std::clamp<std::int64_t>(p.before + p.src_columns, first, p.columns);
  const auto pixel = [&](std::int64_t column) TORCH_BLOCKED_INLINE {
    const bool inside = p.src && column >= first && column < last;
    return inside ? p.src + (column - p.before) * kWidth : zero;
  };
  const auto pair = [&](std::int64_t i) TORCH_BLOCKED_INLINE {
    pixel_pair(pixel(i), pixel(i + 1)).store(p.dst + i * kVector);
  };
  const std::int64_t inner = p.src ? last - 1 : 0;  // pairs from `first` on lie in src
  std::int64_t i = 0;
  for (; i < std::min(first, p.columns); ++i) pair(i);
  for (; i < inner; ++i) {
    const std::uint8_t* src = p.src + (i - p.before) * kWidth;
    pixel_pair(src, src + kWidth).store(p.dst + i * kVector);
  }
  for (; i < p.columns; ++i) pair(i);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
