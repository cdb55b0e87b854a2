// SIMD vectors for the b channels of one pixel: at::vec at the width of the instruction set.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace torch_blocked::kernels::CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;
inline constexpr std::int64_t kWidth = Vec::size();

// Calls f(offset, count) for the lanes [0, block): whole vectors first, then the rest (block 4, or
// 8 on AVX-512) at once.
template <typename F>
inline void for_lanes(std::int64_t block, F&& f) {
  std::int64_t lane = 0;
  for (; lane + kWidth <= block; lane += kWidth) f(lane, kWidth);
  if (lane < block) f(lane, block - lane);
}

inline Vec load(const float* src, std::int64_t count) {
  return count == kWidth ? Vec::loadu(src) : Vec::loadu(src, count);
}

inline void store(const Vec& value, float* dst, std::int64_t count) {
  count == kWidth ? value.store(dst) : value.store(dst, static_cast<int>(count));
}

template <int kLanes>
inline Vec load_lanes(const float* src) {
  return Vec::loadu(src, kLanes);
}

template <int kLanes>
inline void store_lanes(const Vec& value, float* dst) {
  value.store(dst, kLanes);
}

// All bits set in the first `count` lanes. at::vec would call a function that copies floats.
inline Vec lanes_mask(std::int64_t count) {
  struct Bits {
    std::int32_t values[2 * kWidth];
  };
  static constexpr Bits kBits = [] {
    Bits bits{};
    std::fill_n(bits.values, kWidth, -1);
    return bits;
  }();
  return Vec::loadu(kBits.values + kWidth - count);
}

// Operations that at::vec lacks, in intrinsics.

// x * 2^n for whole n in [-126, 127]. For 128 AVX2 gives infinity.
inline Vec scale_by_power(const Vec& x, const Vec& n) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(x, n);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return x * Vec(_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
#else
  alignas(64) float values[kWidth], powers[kWidth];
  x.store(values);
  n.store(powers);
  for (std::int64_t i = 0; i < kWidth; ++i) {
    values[i] = std::ldexp(values[i], static_cast<int>(powers[i]));
  }
  return Vec::loadu(values);
#endif
}

// x / y to 2 units in the last place. y must not be denormal, nor above 2^126 unless it is
// infinite. A division would take as long as 8 to 16 FMAs.
inline Vec quotient(const Vec& x, const Vec& y) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 guess = _mm512_rcp14_ps(y), one = _mm512_set1_ps(1.f);
  // One step of Newton's method, except for 1 / infinity, which is exactly 0 already.
  const __mmask16 finite = _mm512_cmp_ps_mask(guess, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  const __m512 error = _mm512_fnmadd_ps(y, guess, one);
  return x * Vec(_mm512_mask_fmadd_ps(guess, finite, error, guess));
#else
  return x / y;
#endif
}

using Index = at::vec::Vectorized<std::int32_t>;

// Lane i is lane index[i] of x, or lane i of `kept` if index[i] is negative.
inline Vec permute(const Vec& x, const Index& index, const Vec& kept) {
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 taken = ~_mm512_movepi32_mask(index);
  return _mm512_mask_permutexvar_ps(kept, taken, index, x);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(x, index), kept, _mm256_castsi256_ps(index));
#else
  float from[kWidth], to[kWidth];
  std::int32_t lanes[kWidth];
  x.store(from);
  kept.store(to);
  index.store(lanes);
  for (std::int64_t i = 0; i < kWidth; ++i) to[i] = lanes[i] < 0 ? to[i] : from[lanes[i]];
  return Vec::loadu(to);
#endif
}

// The same without negative indices.
inline Vec permute(const Vec& x, const Index& index) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_permutexvar_ps(index, x);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_permutevar8x32_ps(x, index);
#else
  return permute(x, index, x);
#endif
}

// Lane i is the sum of the lanes of rows[i]. A tree sums the halves of several rows at once; a
// single row would take five shuffles and sums. All rows are summed in the same order.
inline Vec lane_sums(const Vec (&rows)[kWidth]) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 fours[4];  // the sums over each quarter of rows [4 i, 4 i + 4)
  for (int i = 0; i < 4; ++i) {
    const auto pair = [&](int first) {
      const __m512 a = rows[4 * i + first], b = rows[4 * i + first + 1];
      return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    };
    const __m512d a = pair(0), b = pair(2);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto joined = [](const __m512& a, const __m512& b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return joined(joined(fours[0], fours[1]), joined(fours[2], fours[3]));
#elif defined(CPU_CAPABILITY_AVX2)
  __m256 fours[2];
  for (int i = 0; i < 2; ++i) {
    const auto pair = [&](int first) {
      const __m256 a = rows[4 * i + first], b = rows[4 * i + first + 1];
      return _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    };
    const __m256d a = pair(0), b = pair(2);
    fours[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                             _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
                       _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#else
  float sums[kWidth];
  for (std::int64_t i = 0; i < kWidth; ++i) {
    sums[i] =
        at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, rows[i]);
  }
  return Vec::loadu(sums);
#endif
}

// Keeps x in a register. Otherwise GCC loads it again for each use, and the loads take as long as
// the FMAs.
inline Vec in_register(const Vec& x) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 value = x;
  asm("" : "+v"(value));
  return value;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256 value = x;
  asm("" : "+x"(value));
  return value;
#else
  return x;
#endif
}

inline bool is_aligned(const float* address) {
  return reinterpret_cast<std::uintptr_t>(address) % sizeof(Vec) == 0;
}

// Writes past the cache. `dst` must be aligned. Call stream_fence() before another thread reads it.
inline void stream(const Vec& value, float* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm512_stream_ps(dst, value);
#elif defined(CPU_CAPABILITY_AVX2)
  _mm256_stream_ps(dst, value);
#else
  value.store(dst);
#endif
}

inline void stream_fence() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
