// Kernels of normalization: sums and moments over pixels, the passes that apply them, and norms of
// whole rows.
#include "kernels/rows/normalization.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/vector/lanes.h"
#include "kernels/vector/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Groups of this many values are summed plainly. The groups are added with Kahan's correction, so
// long sums are as exact as short ones.
constexpr std::int64_t kGroup = 16;

// `excess` is what rounding has added to `total`.
inline void add_exactly(const Vec& added, Vec& total, Vec& excess) {
  const Vec group = added - excess, sum = total + group;
  excess = (sum - total) - group;
  total = sum;
}

// The sums over the pixels of each value of f(pixel). 4 accumulators hide the latency of an
// addition.
template <std::size_t kSums, typename F>
inline std::array<Vec, kSums> sums_over(std::int64_t pixels, F&& f) {
  std::array<Vec, kSums> totals, excesses;
  for (std::size_t j = 0; j < kSums; ++j) totals[j] = excesses[j] = Vec(0.f);
  for (std::int64_t first = 0; first < pixels; first += kGroup) {
    Vec sums[4][kSums];
    for (auto& row : sums) {
      for (Vec& sum : row) sum = Vec(0.f);
    }
    const auto add = [&](std::int64_t i) {
      const std::array<Vec, kSums> more = f(first + i);
      for (std::size_t j = 0; j < kSums; ++j) sums[i % 4][j] = sums[i % 4][j] + more[j];
    };
    if (first + kGroup <= pixels) {
#pragma GCC unroll 16
      for (std::int64_t i = 0; i < kGroup; ++i) add(i);
    } else {
      for (std::int64_t i = 0; first + i < pixels; ++i) add(i);
    }
    for (std::size_t j = 0; j < kSums; ++j) {
      add_exactly((sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]), totals[j], excesses[j]);
    }
  }
  return totals;
}

template <typename F>
inline Vec sum_over(std::int64_t pixels, F&& f) {
  return sums_over<1>(pixels, [&](std::int64_t pixel) { return std::array{f(pixel)}; })[0];
}

// The kernels for either type of numbers: float, or the bits of bfloat16.

template <typename Number>
void sum_pixels_of(const PixelSums& sums) {
  // A copy, whose fields stay in registers. GCC would assume that stores change those of a
  // reference.
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
    // `near` has the rounding error of the sum. A layer norm of equal values would multiply it
    // by 1 / sqrt(eps) = 316. The mean of the deviations from `near` corrects it and their
    // squares.
    const auto [sum, square] = sums_over<2>(p.pixels, [&](std::int64_t pixel) {
      const Vec deviation = value(pixel) - near;
      return std::array{deviation, deviation * deviation};
    });
    const Vec shift = sum / pixels, mean = near + shift;
    const Vec around_mean = at::vec::clamp_min(square - sum * shift, Vec(0.f));
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
    const auto [sum, product] = sums_over<2>(p.pixels, [&](std::int64_t pixel) {
      const Vec from_center = load(src + pixel * p.block + lane, count) - center;
      return std::array{diff(pixel), diff(pixel) * from_center};
    });
    store(sum, p.sum + lane, count);
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

void sum_squares(const PixelSums& sums) {
  const PixelSums p = sums;
  const auto* src = static_cast<const float*>(p.src);
  for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
    const Vec total = sum_over(p.pixels, [&](std::int64_t pixel) {
      const Vec value = load(src + pixel * p.block + lane, count);
      return value * value;
    });
    store(total, p.sum + lane, count);
  });
}

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

constexpr int kAllLanes = static_cast<int>((std::int64_t{1} << kWidth) - 1);

// Normalizes as many rows at a time as a vector has lanes. Their sums over the channels are the
// lanes of one vector, from which moments and scales are made at once. One row at a time would take
// four times as long if a row has two vectors. kVectors is the vectors of a row, or 0 if known only
// at run time. kPadded: the last vector is whole in memory, with zeros beyond the channels.
template <bool kPadded, int kVectors>
class RowGroup {
 public:
  RowGroup(const RowNormalization& p, std::int64_t first, std::int64_t rows)
      : p_(p),
        rows_(rows),
        first_(first),
        vectors_(kVectors ? kVectors : (p.channels + kWidth - 1) / kWidth),
        last_(p.channels - (vectors_ - 1) * kWidth),
        mask_(lanes_mask(last_)) {}

  void normalize() {
    const Vec channels(static_cast<float>(p_.channels));
    Vec sums[kWidth], squares[kWidth];
    for (std::int64_t row = 0; row < kWidth; ++row) {
      Vec sum(0.f);
      for (std::int64_t i = 0; i < vectors_; ++i) sum = sum + value(row, i);
      sums[row] = sum;
    }
    // `near` has the rounding error of the sum. A norm of equal values would multiply it by 1 /
    // sqrt(eps) = 316. The mean of the deviations from `near` corrects it and their squares.
    const Vec near = lane_sums(sums) / channels;
    near.store(mean_);
    for (std::int64_t row = 0; row < kWidth; ++row) {
      const Vec center(mean_[row]);
      Vec sum(0.f), square(0.f);
      for (std::int64_t i = 0; i < vectors_; ++i) {
        Vec deviation = value(row, i) - center;
        if (i + 1 == vectors_) deviation = deviation & mask_;
        sum = sum + deviation;
        square = at::vec::fmadd(deviation, deviation, square);
      }
      sums[row] = sum;
      squares[row] = square;
    }
    const Vec shift = lane_sums(sums) / channels;
    const Vec variance =
        at::vec::clamp_min(lane_sums(squares) / channels - shift * shift, Vec(0.f));
    const Vec mean = near + shift;
    mean.store(mean_);
    (Vec(1.f) / (variance + Vec(static_cast<float>(p_.eps))).sqrt()).store(scale_);
    if (((mean - mean) + (variance - variance)).zero_mask() != kAllLanes) take_anew(variance);
    for (std::int64_t i = 0; i < vectors_; ++i) store_vector(i);
  }

 private:
  // Missing rows repeat the last one.
  std::int64_t offset(std::int64_t row, std::int64_t vector) const {
    return (first_ + std::min(row, rows_ - 1)) * p_.row_step + vector * p_.vector_step;
  }
  std::int64_t count(std::int64_t i) const { return i + 1 < vectors_ ? kWidth : last_; }
  // Recomputes rows whose moments are not finite in float32. If squares really overflow float32,
  // a row is 0, as in ATen. Deviations from its mean may be infinite, and no factor turns
  // infinity into 0.
  void take_anew(const Vec& variance) {
    alignas(64) float variances[kWidth];
    variance.store(variances);
    for (std::int64_t row = 0; row < rows_; ++row) {
      if (std::isfinite(mean_[row]) && std::isfinite(variances[row])) continue;
      const auto sum_of = [&](auto&& f) {
        double sum = 0;
        for (std::int64_t i = 0; i < p_.channels; ++i) {
          sum += f(static_cast<double>(p_.src[offset(row, i / kWidth) + i % kWidth]));
        }
        return sum;
      };
      const auto channels = static_cast<double>(p_.channels);
      const double mean = sum_of([](double x) { return x; }) / channels;
      const double squares = sum_of([mean](double x) { return (x - mean) * (x - mean); });
      const bool is_huge = squares > std::numeric_limits<float>::max();
      mean_[row] = is_huge ? 0 : static_cast<float>(mean);
      scale_[row] = is_huge ? 0 : static_cast<float>(1 / std::sqrt(squares / channels + p_.eps));
    }
  }
  Vec value(std::int64_t row, std::int64_t i) const {
    return load(p_.src + offset(row, i), kPadded ? kWidth : count(i));
  }

  void store_vector(std::int64_t i) const {
    const Vec weight = p_.weight ? load(p_.weight + i * kWidth, count(i)) : Vec(1.f);
    const Vec bias = p_.bias ? load(p_.bias + i * kWidth, count(i)) : Vec(0.f);
    for (std::int64_t row = 0; row < rows_; ++row) {
      const Vec normal = (value(row, i) - Vec(mean_[row])) * Vec(scale_[row]);
      Vec result = at::vec::fmadd(normal, weight, bias);
      if (kPadded && i + 1 == vectors_) result = result & mask_;
      store(result, p_.dst + offset(row, i), kPadded ? kWidth : count(i));
    }
  }

  const RowNormalization p_;
  const std::int64_t rows_, first_, vectors_, last_;  // last_: channels of the last vector
  const Vec mask_;
  alignas(64) float mean_[kWidth], scale_[kWidth];
};

template <bool kPadded, int kVectors>
void normalize_groups(const RowNormalization& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; row += kWidth) {
    RowGroup<kPadded, kVectors>(p, row, std::min(kWidth, end - row)).normalize();
  }
}

template <bool kPadded>
void normalize_each(const RowNormalization& p, std::int64_t begin, std::int64_t end) {
  static constexpr std::array kByVectors{normalize_groups<kPadded, 0>, normalize_groups<kPadded, 1>,
                                         normalize_groups<kPadded, 2>, normalize_groups<kPadded, 3>,
                                         normalize_groups<kPadded, 4>};
  const auto vectors = static_cast<std::size_t>((p.channels + kWidth - 1) / kWidth);
  kByVectors[vectors < kByVectors.size() ? vectors : 0](p, begin, end);
}

}  // namespace

void normalize_rows(const RowNormalization& rows, std::int64_t begin, std::int64_t end) {
  normalize_each<false>(rows, begin, end);
}

void normalize_pixels(const RowNormalization& pixels, std::int64_t begin, std::int64_t end) {
  normalize_each<true>(pixels, begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
