// The gradient of a depthwise weight: sums over pixels of diff_dst times the src under each tap.
#include "kernels/grouped/depthwise_gradient.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The taps along a row that are summed at once. One load of diff_dst serves them all, and their
// accumulators fit in the 16 registers of AVX2.
constexpr int kMaxTaps = 8;

// Output pixels [begin, end) of a row that see the input under tap `kw`.
struct Range {
  std::int64_t begin, end;
};

Range pixels_of(const DepthwiseGradient& g, std::int64_t kw) {
  const std::int64_t shift = kw * g.dilation[2] - g.padding[2];  // input = output * stride + shift
  const std::int64_t begin = shift >= 0 ? 0 : (-shift + g.stride[2] - 1) / g.stride[2];
  const std::int64_t last = g.in[2] - 1 - shift;
  const std::int64_t end = last < 0 ? 0 : std::min(g.out[2], last / g.stride[2] + 1);
  return {begin, std::max(begin, end)};
}

// One vector of lanes: adds the products of an output row with an input row under the taps
// [first, first + kTaps) to sums [kTaps, block].
template <int kTaps>
void add_taps(const DepthwiseGradient& g, const float* src, const float* diff_dst,
              std::int64_t first, std::int64_t count, float* sums) {
  // src of output pixel 0 under tap 0
  const float* origin = src + (first * g.dilation[2] - g.padding[2]) * g.block;
  const std::int64_t step = g.stride[2] * g.block, tap_step = g.dilation[2] * g.block;
  Vec acc[kTaps];
#pragma GCC unroll 8
  for (int tap = 0; tap < kTaps; ++tap) acc[tap] = Vec(0.f);
  // First the pixels at which all taps see the input, then the others of each tap.
  const std::int64_t begin = pixels_of(g, first).begin;
  const std::int64_t end = std::max(begin, pixels_of(g, first + kTaps - 1).end);
  for (std::int64_t pixel = begin; pixel < end; ++pixel) {
    const Vec diff = load(diff_dst + pixel * g.block, count);
    const float* in = origin + pixel * step;
#pragma GCC unroll 8
    for (int tap = 0; tap < kTaps; ++tap) {
      acc[tap] = at::vec::fmadd(diff, load(in + tap * tap_step, count), acc[tap]);
    }
  }
  for (int tap = 0; tap < kTaps; ++tap) {
    const Range range = pixels_of(g, first + tap);
    Vec sum = load(sums + tap * g.block, count) + acc[tap];
    for (const Range& rest :
         {Range{range.begin, std::min(begin, range.end)}, Range{end, range.end}}) {
      for (std::int64_t pixel = rest.begin; pixel < rest.end; ++pixel) {
        const Vec diff = load(diff_dst + pixel * g.block, count);
        sum = at::vec::fmadd(diff, load(origin + pixel * step + tap * tap_step, count), sum);
      }
    }
    store(sum, sums + tap * g.block, count);
  }
}

using AddTaps = void (*)(const DepthwiseGradient&, const float*, const float*, std::int64_t,
                         std::int64_t, float*);

template <int... i>
constexpr std::array<AddTaps, sizeof...(i)> taps_of(std::integer_sequence<int, i...>) {
  return {add_taps<i + 1>...};
}

// add_taps<1> .. add_taps<kMaxTaps>
constexpr auto kAddTaps = taps_of(std::make_integer_sequence<int, kMaxTaps>());

// Adds the products of output row (od, oh) with every input row under the kernel.
void add_row(const DepthwiseGradient& g, std::int64_t od, std::int64_t oh, std::int64_t lane,
             std::int64_t count) {
  const float* diff_dst = g.diff_dst + (od * g.out[1] + oh) * g.out[2] * g.block + lane;
  float* sums = g.diff_weights + lane;  // [KD, KH, KW, block]
  for (std::int64_t kd = 0; kd < g.kernel[0]; ++kd) {
    const std::int64_t id = od * g.stride[0] - g.padding[0] + kd * g.dilation[0];
    for (std::int64_t kh = 0; kh < g.kernel[1]; ++kh, sums += g.kernel[2] * g.block) {
      const std::int64_t ih = oh * g.stride[1] - g.padding[1] + kh * g.dilation[1];
      if (id < 0 || id >= g.in[0] || ih < 0 || ih >= g.in[1]) continue;
      const float* src = g.src + (id * g.in[1] + ih) * g.in[2] * g.block + lane;
      for (std::int64_t kw = 0; kw < g.kernel[2]; kw += kMaxTaps) {
        const auto taps = std::min<std::int64_t>(kMaxTaps, g.kernel[2] - kw);
        kAddTaps[static_cast<std::size_t>(taps - 1)](g, src, diff_dst, kw, count,
                                                     sums + kw * g.block);
      }
    }
  }
}

}  // namespace

void depthwise_gradient(const DepthwiseGradient& g) {
  for_lanes(g.block, [&](std::int64_t lane, std::int64_t count) {
    for (std::int64_t od = 0; od < g.out[0]; ++od) {
      for (std::int64_t oh = 0; oh < g.out[1]; ++oh) add_row(g, od, oh, lane, count);
    }
  });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
