// The functions of arithmetic.inc on vectors V of at::vec: of floats in kernels, of doubles when a
// graph evaluates its ops.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include "kernels/rows/program.h"

namespace torch_blocked::kernels {

// Functions that kernels replace by faster ones. times_sigmoid is x / (1 + e^-y).
template <typename V>
struct Fast {
  static V times_sigmoid(const V& x, const V& y) { return x / (V(1) + y.neg().exp()); }
  static V tanh(const V& x) { return x.tanh(); }
  static V exp(const V& x) { return x.exp(); }
  static V expm1(const V& x) { return x.expm1(); }
  static V erf(const V& x) { return x.erf(); }
  // Above 20 the result is x to the last bit, and e^x would overflow.
  static V softplus(const V& x) {
    return V::blendv(at::vec::minimum(x, V(20)).exp().log1p(), x, x > V(20));
  }
  static V mish(const V& x) {  // log(1 + e^20) is large enough for a tanh of 1
    return x * at::vec::minimum(x, V(20)).exp().log1p().tanh();
  }
};

// The value of `op`. With a constant `op` only one function is left. Always inlined: otherwise GCC
// calls the whole switch for each vector and passes operands through memory.
template <typename V>
[[gnu::always_inline]] inline V compute(Arithmetic op, const V& x, const V& y, const V& z,
                                        const V& alpha, const V& beta) {
  using at::vec::clamp, at::vec::clamp_max, at::vec::clamp_min;
  using at::vec::fmadd, at::vec::maximum, at::vec::minimum;
  const V zero(0), one(1);
  const auto times_sigmoid = [](const V& a, const V& b) { return Fast<V>::times_sigmoid(a, b); };
  switch (op) {
#define UNARY(name, value) \
  case Arithmetic::name:   \
    return value;
#define BINARY UNARY
#define TERNARY UNARY
#include "kernels/rows/arithmetic.inc"
  }
  __builtin_unreachable();
}

}  // namespace torch_blocked::kernels
