// The functions of arithmetic.inc on vectors V of at::vec: of floats in kernels, of doubles where a
// graph asks what its ops compute.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include "kernels/program.h"

namespace torch_blocked::kernels {

// e^x as kernels have it, if they have it faster.
template <typename V>
struct FastExp {
  static V of(const V& x) { return x.exp(); }
};

// The value of `op`; who calls it with a constant gets one function.
template <typename V>
inline V compute(Arithmetic op, const V& x, const V& y, const V& z, const V& alpha, const V& beta) {
  using at::vec::fmadd, at::vec::maximum, at::vec::minimum;
  const V zero(0), one(1);
  const auto fast_exp = [](const V& power) { return FastExp<V>::of(power); };
  switch (op) {
#define UNARY(name, value) \
  case Arithmetic::name:   \
    return value;
#define BINARY UNARY
#define TERNARY UNARY
#include "kernels/arithmetic.inc"
  }
  __builtin_unreachable();
}

}  // namespace torch_blocked::kernels
