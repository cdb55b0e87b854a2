// Loops unrolled at compile time. GCC keeps an array of vectors in registers only if every index
// into it becomes a constant and every function that sees the array is inlined.
#pragma once

#include <utility>

#define TORCH_BLOCKED_INLINE __attribute__((always_inline))

// Goes before a loop with a constant number of at most 64 rounds.
#define TORCH_BLOCKED_UNROLL _Pragma("GCC unroll 64")

namespace torch_blocked::kernels::CPU_CAPABILITY {

// Calls f.operator()<i>() for i in [0, kCount). Use it only where i must be a constant: one
// function for each i takes GCC much longer to compile than a loop.
template <int kCount, typename F>
TORCH_BLOCKED_INLINE inline void unrolled(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) TORCH_BLOCKED_INLINE {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
