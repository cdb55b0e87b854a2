// What products of matrices multiply: a policy for float32 and one for bfloat16, of which one
// 32-bit product sums those of kChannels inputs.
#pragma once

#include "kernels/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

struct Floats {
  using Number = float;
  using Weights = Vec;
  static constexpr int kChannels = 1;
  static Weights weights(const Number* from) { return Vec::loadu(from); }
  static Weights repeat(const Number* from) { return Vec(*from); }
  static Vec add(const Vec& sum, const Weights& x, const Weights& w) {
    return at::vec::fmadd(x, w, sum);
  }
};

struct Bfloats {
  using Number = std::uint16_t;
  using Weights = Index;
  static constexpr int kChannels = 2;
  static Weights weights(const Number* from) { return Index::loadu(from); }
  static Weights repeat(const Number* from) { return repeat_bits(from); }
  static Vec add(const Vec& sum, const Weights& x, const Weights& w) {
    return dot_bfloats(sum, x, w);
  }
};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
