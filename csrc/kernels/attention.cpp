// Softmax of the scores of attention, which lie in L1 or L2 between the two products. The powers
// are divided by their sum after the second product, where there are fewer numbers.
#include "kernels/attention.h"

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <limits>

#include "kernels/finish.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Below 2^kLeast powers are denormal, for which Intel's cores need assists: with masks of -100 the
// attention of a Swin-Tiny took twice as long. Beside the largest power, 1, they are nothing. NaN
// stays.
constexpr float kLeast = -126;

// scores = scale scores + bias
void add_bias(const ScoreRows& p, float* scores, const float* bias) {
  const Vec scale(p.scale);
  for (std::int64_t i = 0; i < p.count; i += kWidth) {
    const Vec added = load(bias + i, std::min(kWidth, p.count - i));
    at::vec::fmadd(Vec::loadu(scores + i), scale, added).store(scores + i);
  }
}

// Of numbers; a NaN may get lost, and comes back with its own power.
float greatest_of(const float* scores, std::int64_t whole) {
  Vec first(kLowest), second(kLowest);
  std::int64_t i = 0;
  for (; i + kWidth < whole; i += 2 * kWidth) {
    first = at::vec::clamp_min(first, Vec::loadu(scores + i));
    second = at::vec::clamp_min(second, Vec::loadu(scores + i + kWidth));
  }
  if (i < whole) first = at::vec::clamp_min(first, Vec::loadu(scores + i));
  return at::vec::vec_reduce_all<float>(
      [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); },
      at::vec::maximum(first, second));
}

}  // namespace

void powers_of_rows(const ScoreRows& p) {
  const std::int64_t whole = (p.count + kWidth - 1) / kWidth * kWidth;
  const float left = p.bias ? 1.f : p.scale;  // of the scale, once there is a bias in the scores
  const Vec scale(left * kLog2E);             // e^x = 2^(x log2 e)
  for (std::int64_t row = 0; row < p.rows; ++row) {
    float* scores = p.scores + row * p.stride;
    if (p.bias) add_bias(p, scores, p.bias + row * p.bias_stride);
    std::fill(scores + p.count, scores + whole, kLowest);  // what lies behind a row does not count
    const Vec shift(-left * kLog2E * greatest_of(scores, whole));
    Vec sums(0.f);
    for (std::int64_t i = 0; i < whole; i += kWidth) {
      const Vec exponent = at::vec::fmadd(Vec::loadu(scores + i), scale, shift);
      const Vec is_less = exponent < Vec(kLeast);
      const Vec power =
          Vec::blendv(power_of_two(Vec::blendv(exponent, Vec(kLeast), is_less)), Vec(0.f), is_less);
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
