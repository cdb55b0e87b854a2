// The row kernel of depthwise and grouped convolutions. It keeps some pixels of an output row, for
// one vector of output channels, in registers.
//
// A Source says how input lanes reach output lanes, which is where depthwise and grouped
// convolutions differ: as they are, broadcast, or permuted from the vectors that hold the group.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "kernels/grouped/grouped.h"
#include "kernels/vector/short_lanes.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// Output rows of one channel block for which the same taps see the input. src and dst are float32
// or bfloat16. Pointers are those of the first row.
template <typename Number>
struct GroupedRows {
  const Number* src;                       // input pixel 0 under the first tap that sees the input
  const float* weights;                    // [inputs, KW, kWidth] of that tap
  const LaneSource* lanes;                 // [inputs, sources]
  Number* dst;                             // output pixel 0
  std::int64_t count, src_step, dst_step;  // rows, and elements from one to the next
  std::int64_t kd, kh;                     // the number of taps that see the input, along d and h
  std::int64_t src_d, src_h, weights_d, weights_h;  // elements from a tap to the next
  std::int64_t src_plane;                           // and from a block of src to the next
  Vec bias, lanes_mask;                             // without the tail
  Vec least, greatest;                              // the clamp, if `clamps`
  bool clamps;                                      // the epilogue is no more than a clamp
  float* sums;  // if not `clamps`: [rows, pixels from `first` on, kWidth], for the epilogue
  std::int64_t first, sums_step;
};

// The distances between the pixels of a Source in a blocked format, which are constants.
struct InBlocks {
  static constexpr std::int64_t src_pixel(const GroupedConvolution&) { return kWidth; }
  static constexpr std::int64_t dst_pixel(const GroupedConvolution&) { return kWidth; }
};

// {f(0), f(1), ...}. GCC keeps an array in registers if its values are given at construction.
template <int kCount, typename F>
TORCH_BLOCKED_INLINE inline std::array<Vec, kCount> vectors(F&& f) {
  return [&]<int... i>(std::integer_sequence<int, i...>) TORCH_BLOCKED_INLINE {
    return std::array<Vec, kCount>{f(i)...};
  }(std::make_integer_sequence<int, kCount>());
}

// The range of existing input pixels, counted from the one under tap 0 of a tile's first output.
struct InputPixels {
  std::int64_t begin, end;
};

// Adds one kernel row to the sums of kPixels outputs. An input vector is loaded once for all kTaps.
// kTaps 0 takes any number of taps, stride and dilation, but loads an input vector for each
// product. Unless kInside, taps beyond the ends of the input are skipped.
template <int kPixels, int kTaps, int kStride, bool kInside, typename Source>
TORCH_BLOCKED_INLINE inline void add_taps(const GroupedAxis& w, InputPixels input,
                                          const Source& source, const float* weights,
                                          std::array<Vec, kPixels>& sums) {
  const auto outside = [&](std::int64_t pixel) TORCH_BLOCKED_INLINE {
    return !kInside && (pixel < input.begin || pixel >= input.end);
  };
  if constexpr (kTaps > 0) {
    const auto taps = vectors<kTaps>(
        [&](int tap) TORCH_BLOCKED_INLINE { return Vec::loadu(weights + tap * kWidth); });
    TORCH_BLOCKED_UNROLL
    for (int pixel = 0; pixel < (kPixels - 1) * kStride + kTaps; ++pixel) {
      if (outside(pixel)) continue;
      const Vec x = in_register(source(pixel));
      TORCH_BLOCKED_UNROLL
      for (int tap = 0; tap < kTaps; ++tap) {
        const int output = (pixel - tap) / kStride;
        if (pixel >= tap && (pixel - tap) % kStride == 0 && output < kPixels) {
          sums[output] = at::vec::fmadd(x, taps[tap], sums[output]);
        }
      }
    }
  } else {
    for (std::int64_t tap = 0; tap < w.kernel; ++tap, weights += kWidth) {
      const Vec weight = Vec::loadu(weights);
      TORCH_BLOCKED_UNROLL
      for (int i = 0; i < kPixels; ++i) {
        const std::int64_t pixel = tap * w.dilation + i * w.stride;
        if (outside(pixel)) continue;
        sums[i] = at::vec::fmadd(source(pixel), weight, sums[i]);
      }
    }
  }
}

// Adds all taps to the sums of kPixels outputs. The first tap that sees the input reads src_d.
template <typename Source, int kPixels, int kTaps, int kStride, bool kInside,
          typename Number = Source::Number>
TORCH_BLOCKED_INLINE inline void add_rows(const GroupedConvolution& g,
                                          const GroupedRows<Number>& rows, InputPixels pixels,
                                          const Number* src_d, std::array<Vec, kPixels>& sums) {
  const GroupedAxis& w = g.axes[2];
  const float* weights_d = rows.weights;
  for (std::int64_t kd = rows.kd; kd > 0; --kd, src_d += rows.src_d, weights_d += rows.weights_d) {
    const Number* src = src_d;
    const float* weights_h = weights_d;
    for (std::int64_t kh = rows.kh; kh > 0; --kh, src += rows.src_h, weights_h += rows.weights_h) {
      const float* weights = weights_h;
      const std::int64_t inputs = Source::kOneInput ? 1 : g.inputs;
      for (std::int64_t input = 0; input < inputs; ++input, weights += w.kernel * kWidth) {
        const Source source(g, rows, input, src);
        add_taps<kPixels, kTaps, kStride, kInside>(w, pixels, source, weights, sums);
      }
    }
  }
}

// Output pixels [first, first + count) of the rows, count <= kPixels.
template <typename Source, int kPixels, int kTaps, int kStride, bool kInside,
          typename Number = Source::Number>
void grouped_tile(const GroupedConvolution& g, const GroupedRows<Number>& rows, std::int64_t first,
                  std::int64_t count) {
  const GroupedAxis& w = g.axes[2];
  const std::int64_t origin = first * w.stride + w.origin;
  const InputPixels pixels{-origin, w.in - origin};
  const std::int64_t step = w.dst_step * Source::dst_pixel(g);
  const Number* src = rows.src + origin * Source::src_pixel(g);
  Number* dst = rows.dst + first * step;
  float* to = rows.sums + (first - rows.first) * kWidth;
  for (std::int64_t row = 0; row < rows.count; ++row, src += rows.src_step) {
    const Vec bias = rows.bias;
    auto sums = vectors<kPixels>([&](int) { return bias; });
    add_rows<Source, kPixels, kTaps, kStride, kInside>(g, rows, pixels, src, sums);
    if (rows.clamps) {
      const Vec least = rows.least, greatest = rows.greatest, mask = rows.lanes_mask;
      TORCH_BLOCKED_UNROLL
      for (int i = 0; i < kPixels; ++i) {
        if (i >= count) break;
        const Vec value = at::vec::clamp(sums[i], least, greatest);
        store_lanes<kWidth>(Source::kZeroTail ? value : value & mask, dst + i * step);
      }
      dst += rows.dst_step;
    } else {
      TORCH_BLOCKED_UNROLL
      for (int i = 0; i < kPixels; ++i) sums[i].store(to + i * kWidth);
      to += rows.sums_step;
    }
  }
}

template <typename Number>
using GroupedTile = void (*)(const GroupedConvolution&, const GroupedRows<Number>&, std::int64_t,
                             std::int64_t);

// The output pixels of a tile. 7 and 14 divide the maps of most networks. 32 (16) registers hold
// the sums, the taps of a kernel row and an input vector.
#if defined(CPU_CAPABILITY_AVX512)
inline constexpr std::array kTilePixels{1, 4, 7, 10, 14};
#elif defined(CPU_CAPABILITY_AVX2)
inline constexpr std::array kTilePixels{1, 4, 7, 10};
#else
inline constexpr std::array kTilePixels{1, 4};  // not chosen without FMA, so small rather than fast
#endif

// [size][inside]
template <typename Number>
using GroupedTiles = std::array<std::array<GroupedTile<Number>, 2>, kTilePixels.size()>;

// The tiles for kernel rows of `taps` taps at `stride`. 0 and 0: for any.
template <typename Number>
struct GroupedKernel {
  std::int64_t taps, stride;
  GroupedTiles<Number> tiles;
};

template <typename Source, int kTaps, int kStride>
constexpr GroupedKernel<typename Source::Number> grouped_kernel() {
  return []<std::size_t... i>(std::index_sequence<i...>) {
    return GroupedKernel<typename Source::Number>{
        kTaps,
        kStride,
        {{{grouped_tile<Source, kTilePixels[i], kTaps, kStride, false>,
           grouped_tile<Source, kTilePixels[i], kTaps, kStride, true>}...}}};
  }(std::make_index_sequence<kTilePixels.size()>());
}

// Runs parts [begin, end) by the first of `kernels` that fits. The last one must fit any.
template <typename Number>
void grouped_parts(const GroupedConvolution& g, const GroupedKernel<Number>* kernels,
                   std::int64_t begin, std::int64_t end);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
