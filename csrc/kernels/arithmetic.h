// The functions of arithmetic.inc on vectors V of at::vec: of floats in kernels, of doubles where a
// graph asks what its ops compute.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include "kernels/program.h"

namespace torch_blocked::kernels {

// e^x and x / y as kernels have them, if they have them faster.
template <typename V>
struct Fast {
  static V exp(const V& x) { return x.exp(); }
  static V quotient(const V& x, const V& y) { return x / y; }
};

// The value of `op`; who calls it with a constant gets one function.
template <typename V>
inline V compute(Arithmetic op, const V& x, const V& y, const V& z, const V& alpha, const V& beta) {
  using at::vec::clamp, at::vec::clamp_max, at::vec::clamp_min;
  using at::vec::fmadd, at::vec::maximum, at::vec::minimum;
  const V zero(0), one(1);
  const auto fast_exp = [](const V& power) { return Fast<V>::exp(power); };
  const auto fast_quotient = [](const V& a, const V& b) { return Fast<V>::quotient(a, b); };
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
