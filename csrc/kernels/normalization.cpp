#include "kernels/normalization.h"

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <cmath>

#include "kernels/lanes.h"
#include "kernels/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The sum of f(pixel) over the pixels. Groups of 16 in 4 accumulators, which hide the latency of an
// addition; the groups with Kahan's correction, so that long sums are as exact as short ones.
template <typename F>
inline Vec sum_over(std::int64_t pixels, F&& f) {
  Vec total(0.f), excess(0.f);  // excess: what rounding added to total
  for (std::int64_t first = 0; first < pixels; first += 16) {
    Vec sums[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
    if (first + 16 <= pixels) {
      for (std::int64_t i = 0; i < 16; ++i) sums[i % 4] = sums[i % 4] + f(first + i);
    } else {
      for (std::int64_t pixel = first; pixel < pixels; ++pixel) sums[0] = sums[0] + f(pixel);
    }
    const Vec group = ((sums[0] + sums[1]) + (sums[2] + sums[3])) - excess;
    const Vec sum = total + group;
    excess = (sum - total) - group;
    total = sum;
  }
  return total;
}

// The kernels for either type of numbers: float, or the bits of bfloat16.

template <typename Number>
void sum_pixels_of(const PixelSums& sums) {
  // A copy, whose fields stay in registers: through a reference, stores to memory might change
  // them.
  const PixelSums p = sums;
  const auto* src = static_cast<const Number*>(p.src);
  for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
    const Vec total = sum_over(
        p.pixels, [&](std::int64_t pixel) { return load(src + pixel * p.block + lane, count); });
    store(total, p.sum + lane, count);
  });
}

template <typename Number>
void moments_of(const PixelMoments& moments) {
  const PixelMoments p = moments;
  const auto* src = static_cast<const Number*>(p.src);
  for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
    const auto value = [&](std::int64_t pixel) {
      return load(src + pixel * p.block + lane, count);
    };
    const Vec pixels(static_cast<float>(p.pixels));
    const Vec near = sum_over(p.pixels, value) / pixels;
    // `near` has the rounding error of the sum, which a layer norm of equal values would multiply
    // by 1 / sqrt(eps) = 316. The mean of the deviations from it corrects that.
    const auto from_near = [&](std::int64_t pixel) { return value(pixel) - near; };
    const Vec mean = near + sum_over(p.pixels, from_near) / pixels;
    const Vec around_mean = sum_over(p.pixels, [&](std::int64_t pixel) {
      const Vec deviation = value(pixel) - mean;
      return deviation * deviation;
    });
    store(mean, p.mean + lane, count);
    store(around_mean, p.squares + lane, count);
  });
}

template <typename Number>
void normalize_of(const Normalization& normalization, std::int64_t begin, std::int64_t end) {
  const Normalization p = normalization;
  const auto* src = static_cast<const Number*>(p.src);
  auto* dst = static_cast<Number*>(p.dst);
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t period = row % p.periods * p.block, first = row * p.pixels * p.block;
    for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
      const Vec mean = load(p.mean + period + lane, count);
      const Vec scale = load(p.scale + period + lane, count);
      const Vec shift = load(p.shift + period + lane, count);
      for (std::int64_t pixel = 0; pixel < p.pixels; ++pixel) {
        const std::int64_t offset = first + pixel * p.block + lane;
        const Vec deviation = load(src + offset, count) - mean;
        store(at::vec::fmadd(deviation, scale, shift), dst + offset, count);
      }
    });
  }
}

template <typename Number>
void gradient_sums_of(const PixelGradientSums& sums) {
  const PixelGradientSums p = sums;
  const auto* src = static_cast<const Number*>(p.src);
  const auto* diff_dst = static_cast<const Number*>(p.diff_dst);
  for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
    const auto diff = [&](std::int64_t pixel) {
      return load(diff_dst + pixel * p.block + lane, count);
    };
    const Vec center = load(p.mean + lane, count);
    store(sum_over(p.pixels, diff), p.sum + lane, count);
    const Vec product = sum_over(p.pixels, [&](std::int64_t pixel) {
      return diff(pixel) * (load(src + pixel * p.block + lane, count) - center);
    });
    store(product, p.dot + lane, count);
  });
}

template <typename Number>
void normalization_gradient_of(const NormalizationGradient& gradient, std::int64_t begin,
                               std::int64_t end) {
  const NormalizationGradient p = gradient;
  const auto* src = static_cast<const Number*>(p.src);
  const auto* diff_dst = static_cast<const Number*>(p.diff_dst);
  auto* diff_src = static_cast<Number*>(p.diff_src);
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t period = row % p.periods * p.block, first = row * p.pixels * p.block;
    for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
      const Vec a = load(p.diff_scale + period + lane, count);
      const Vec b = load(p.src_scale + period + lane, count);
      const Vec c = load(p.shift + period + lane, count);
      const Vec center = load(p.mean + period + lane, count);
      for (std::int64_t pixel = 0; pixel < p.pixels; ++pixel) {
        const std::int64_t offset = first + pixel * p.block + lane;
        const Vec deviation = load(src + offset, count) - center;
        const Vec diff = at::vec::fmadd(load(diff_dst + offset, count), a, c);
        store(at::vec::fmadd(deviation, b, diff), diff_src + offset, count);
      }
    });
  }
}

}  // namespace

void sum_pixels(const PixelSums& sums) { sum_pixels_of<float>(sums); }
void sum_pixels_bfloats(const PixelSums& sums) { sum_pixels_of<std::uint16_t>(sums); }

void moments(const PixelMoments& moments) { moments_of<float>(moments); }
void moments_bfloats(const PixelMoments& moments) { moments_of<std::uint16_t>(moments); }

void gradient_sums(const PixelGradientSums& sums) { gradient_sums_of<float>(sums); }
void gradient_sums_bfloats(const PixelGradientSums& sums) { gradient_sums_of<std::uint16_t>(sums); }

void normalize(const Normalization& normalization, std::int64_t begin, std::int64_t end) {
  normalize_of<float>(normalization, begin, end);
}
void normalize_bfloats(const Normalization& normalization, std::int64_t begin, std::int64_t end) {
  normalize_of<std::uint16_t>(normalization, begin, end);
}

void normalization_gradient(const NormalizationGradient& gradient, std::int64_t begin,
                            std::int64_t end) {
  normalization_gradient_of<float>(gradient, begin, end);
}
void normalization_gradient_bfloats(const NormalizationGradient& gradient, std::int64_t begin,
                                    std::int64_t end) {
  normalization_gradient_of<std::uint16_t>(gradient, begin, end);
}

namespace {

// kRows rows, which wait for nothing but their own sums. kPadded: the last vector of a row is a
// whole one in memory, with zeros beyond the channels.
template <bool kPadded, int kRows>
void normalize_some(const RowNormalization& p, const float* src, float* dst) {
  const std::int64_t vectors = (p.channels + kWidth - 1) / kWidth;
  const Vec last = lanes_mask(p.channels - (vectors - 1) * kWidth);
  const auto count = [&](std::int64_t i) { return std::min(kWidth, p.channels - i * kWidth); };
  const auto mean_of = [&](auto&& value) {
    const Vec sums = sum_over(vectors, value);
    return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, sums) /
           static_cast<float>(p.channels);
  };
  const auto value = [&](int row, std::int64_t i) {
    return load(src + row * p.row_step + i * p.vector_step, kPadded ? kWidth : count(i));
  };
  const auto from = [&](int row, std::int64_t i, const Vec& mean) {
    return i + 1 < vectors ? value(row, i) - mean : (value(row, i) - mean) & last;
  };
  float near[kRows], mean[kRows], scale[kRows];
  for (int row = 0; row < kRows; ++row) {
    near[row] = mean_of([&](std::int64_t i) { return value(row, i); });
  }
  for (int row = 0; row < kRows; ++row) {  // and what rounding took from it, as in moments()
    mean[row] = near[row] + mean_of([&](std::int64_t i) { return from(row, i, Vec(near[row])); });
  }
  for (int row = 0; row < kRows; ++row) {
    const float variance = mean_of([&](std::int64_t i) {
      const Vec deviation = from(row, i, Vec(mean[row]));
      return deviation * deviation;
    });
    scale[row] = static_cast<float>(1 / std::sqrt(variance + p.eps));
  }
  for (std::int64_t i = 0; i < vectors; ++i) {
    const Vec weight = p.weight ? load(p.weight + i * kWidth, count(i)) : Vec(1.f);
    const Vec bias = p.bias ? load(p.bias + i * kWidth, count(i)) : Vec(0.f);
    for (int row = 0; row < kRows; ++row) {
      Vec result = (value(row, i) - Vec(mean[row])) * Vec(scale[row]) * weight + bias;
      if (kPadded && i + 1 == vectors) result = result & last;
      store(result, dst + row * p.row_step + i * p.vector_step, kPadded ? kWidth : count(i));
    }
  }
}

template <bool kPadded>
void normalize_each(const RowNormalization& p, std::int64_t begin, std::int64_t end) {
  constexpr int kRows = 4;
  const float* src = p.src + begin * p.row_step;
  float* dst = p.dst + begin * p.row_step;
  std::int64_t row = begin;
  for (; row + kRows <= end; row += kRows, src += kRows * p.row_step, dst += kRows * p.row_step) {
    normalize_some<kPadded, kRows>(p, src, dst);
  }
  for (; row < end; ++row, src += p.row_step, dst += p.row_step) {
    normalize_some<kPadded, 1>(p, src, dst);
  }
}

}  // namespace

void normalize_rows(const RowNormalization& rows, std::int64_t begin, std::int64_t end) {
  normalize_each<false>(rows, begin, end);
}

void normalize_pixels(const RowNormalization& pixels, std::int64_t begin, std::int64_t end) {
  normalize_each<true>(pixels, begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
