// Functions of one vector, for epilogues and programs. They are faster than at::vec's and accurate
// to a few units in the last place. "To 3e-7" below means a relative error of at most 3e-7.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// x * 2^n for whole n in [-252, 254]; the result may be denormal.
inline Vec scale_by_any_power(const Vec& x, const Vec& n) {
#if defined(CPU_CAPABILITY_AVX512)
  return scale_by_power(x, n);
#else
  const Vec half = (n * Vec(0.5f)).round();
  return scale_by_power(scale_by_power(x, half), n - half);
#endif
}

// x = n ln 2 + r with the nearest whole n.
struct Reduced {
  Vec r, n;

  explicit Reduced(const Vec& x) : n((x * Vec(1.44269504f)).round()) {
    // ln 2 in two parts
    r = at::vec::fmadd(n, Vec(-0.693359375f), x);
    r = at::vec::fmadd(n, Vec(2.12194440e-4f), r);
  }
};

// e^r for |r| <= ln 2 / 2, by the polynomial of degree 5 with e^0 = 1 and the least relative error,
// 9.2e-8 before rounding.
inline Vec exponential_of_rest(const Vec& r) {
  Vec p(8.2902718e-3f);
  for (const float term : {4.1898161e-2f, 1.6667638e-1f, 4.9999148e-1f, 9.9999971e-1f, 1.f}) {
    p = at::vec::fmadd(p, r, Vec(term));
  }
  return p;
}

// e^x to 1.6e-7; denormal or zero below -87.
inline Vec exponential(const Vec& x) {
  const Reduced at(at::vec::clamp(x, Vec(-104.f), Vec(89.f)));  // NaN stays
  return scale_by_any_power(exponential_of_rest(at.r), at.n);
}

// e^x - 1 to 3e-7: 2^n (e^r - 1) + 2^n - 1. It is computed by halves, so that no part overflows
// before the sum does. The polynomial of degree 6 has the least error relative to e^r - 1: 1.3e-8.
inline Vec exponential_less_one(const Vec& x) {
  const Reduced at(at::vec::clamp(x, Vec(-20.f), Vec(89.f)));
  const Vec half = scale_by_power(Vec(1.f), at.n - Vec(1.f));  // 2^n itself is infinite for 128
  Vec p(1.38825073e-3f);
  for (const float term : {8.36658105e-3f, 4.16672006e-2f, 1.66665435e-1f, 4.9999997e-1f, 1.f}) {
    p = at::vec::fmadd(p, at.r, Vec(term));
  }
  const Vec result = at::vec::fmadd(half, p * at.r, half - Vec(0.5f));
  return result + result;
}

// log(1 + e^x) to 3e-7: max(x, 0) + log(1 + t) with t = e^-|x|. log(1 + t) is 2 artanh(t / (2 +
// t)), an odd polynomial with the least relative error, 4.5e-9. Source: the formula of
// torch.nn.functional.softplus; above its threshold the result is x to the last bit.
inline Vec softplus(const Vec& x) {
  const Vec t = exponential(x.abs().neg()), s = quotient(t, t + Vec(2.f)), square = s * s;
  Vec p(1.40093967e-1f);
  for (const float term : {1.40002668e-1f, 2.00107992e-1f, 3.33332062e-1f, 1.f}) {
    p = at::vec::fmadd(p, square, Vec(term));
  }
  return at::vec::fmadd(s + s, p, at::vec::clamp_min(x, Vec(0.f)));
}

// power_of_two is 2^(x * factor) to 1e-7, besides the rounding of the product. one_and_power_of_two
// is 1 + that. With AVX2 the power is clamped to at least 2^-126 and at most infinity. AVX-512 has
// instructions that split a power of two of any size, so it needs no clamp and no rounding: 7
// instructions. The polynomials have degree 5, 2^0 = 1 and the least error relative to 2^r: 8.2e-8
// for r in [0, 1), 9.2e-8 for |r| <= 1/2.
#if defined(CPU_CAPABILITY_AVX512)
inline Vec power_of_fraction(const Vec& r) {
  Vec p(1.86713008e-3f);
  for (const float term : {9.0170303e-3f, 5.57999131e-2f, 2.4016445e-1f, 6.93151312e-1f, 1.f}) {
    p = at::vec::fmadd(p, r, Vec(term));
  }
  return p;
}

inline Vec power_of_two(const Vec& x, float factor) {
  const Vec product = x * Vec(factor);
  const Vec r = _mm512_reduce_ps(product, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(power_of_fraction(r), product);
}

inline Vec one_and_power_of_two(const Vec& x, float factor) {
  return Vec(1.f) + power_of_two(x, factor);
}
#else
// Splits x * factor into the nearest whole number, whose power of two is `power`, and a rest, in
// four instructions. Adding 1.5 * 2^23 rounds to a whole number, which is then in the last bits of
// the sum. The addend also includes the bias of exponents.
struct SplitPower {
  Vec power, of_rest;  // the polynomial of the rest, |r| <= 1/2

  SplitPower(const Vec& x, float factor) {
    const Vec least(std::min(-126.f / factor, 128.f / factor)),
        most(std::max(-126.f / factor, 128.f / factor)), shift(0x1.8p23f + 127);
    const Vec clipped = at::vec::clamp(x, least, most);  // NaN stays
    const Vec sum = at::vec::fmadd(clipped, Vec(factor), shift);
    power = exponent_of(sum);
    const Vec r = at::vec::fmsub(clipped, Vec(factor), sum - shift);
    of_rest = Vec(0.00132646585f);
    for (const float term : {0.00967156612f, 0.0555073434f, 0.240222413f, 0.69314698f, 1.f}) {
      of_rest = at::vec::fmadd(of_rest, r, Vec(term));
    }
  }

  // Moves the last 9 bits of each lane to a float's sign and exponent.
  static Vec exponent_of(const Vec& x) {
#if defined(CPU_CAPABILITY_AVX2)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
#else
    alignas(64) std::array<float, kWidth> lanes;
    x.store(lanes.data());
    for (float& lane : lanes) lane = std::bit_cast<float>(std::bit_cast<std::uint32_t>(lane) << 23);
    return Vec::loadu(lanes.data());
#endif
  }
};

inline Vec power_of_two(const Vec& x, float factor) {
  const SplitPower split(x, factor);
  return split.power * split.of_rest;
}

inline Vec one_and_power_of_two(const Vec& x, float factor) {
  const SplitPower split(x, factor);
  return at::vec::fmadd(split.power, split.of_rest, Vec(1.f));
}
#endif

// 2^x, or 0 if it is less than 2^-126. Such numbers are denormal, for which Intel's cores need slow
// assists. Keeps NaN.
inline Vec power_or_zero(const Vec& x) {
  const Vec least(-126.f);
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 counts = _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ);
  const Vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(counts, power_of_fraction(r), x);
#else
  return Vec::blendv(power_of_two(x, 1.f), Vec(0.f), x < least);
#endif
}

inline constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-y), the product with a sigmoid: to 2.5e-7, and to 1.3e-6 if e^-y is more than 2^20.
inline Vec times_sigmoid(const Vec& x, const Vec& y) {
  return quotient(x, one_and_power_of_two(y, -kLog2E));
}

inline Vec silu(const Vec& x) { return times_sigmoid(x, x); }

// erf(x / sqrt(2)) / 2 to 3.4e-7, as a quotient of polynomials. At kClip it is 1/2 to the last bit.
// Source: the rational minimax fit of erf over [-4, 4] of XLA and Eigen.
inline Vec half_erf(const Vec& x) {
  constexpr float kClip = 5.594f;
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int kLeastWithSign = 2;  // of |x| and kClip, with x's sign; of NaN kClip
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
  return clipped * p / q;
}

// x (1 + erf(x / sqrt(2))) / 2. at::vec's is accurate to 6e-8, but computes an e^x besides its
// division. Far below zero the result is zero. Source: the formula of torch.nn.functional.gelu.
inline Vec gelu(const Vec& x) { return x * (Vec(0.5f) + half_erf(x)); }

// To 3.4e-7.
inline Vec erf(const Vec& x) {
  const Vec half = half_erf(x * Vec(1.41421356f));
  return Vec::blendv(half + half, x, x != x);
}

// Source: the formula of torch.nn.functional.gelu.
// (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(const Vec& x) {
  const Vec twice = x * at::vec::fmadd(x * x, Vec(0.071354816f), Vec(1.5957691f));
  return times_sigmoid(x, twice);
}

// To 2.5e-7: 1 - 2 / (1 + e^2x) for large |x|. For |x| <= 0.625 it is the odd polynomial with the
// least relative error, 4.4e-9.
inline Vec tanh(const Vec& x) {
  constexpr float kSmall = 0.625f, kLarge = 20.f;  // where it is 1 to the last bit
  const Vec size = x.abs(), square = x * x, one(1.f);
  const Vec power = one_and_power_of_two(at::vec::clamp_max(size, Vec(kLarge)), 2 * kLog2E);
  const Vec large = one - quotient(Vec(2.f), power);
  Vec p(-5.7049864e-3f);
  for (const float term : {2.0639086e-2f, -5.3739715e-2f, 1.3331442e-1f, -3.3333281e-1f}) {
    p = at::vec::fmadd(p, square, Vec(term));
  }
  const Vec small = at::vec::fmadd(x * square, p, x);
  return Vec::blendv(Vec::blendv(large, large.neg(), x < Vec(0.f)), small, size < Vec(kSmall));
}

// Source: the formula of torch.nn.functional.mish, x tanh(log(1 + e^x)), which is x n / (n + 2)
// with n = e^x (e^x + 2): to 5e-7, and to 2e-6 where it is less than 2^-20.
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

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
