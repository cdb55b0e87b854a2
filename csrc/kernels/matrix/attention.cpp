// Softmax of the scores of attention, which stay in L1 or L2 between the two products. The division
// by the sum of powers comes after the second product, where there are fewer numbers.
#include "kernels/matrix/attention.h"

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <limits>

#include "kernels/vector/finish.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// A mask of the scores in a row's last vector. Memory beyond a row is ignored.
Vec lanes_of(std::int64_t count) { return Vec::arange(0.f, 1.f) < Vec(static_cast<float>(count)); }

// Turns a row's scores into x and returns the greatest. It may miss a NaN, which comes back through
// its own power.
float prepare_row(const ScoreRows& p, std::int64_t row, const Vec& last_lanes) {
  const std::int64_t last = (p.count - 1) / kWidth * kWidth;
  float* scores = p.scores + row * p.stride;
  const float* bias = p.bias ? p.bias + row * p.bias_stride : nullptr;
  const Vec scale(p.scale);
  Vec first(kLowest), second(kLowest);
  std::int64_t i = 0;
  const auto next = [&](Vec& greatest, std::int64_t at) {
    Vec x = Vec::loadu(scores + at);
    if (bias) {
      x = at::vec::fmadd(x, scale, Vec::loadu(bias + at));
      x.store(scores + at);
    }
    greatest = at::vec::clamp_min(greatest, x);
  };
  for (; i + kWidth < last; i += 2 * kWidth) {
    next(first, i);
    next(second, i + kWidth);
  }
  if (i < last) next(first, i);
  Vec x = Vec::loadu(scores + last);
  if (bias) x = at::vec::fmadd(x, scale, load(bias + last, p.count - last));
  x = Vec::blendv(Vec(kLowest), x, last_lanes);
  x.store(scores + last);
  const auto greater = [](const Vec& a, const Vec& b) { return at::vec::clamp_min(a, b); };
  return at::vec::vec_reduce_all<float>(greater, greater(greater(first, second), x));
}

}  // namespace

// Finds the greatest of all rows first. Their reductions do not depend on each other, and powers
// need not wait for them. In one pass a row of 196 took 3 times as long.
void powers_of_rows(const ScoreRows& p) {
  const std::int64_t whole = (p.count + kWidth - 1) / kWidth * kWidth;
  const float left = p.bias ? 1.f : p.scale;  // with a bias, x is scaled already
  const Vec scale(left * kLog2E);             // e^x = 2^(x log2 e)
  const Vec last_lanes = lanes_of(p.count - (whole - kWidth));
  for (std::int64_t row = 0; row < p.rows; ++row) {
    p.factors[row] = prepare_row(p, row, last_lanes);
  }
  for (std::int64_t row = 0; row < p.rows; ++row) {
    float* scores = p.scores + row * p.stride;
    // It is subtracted before the product, so that its own power is exactly 1. A product of scores
    // of 1e9 is off by more than the exponents of float32.
    const Vec greatest(p.factors[row]);
    Vec sums(0.f);
    for (std::int64_t i = 0; i < whole; i += kWidth) {
      const Vec power = power_or_zero((Vec::loadu(scores + i) - greatest) * scale);
      power.store(scores + i);
      sums = sums + power;
    }
    p.factors[row] =
        1 / at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, sums);
  }
}

void scale_rows(const ScaledRows& p) {
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const Vec factor(p.factors[row]);
    for (std::int64_t i = 0; i < p.count; i += kWidth) {
      const std::int64_t lanes = std::min(kWidth, p.count - i);
      store(load(p.src + row * p.src_stride + i, lanes) * factor, p.dst + row * p.dst_stride + i,
            lanes);
    }
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
