// Turns sums of short numbers into values of dst, for the kernels that make these sums.
#pragma once

#include <type_traits>

#include "kernels/dots/dots.h"
#include "kernels/vector/finish.h"
#include "kernels/vector/short_lanes.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// The type as which sums are stored: integers as bytes, others as bfloat16.
template <typename Sum>
using NumberOf = std::conditional_t<std::is_same_v<Sum, Index>, std::uint8_t, std::uint16_t>;

TORCH_BLOCKED_INLINE inline void store_numbers(const Vec& x, std::uint8_t* dst) {
  store_bytes(x, dst);
}
TORCH_BLOCKED_INLINE inline void store_numbers(const Vec& x, std::uint16_t* dst) {
  store_bfloats(x, dst);
}
TORCH_BLOCKED_INLINE inline Vec load_numbers(const std::uint8_t* src) { return load_bytes(src); }
TORCH_BLOCKED_INLINE inline Vec load_numbers(const std::uint16_t* src) { return load_bfloats(src); }

TORCH_BLOCKED_INLINE inline Vec scaled(const DotChannels& c, const Index& sum) {
  return at::vec::fmadd(to_floats(sum), Vec::loadu(c.scale.data()), Vec::loadu(c.shift.data()));
}

TORCH_BLOCKED_INLINE inline Vec scaled(const DotChannels& c, const Vec& sum) {
  return at::vec::fmadd(sum, Vec::loadu(c.scale.data()), Vec::loadu(c.shift.data()));
}

// Keeps NaN.
TORCH_BLOCKED_INLINE inline Vec bounded(const DotChannels& c, const Vec& x) {
  return at::vec::clamp(x, Vec::loadu(c.least.data()), Vec::loadu(c.most.data()));
}

// The general end for one vector of real values.
template <typename Number>
inline void finish_vector(const DotEnd& e, const DotChannels& c, Vec value, const Number* residual,
                          void* dst, bool is_float32) {
  value = activate_as<Number>(e.epilogue.before, value);
  if (e.epilogue.residual) {
    const Vec added = load_numbers(residual) - Vec(e.residual_zero);
    value =
        activate_as<Number>(e.epilogue.after, at::vec::fmadd(added, Vec(e.residual_scale), value));
  }
  if (is_float32) {
    bounded(c, value).store(static_cast<float*>(dst));
  } else {
    value = at::vec::fmadd(value, Vec(e.inverse_scale), Vec(e.zero));
    store_numbers(bounded(c, value), static_cast<Number*>(dst));
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
