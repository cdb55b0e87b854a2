// Loops unrolled at compile time: GCC keeps an array of vectors in registers only where every index
// into it becomes a constant so, and where every function that sees the array is inlined.
#pragma once

#include <utility>

#define TORCH_BLOCKED_INLINE __attribute__((always_inline))

// Before a loop of at most 64 rounds, whose count is a constant.
#define TORCH_BLOCKED_UNROLL _Pragma("GCC unroll 64")

namespace torch_blocked::kernels::CPU_CAPABILITY {

// f.operator()<i>() for i in [0, kCount), for what needs a constant: a function of each i takes
// GCC much longer than a loop.
template <int kCount, typename F>
TORCH_BLOCKED_INLINE inline void unrolled(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) TORCH_BLOCKED_INLINE {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
