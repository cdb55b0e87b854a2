// The sums of Strassen's product before and after its products. With quarters of src, weights and
// dst
//   A = [a b; c d], B = [e f; g h]:
//   1: (a + d)(e + h)   2: (c + d) e   3: a (f - h)   4: d (g - e)   5: (a + b) h
//   6: (c - a)(e + f)   7: (b - d)(g + h)
//   A B = [1 + 4 - 5 + 7, 3 + 5; 2 + 4, 1 - 2 + 3 + 6]
// Winograd's form has 15 sums instead of 18, but larger errors. The sums do not dominate the time
// here.
#include "kernels/matrix/strassen.h"

#include <algorithm>
#include <array>

#include "kernels/vector/finish.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

void strassen_split(const StrassenSplit& s) {
  const std::int64_t stride = s.vectors * s.rows * kWidth;  // of a left side
  float* to = s.to;
  for (std::int64_t vector = 0; vector < s.vectors; ++vector) {
    const std::int64_t left = vector * s.vector_step, right = (s.vectors + vector) * s.vector_step;
    const bool has_right = s.vectors + vector < s.all_vectors;
    for (std::int64_t row = 0; row < s.rows; ++row, to += kWidth) {
      const float *upper = s.upper + row * s.row_step, *lower = s.lower + row * s.row_step;
      // A large src comes from memory, and its runs are too short for the hardware
      // prefetcher.
      for (const float* next : {upper + left, upper + right, lower + left, lower + right}) {
        __builtin_prefetch(next + s.vector_step, 0, 2);
      }
      const Vec a = Vec::loadu(upper + left), c = Vec::loadu(lower + left), zero(0.f);
      const Vec b = has_right ? Vec::loadu(upper + right) : zero;
      const Vec d = has_right ? Vec::loadu(lower + right) : zero;
      const std::array<Vec, kStrassenProducts> sums{a + d, c + d, a, d, a + b, c - a, b - d};
      for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i].store(to + static_cast<std::int64_t>(i) * stride);
      }
    }
  }
}

namespace {

// Makes one vector of columns, in both halves.
template <typename Finish>
void join_vector(const StrassenJoin& j, std::int64_t vector, const Finish& finish) {
  const std::int64_t wide = j.vectors * kWidth, stride = j.rows * wide;  // of a row, of a product
  const std::int64_t first = vector * kWidth, half = j.half;
  const auto lanes = [&](std::int64_t channel) {
    return std::clamp<std::int64_t>(j.channels - channel, 0, kWidth);
  };
  const bool has_right = vector < j.right_vectors;
  const std::int64_t left_lanes = lanes(first), right_lanes = has_right ? lanes(half + first) : 0;
  const auto bias = [&](std::int64_t channel, std::int64_t count) {
    return j.bias && count > 0 ? Vec::loadu(j.bias + channel, count) : Vec(0.f);
  };
  const Vec left_bias = bias(first, left_lanes), right_bias = bias(half + first, right_lanes);
  const Vec left_mask = lanes_mask(left_lanes), right_mask = lanes_mask(right_lanes);
  float* left = j.dst + vector * j.vector_step;
  const float* from = j.products + first;
  for (std::int64_t row = 0; row < j.rows; ++row, left += j.row_step, from += wide) {
    std::array<Vec, kStrassenProducts> p;
    for (std::size_t i = 0; i < p.size(); ++i) {
      p[i] = Vec::loadu(from + static_cast<std::int64_t>(i) * stride);
    }
    const auto put = [&](const Vec& sum, float* dst, const Vec& mask) {
      (finish(sum, dst) & mask).store(dst);
    };
    const bool is_lower = row >= j.common;
    put((p[0] + p[3]) + (p[6] - p[4]) + left_bias, left, left_mask);
    if (is_lower) put(p[1] + p[3] + left_bias, left + j.lower, left_mask);
    if (!has_right) continue;
    put(p[2] + p[4] + right_bias, left + j.right, right_mask);
    if (is_lower) {
      put((p[0] - p[1]) + (p[2] + p[5]) + right_bias, left + j.lower + j.right, right_mask);
    }
  }
}

}  // namespace

void strassen_join(const StrassenJoin& join) {
  with_finish(join.epilogue, join.residual, join.dst, [&](const auto& finish) {
    for (std::int64_t vector = 0; vector < join.vectors; ++vector) {
      join_vector(join, vector, finish);
    }
  });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
