// The epilogue of a convolution on one vector, for kernels to apply between sum and store.
#pragma once

#include <array>
#include <type_traits>

#include "kernels/epilogue.h"
#include "kernels/short_lanes.h"
#include "kernels/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// e^x to 1.6e-7 of it; below -87 that of -87, above 88.4 with AVX2 an infinity, as elsewhere above
// 88.7. The polynomial is the one of degree 5 with e^0 = 1 and the least error relative to e^r for
// |r| <= ln 2 / 2: 9.2e-8, the rest is rounding.
inline Vec exponential(const Vec& x) {
  const Vec clipped = at::vec::clamp(x, Vec(-87.f), Vec(89.f));  // NaN stays
  const Vec n = (clipped * Vec(1.44269504f)).round();
  // r = x - n ln 2, with ln 2 in two parts
  Vec r = at::vec::fmadd(n, Vec(-0.693359375f), clipped);
  r = at::vec::fmadd(n, Vec(2.12194440e-4f), r);
  Vec p(8.2902718e-3f);
  for (const float term : {4.1898161e-2f, 1.6667638e-1f, 4.9999148e-1f, 9.9999971e-1f, 1.f}) {
    p = at::vec::fmadd(p, r, Vec(term));
  }
  return scale_by_power(p, n);
}

// 2^x, to 1e-7 of it besides the rounding of x; with AVX2 at least 2^-126 and at most an infinity.
// AVX-512 splits a power of two by itself, at any size, so that neither clamps nor rounding are
// needed: 7 instructions. The polynomials are those of degree 5 with 2^0 = 1 and the least error
// relative to 2^r: 8.2e-8 for r in [0, 1), 9.2e-8 for |r| <= 1/2.
#if defined(CPU_CAPABILITY_AVX512)
inline Vec power_of_fraction(const Vec& r) {
  Vec p(1.86713008e-3f);
  for (const float term : {9.0170303e-3f, 5.57999131e-2f, 2.4016445e-1f, 6.93151312e-1f, 1.f}) {
    p = at::vec::fmadd(p, r, Vec(term));
  }
  return p;
}

inline Vec power_of_two(const Vec& x) {
  const Vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(power_of_fraction(r), x);
}
#else
inline Vec power_of_two(const Vec& x) {
  const Vec clipped = at::vec::clamp(x, Vec(-126.f), Vec(128.f));  // NaN stays
  const Vec n = clipped.round(), r = clipped - n;
  Vec p(0.00132646585f);
  for (const float term : {0.00967156612f, 0.0555073434f, 0.240222413f, 0.69314698f, 1.f}) {
    p = at::vec::fmadd(p, r, Vec(term));
  }
  return scale_by_power(p, n);
}
#endif

// The same, and 0 where it is less than 2^-126: such numbers are denormal, for which Intel's cores
// need assists. NaN stays.
inline Vec power_or_zero(const Vec& x) {
  const Vec least(-126.f);
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 counts = _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ);
  const Vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(counts, power_of_fraction(r), x);
#else
  const Vec is_less = x < least;
  return Vec::blendv(power_of_two(Vec::blendv(x, least, is_less)), Vec(0.f), is_less);
#endif
}

inline constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-y), the product with a sigmoid: to 2.5e-7 of it, and to 4e-6 where e^-y counts for
// more than 2^20.
inline Vec times_sigmoid(const Vec& x, const Vec& y) {
  return quotient(x, Vec(1.f) + power_of_two(y * Vec(-kLog2E)));
}

inline Vec silu(const Vec& x) { return times_sigmoid(x, x); }

// x (1 + erf(x / sqrt(2))) / 2, with erf to 3.4e-7 as a quotient of polynomials, of which no factor
// is left to multiply by; at::vec's, to 6e-8, has an e^x beside its division. The clip is a number
// at which the quotient is 1/2 to the last bit, so that what is far below zero becomes zero.
// Source: the formula of torch.nn.functional.gelu; the rational minimax fit of erf over [-4, 4] of
// XLA and Eigen.
inline Vec gelu(const Vec& x) {
  constexpr float kClip = 5.594f;
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int kLeastWithSign = 2;  // of x and the clip; a NaN of x comes back in the product
  const Vec clipped = _mm512_range_ps(x, _mm512_set1_ps(kClip), kLeastWithSign);
#else
  const Vec clipped = at::vec::clamp(x, Vec(-kClip), Vec(kClip));
#endif
  const Vec square = clipped * clipped;
  Vec p(-1.50599506e-12f), q(-9.10379487e-7f);
  for (const float term : {3.06119941e-10f, -4.64265104e-8f, -2.51575617e-6f, -6.49646073e-5f,
                           -5.22304389e-4f, -5.69080715e-3f}) {
    p = at::vec::fmadd(p, square, Vec(term));
  }
  for (const float term : {-2.66717569e-5f, -4.20706745e-4f, -3.68666458e-3f, -1.4264739e-2f}) {
    q = at::vec::fmadd(q, square, Vec(term));
  }
  return x * (Vec(0.5f) + clipped * p / q);
}

// Source: the formula of torch.nn.functional.gelu.
// (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(const Vec& x) {
  const Vec twice = x * at::vec::fmadd(x * x, Vec(0.071354816f), Vec(1.5957691f));
  return times_sigmoid(x, twice);
}

// To 2.5e-7 of it: 1 - 2 / (1 + e^2x), where it is not small; there an odd polynomial, the one with
// the least relative error for |x| <= 0.625, 4.4e-9.
inline Vec tanh(const Vec& x) {
  constexpr float kSmall = 0.625f, kLarge = 20.f;  // where it is 1 to the last bit
  const Vec size = x.abs(), square = x * x, one(1.f);
  const Vec power = power_of_two(at::vec::clamp_max(size, Vec(kLarge)) * Vec(2 * kLog2E));
  const Vec large = one - quotient(Vec(2.f), one + power);
  Vec p(-5.7049864e-3f);
  for (const float term : {2.0639086e-2f, -5.3739715e-2f, 1.3331442e-1f, -3.3333281e-1f}) {
    p = at::vec::fmadd(p, square, Vec(term));
  }
  const Vec small = at::vec::fmadd(x * square, p, x);
  return Vec::blendv(Vec::blendv(large, large.neg(), x < Vec(0.f)), small, size < Vec(kSmall));
}

// Source: the formula of torch.nn.functional.mish, x tanh(log(1 + e^x)), which is x n / (n + 2)
// with n = e^x (e^x + 2): to 5e-7 of it, and to 2e-6 where that is less than 2^-20.
inline Vec mish(const Vec& x) {
  constexpr float kLarge = 20.f;  // where the quotient is 1 to the last bit
  const Vec two(2.f), power = power_or_zero(at::vec::clamp_max(x, Vec(kLarge)) * Vec(kLog2E));
  const Vec n = power * (power + two);
  return x * quotient(n, n + two);
}

inline Vec hardswish(const Vec& x) {
  const Vec gate = at::vec::clamp(x + Vec(3.f), Vec(0.f), Vec(6.f));
  return x * gate * Vec(1.f / 6);
}

// Calls f(function of a vector) with the function that an activation is, which loops in f then have
// inlined.
template <typename F>
inline void with_function(const Activation& a, F&& f) {
  const Vec alpha(a.alpha), beta(a.beta), zero(0.f);
  switch (a.kind) {
    case Activation::Kind::kNone:
      return;
    case Activation::Kind::kClamp:
      return f([=](const Vec& x) { return at::vec::clamp(x, alpha, beta); });
    case Activation::Kind::kLeakyRelu:
      return f([=](const Vec& x) {
        return at::vec::fmadd(at::vec::clamp_max(x, zero), alpha, at::vec::clamp_min(x, zero));
      });
    case Activation::Kind::kHardswish:
      return f([](const Vec& x) { return hardswish(x); });
    case Activation::Kind::kSilu:
      return f([](const Vec& x) { return silu(x); });
    case Activation::Kind::kGelu:
      return f([](const Vec& x) { return gelu(x); });
    case Activation::Kind::kGeluTanh:
      return f([](const Vec& x) { return gelu_tanh(x); });
    case Activation::Kind::kTanh:
      return f([](const Vec& x) { return tanh(x); });
    case Activation::Kind::kMish:
      return f([](const Vec& x) { return mish(x); });
  }
}

// Never inlined: 20 instructions, which the other activations should not find in their loops.
[[gnu::noinline]] inline Vec silu_alone(const Vec& x) { return silu(x); }
[[gnu::noinline]] inline Vec gelu_alone(const Vec& x) { return gelu(x); }
[[gnu::noinline]] inline Vec gelu_tanh_alone(const Vec& x) { return gelu_tanh(x); }
[[gnu::noinline]] inline Vec tanh_alone(const Vec& x) { return tanh(x); }
[[gnu::noinline]] inline Vec mish_alone(const Vec& x) { return mish(x); }

inline Vec activate(const Activation& a, const Vec& x) {
  const Vec zero(0.f);
  switch (a.kind) {
    case Activation::Kind::kNone:
      return x;
    case Activation::Kind::kClamp:
      return at::vec::clamp(x, Vec(a.alpha), Vec(a.beta));
    case Activation::Kind::kLeakyRelu:
      return at::vec::fmadd(at::vec::clamp_max(x, zero), Vec(a.alpha), at::vec::clamp_min(x, zero));
    case Activation::Kind::kHardswish:
      return hardswish(x);
    case Activation::Kind::kSilu:
      return silu_alone(x);
    case Activation::Kind::kGelu:
      return gelu_alone(x);
    case Activation::Kind::kGeluTanh:
      return gelu_tanh_alone(x);
    case Activation::Kind::kTanh:
      return tanh_alone(x);
    case Activation::Kind::kMish:
      return mish_alone(x);
  }
  __builtin_unreachable();
}

// e^x to 7.5e-5 of it, by half the instructions, for what is rounded to bfloat16 (3.9e-3): 2^n by
// the polynomial of degree 3 with the least relative error for |r| <= 1/2.
inline Vec rough_exponential(const Vec& x) {
  const Vec power = at::vec::clamp(x * Vec(kLog2E), Vec(-126.f), Vec(128.f));
  const Vec n = power.round(), r = power - n;
  Vec p(5.517167e-2f);
  for (const float term : {2.4261114e-1f, 6.9326099e-1f, 9.9992807e-1f}) {
    p = at::vec::fmadd(p, r, Vec(term));
  }
  return scale_by_power(p, n);
}

// x / (1 + e^power) to 1.4e-4 of it.
[[gnu::noinline]] inline Vec rough_gated(const Vec& x, const Vec& power) {
  const Vec y = Vec(1.f) + rough_exponential(power);
#if defined(CPU_CAPABILITY_AVX512)
  return x * Vec(_mm512_rcp14_ps(y));
#else
  return x / y;
#endif
}

// The activation of what is stored as a Number.
template <typename Number>
inline Vec activate_as(const Activation& a, const Vec& x) {
  if constexpr (std::is_same_v<Number, std::uint16_t>) {  // bfloat16
    if (a.kind == Activation::Kind::kSilu) return rough_gated(x, x.neg());
    if (a.kind == Activation::Kind::kGeluTanh) {
      return rough_gated(x, x * at::vec::fmadd(x * x, Vec(-0.071354816f), Vec(-1.5957691f)));
    }
  }
  return activate(a, x);
}

// What follows the function of a sum: the residual, and the activation of what it is added to.
// residual and dst have one format, so a value of the residual lies at one distance from its dst
// everywhere.
class Rest {
 public:
  Rest(const Epilogue& epilogue, const void* residual, const void* dst)
      : after_(epilogue.after),
        has_residual_(epilogue.residual),
        distance_(epilogue.residual ? reinterpret_cast<std::intptr_t>(residual) -
                                          reinterpret_cast<std::intptr_t>(dst)
                                    : 0) {}

  // `value` is on its way to `count` lanes at dst, of float32 or bfloat16.
  template <typename Number>
  TORCH_BLOCKED_INLINE Vec operator()(const Vec& value, const Number* dst,
                                      std::int64_t count) const {
    if (!has_residual_) return value;
    const auto* residual =
        reinterpret_cast<const Number*>(reinterpret_cast<std::intptr_t>(dst) + distance_);
    return activate_as<Number>(after_, value + load(residual, count));
  }

 private:
  Activation after_;
  bool has_residual_;
  std::intptr_t distance_;
};

// Calls f(finish) with the epilogue as a function of a sum, its dst and its lanes, whose first
// activation is inlined in the loops of f. The functions of SiLU and GELU take 6 and 7 cycles a
// vector in a loop of their own on a Zen 3, and 12 where each vector calls them.
template <typename Number = float, typename F>
inline void with_finish(const Epilogue& epilogue, const void* residual, const void* dst, F&& f) {
  const Rest rest(epilogue, residual, dst);
  // By value: each store could have changed what is behind a reference, which loops would read
  // again.
  const auto finish_by = [rest, &f](const auto& before) {
    f([rest, before](const Vec& sum, const Number* to, std::int64_t count = kWidth)
          TORCH_BLOCKED_INLINE { return rest(before(sum), to, count); });
  };
  if (epilogue.before.kind == Activation::Kind::kNone) {
    finish_by([](const Vec& x) { return x; });
  } else if constexpr (std::is_same_v<Number, std::uint16_t>) {
    finish_by([&](const Vec& x) { return activate_as<Number>(epilogue.before, x); });
  } else {
    with_function(epilogue.before, finish_by);
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
