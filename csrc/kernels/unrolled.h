// Loops unrolled at compile time: GCC keeps an array of vectors in registers only where every index
// into it is a constant, and where every function that sees the array is inlined.
#pragma once

#include <utility>

#define TORCH_BLOCKED_INLINE __attribute__((always_inline))

namespace torch_blocked::kernels::CPU_CAPABILITY {

// f.operator()<i>() for i in [0, kCount).
template <int kCount, typename F>
TORCH_BLOCKED_INLINE inline void unrolled(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) TORCH_BLOCKED_INLINE {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
