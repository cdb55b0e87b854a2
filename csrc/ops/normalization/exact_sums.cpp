// Sums over the pixels of a chunk in float64, lane by lane.
#include "ops/normalization/exact_sums.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>

namespace torch_blocked::exact {
namespace {

// Reads the numbers of one lane.
class Lane {
 public:
  Lane(const void* data, at::ScalarType dtype, std::int64_t block, std::int64_t lane)
      : data_(data), is_float_(dtype == at::kFloat), block_(block), lane_(lane) {}
  double operator[](std::int64_t pixel) const {
    const std::int64_t at = pixel * block_ + lane_;
    return is_float_ ? static_cast<const float*>(data_)[at]
                     : static_cast<float>(static_cast<const c10::BFloat16*>(data_)[at]);
  }

 private:
  const void* data_;
  bool is_float_;
  std::int64_t block_, lane_;
};

template <typename F>
double sum_of(std::int64_t pixels, F&& f) {
  double sum = 0;
  for (std::int64_t pixel = 0; pixel < pixels; ++pixel) sum += f(pixel);
  return sum;
}

}  // namespace

bool all_finite(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

void sums(const kernels::PixelSums& p, at::ScalarType dtype, double* sum) {
  for (std::int64_t i = 0; i < p.block; ++i) {
    const Lane src(p.src, dtype, p.block, i);
    sum[i] = sum_of(p.pixels, [&](std::int64_t pixel) { return src[pixel]; });
  }
}

void squares(const kernels::PixelSums& p, double* sum) {
  for (std::int64_t i = 0; i < p.block; ++i) {
    const Lane src(p.src, at::kFloat, p.block, i);
    sum[i] = sum_of(p.pixels, [&](std::int64_t pixel) { return src[pixel] * src[pixel]; });
  }
}

void moments(const kernels::PixelMoments& p, at::ScalarType dtype, double* mean, double* squares) {
  for (std::int64_t i = 0; i < p.block; ++i) {
    const Lane src(p.src, dtype, p.block, i);
    const double center = sum_of(p.pixels, [&](std::int64_t pixel) { return src[pixel]; }) /
                          static_cast<double>(p.pixels);
    mean[i] = center;
    squares[i] = sum_of(p.pixels, [&](std::int64_t pixel) {
      return (src[pixel] - center) * (src[pixel] - center);
    });
  }
}

void gradient_sums(const kernels::PixelGradientSums& p, at::ScalarType dtype, double* sum,
                   double* dot) {
  for (std::int64_t i = 0; i < p.block; ++i) {
    const Lane diff(p.diff_dst, dtype, p.block, i), src(p.src, dtype, p.block, i);
    sum[i] = sum_of(p.pixels, [&](std::int64_t pixel) { return diff[pixel]; });
    dot[i] = sum_of(p.pixels,
                    [&](std::int64_t pixel) { return diff[pixel] * (src[pixel] - p.mean[i]); });
  }
}

}  // namespace torch_blocked::exact
