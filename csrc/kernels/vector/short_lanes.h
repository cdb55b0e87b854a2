// Vectors whose lanes of 32 bits hold short numbers: four bytes, two words or two bfloat16. As in
// lanes.h, operations that at::vec lacks are written in intrinsics. They are in inline assembly if
// some CPUs of the instruction set lack the instruction.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// The 32 bits at src in all lanes.
inline Index repeat_bits(const void* src) {
  std::int32_t bits;
  std::memcpy(&bits, src, sizeof bits);
  return Index(bits);
}

// Lane i is number lanes[i] of the 32-bit numbers at src. kBytes are read: 16, or on AVX2 also 8.
template <int kBytes>
inline Index spread_bits(const void* src, const Index& lanes) {
#if defined(CPU_CAPABILITY_AVX512)
  static_assert(kBytes == 16);
  const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(src));
  const __m512 all = _mm512_castsi512_ps(_mm512_broadcast_i32x4(bits));
  return _mm512_castps_si512(_mm512_permutevar_ps(all, lanes));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i bits = kBytes == 8 ? _mm_loadl_epi64(static_cast<const __m128i*>(src))
                                   : _mm_loadu_si128(static_cast<const __m128i*>(src));
  const __m256 all = _mm256_castsi256_ps(_mm256_broadcastsi128_si256(bits));
  return _mm256_castps_si256(_mm256_permutevar_ps(all, lanes));
#else
  std::int32_t from[kBytes / 4], to[kWidth], at[kWidth];
  std::memcpy(from, src, sizeof from);
  lanes.store(at);
  for (std::int64_t i = 0; i < kWidth; ++i) to[i] = from[at[i]];
  return Index::loadu(to);
#endif
}

inline Vec to_floats(const Index& x) { return at::vec::convert_to_fp_of_same_size<float>(x); }

// sum + the products of four unsigned and four signed bytes in each lane, exactly. It needs VNNI,
// except in the default set.
inline Index dot_bytes(const Index& sum, const Index& unsigned_bytes, const Index& signed_bytes) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512i result = sum;
  asm("vpdpbusd %2, %1, %0"
      : "+v"(result)
      : "v"(static_cast<__m512i>(unsigned_bytes)), "v"(static_cast<__m512i>(signed_bytes)));
  return result;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i result = sum;
  asm("%{vex%} vpdpbusd %2, %1, %0"
      : "+x"(result)
      : "x"(static_cast<__m256i>(unsigned_bytes)), "x"(static_cast<__m256i>(signed_bytes)));
  return result;
#else
  std::int32_t sums[kWidth];
  std::uint8_t a[4 * kWidth];
  std::int8_t b[4 * kWidth];
  sum.store(sums);
  unsigned_bytes.store(a);
  signed_bytes.store(b);
  for (std::int64_t i = 0; i < 4 * kWidth; ++i) sums[i / 4] += a[i] * b[i];
  return Index::loadu(sums);
#endif
}

// sum + the products of two signed words in each lane, which must not overflow. The empty assembly
// keeps the order of the sums: GCC would make all products of a depthwise window first, and store
// and load each of them.
inline Index dot_words(const Index& sum, const Index& x, const Index& y) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512i result = _mm512_add_epi32(sum, _mm512_madd_epi16(x, y));
  asm("" : "+v"(result));
  return result;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i result = _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
  asm("" : "+x"(result));
  return result;
#else
  std::int32_t sums[kWidth];
  std::int16_t a[2 * kWidth], b[2 * kWidth];
  sum.store(sums);
  x.store(a);
  y.store(b);
  for (std::int64_t i = 0; i < 2 * kWidth; ++i) sums[i / 2] += a[i] * b[i];
  return Index::loadu(sums);
#endif
}

// The same by one instruction. It needs VNNI.
inline Index dot_words_vnni(const Index& sum, const Index& x, const Index& y) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512i result = sum;
  asm("vpdpwssd %2, %1, %0"
      : "+v"(result)
      : "v"(static_cast<__m512i>(x)), "v"(static_cast<__m512i>(y)));
  return result;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i result = sum;
  asm("%{vex%} vpdpwssd %2, %1, %0"
      : "+x"(result)
      : "x"(static_cast<__m256i>(x)), "x"(static_cast<__m256i>(y)));
  return result;
#else
  return dot_words(sum, x, y);
#endif
}

// The upper, or the lower, bfloat16 of each lane as float32.
inline Vec upper_bfloats(const Index& x) {
  return at::vec::cast<float>(x & Index(static_cast<std::int32_t>(0xffff0000u)));
}
inline Vec lower_bfloats(const Index& x) { return at::vec::cast<float>(x << Index(16)); }

// sum + the products of two bfloat16 in each lane. On AVX-512 it needs avx512_bf16, which treats
// denormals as 0.
inline Vec dot_bfloats(const Vec& sum, const Index& x, const Index& y) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 result = sum;
  asm("vdpbf16ps %2, %1, %0"
      : "+v"(result)
      : "v"(static_cast<__m512i>(x)), "vm"(static_cast<__m512i>(y)));
  return result;
#else
  return at::vec::fmadd(upper_bfloats(x), upper_bfloats(y),
                        at::vec::fmadd(lower_bfloats(x), lower_bfloats(y), sum));
#endif
}

// The nearest bfloat16, ties to even.
inline void store_bfloats(const Vec& x, std::uint16_t* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  __m256i result;
  asm("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(static_cast<__m512>(x)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), result);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i half = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(dst),
      _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
  alignas(64) float values[kWidth];
  x.store(values);
  for (std::int64_t i = 0; i < kWidth; ++i) dst[i] = c10::BFloat16(values[i]).x;
#endif
}

// As float32 with the same bits, and zeros below them.
inline Vec load_bfloats(const std::uint16_t* src) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
  float values[kWidth];
  for (std::int64_t i = 0; i < kWidth; ++i) {
    values[i] = c10::BFloat16(src[i], c10::BFloat16::from_bits());
  }
  return Vec::loadu(values);
#endif
}

// Signed bytes as numbers.
inline Vec load_signed_bytes(const std::int8_t* src) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  float values[kWidth];
  for (std::int64_t i = 0; i < kWidth; ++i) values[i] = src[i];
  return Vec::loadu(values);
#endif
}

// Stores bits, of which load_bfloats() has moved the lower two bytes to the upper ones.
inline void store_bits(const Vec& x, float* dst) { x.store(dst); }
inline void store_bits(const Vec& x, std::uint16_t* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm512_cvtepi32_epi16(upper));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(x), 16);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(dst),
      _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
#else
  alignas(64) std::int32_t bits[kWidth];
  at::vec::cast<std::int32_t>(x).store(bits);
  for (std::int64_t i = 0; i < kWidth; ++i) {
    dst[i] = static_cast<std::uint16_t>(static_cast<std::uint32_t>(bits[i]) >> 16);
  }
#endif
}

// Loads and stores `count` lanes of bfloat16, as lanes.h does for float32.
inline Vec load(const std::uint16_t* src, std::int64_t count) {
  if (count == kWidth) return load_bfloats(src);
  std::array<std::uint16_t, kWidth> lanes{};
  std::memcpy(lanes.data(), src, sizeof(std::uint16_t) * static_cast<std::size_t>(count));
  return load_bfloats(lanes.data());
}
inline void store(const Vec& value, std::uint16_t* dst, std::int64_t count) {
  if (count == kWidth) return store_bfloats(value, dst);
  std::array<std::uint16_t, kWidth> lanes;
  store_bfloats(value, lanes.data());
  std::memcpy(dst, lanes.data(), sizeof(std::uint16_t) * static_cast<std::size_t>(count));
}

template <int kLanes>
inline Vec load_lanes(const std::uint16_t* src) {
  static_assert(kLanes == kWidth);
  return load_bfloats(src);
}

template <int kLanes>
inline void store_lanes(const Vec& value, std::uint16_t* dst) {
  static_assert(kLanes == kWidth);
  store_bfloats(value, dst);
}

// Stores the nearest words. The values must be in their range.
inline void store_words(const Vec& x, std::int16_t* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                      _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i nearest = _mm256_cvtps_epi32(x);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(dst),
      _mm_packs_epi32(_mm256_castsi256_si128(nearest), _mm256_extracti128_si256(nearest, 1)));
#else
  float values[kWidth];
  x.store(values);
  for (std::int64_t i = 0; i < kWidth; ++i) {
    dst[i] = static_cast<std::int16_t>(std::nearbyint(values[i]));
  }
#endif
}

// Four adjacent pixels of kWidth bytes, as four bytes for each lane. On AVX-512 it needs VBMI.
inline Index pixel_quads(const std::uint8_t* src) {
#if defined(CPU_CAPABILITY_AVX512)
  alignas(64) static constexpr auto kOrder = [] {
    std::array<std::uint8_t, 64> order{};
    for (std::size_t i = 0; i < 64; ++i) order[i] = static_cast<std::uint8_t>(i % 4 * 16 + i / 4);
    return order;
  }();
  __m512i result;
  asm("vpermb %2, %1, %0"
      : "=v"(result)
      : "v"(_mm512_load_si512(kOrder.data())), "m"(*reinterpret_cast<const __m512i_u*>(src)));
  return result;
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i pixels = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
  const __m128i pair = _mm256_castsi256_si128(pixels), next = _mm256_extracti128_si256(pixels, 1);
  const __m128i low = _mm_unpacklo_epi8(pair, _mm_srli_si128(pair, 8)),
                high = _mm_unpacklo_epi8(next, _mm_srli_si128(next, 8));
  return _mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high));
#else
  std::uint8_t bytes[4 * kWidth];
  for (std::int64_t i = 0; i < 4 * kWidth; ++i) bytes[i] = src[i % 4 * kWidth + i / 4];
  return Index::loadu(bytes);
#endif
}

// Two pixels of kWidth bytes, as two words for each lane.
inline Index pixel_pair(const std::uint8_t* a, const std::uint8_t* b) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a)),
                second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
  return _mm512_cvtepu8_epi16(
      _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second)));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
  return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(first, second));
#else
  std::int16_t words[2 * kWidth];
  for (std::int64_t i = 0; i < 2 * kWidth; ++i) words[i] = (i % 2 == 0 ? a : b)[i / 2];
  return Index::loadu(words);
#endif
}

#if defined(CPU_CAPABILITY_AVX512)
// A table of 256 bytes in four registers, which looks up 64 bytes at a time. It needs VBMI.
class BytesOfTable {
 public:
  explicit BytesOfTable(const std::uint8_t* table) {
    for (std::size_t i = 0; i < 4; ++i) parts_[i] = _mm512_loadu_si512(table + 64 * i);
  }
  void look_up(const std::uint8_t* src, std::uint8_t* dst) const {
    const __m512i at = _mm512_loadu_si512(src);
    __m512i low = at, high = at;
    asm("vpermi2b %2, %1, %0" : "+v"(low) : "v"(parts_[0]), "v"(parts_[1]));
    asm("vpermi2b %2, %1, %0" : "+v"(high) : "v"(parts_[2]), "v"(parts_[3]));
    _mm512_storeu_si512(dst, _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high));
  }

 private:
  __m512i parts_[4];
};
#endif

// The nearest integers, ties to even.
inline Index nearest(const Vec& x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtps_epi32(x);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtps_epi32(x);
#else
  float values[kWidth];
  std::int32_t integers[kWidth];
  x.store(values);
  for (std::int64_t i = 0; i < kWidth; ++i) {
    integers[i] = static_cast<std::int32_t>(std::nearbyint(values[i]));
  }
  return Index::loadu(integers);
#endif
}

// Stores four vectors of integers, one after the other, as bytes bounded by those of `least` and
// `most`.
inline void store_quad(const Index& a, const Index& b, const Index& c, const Index& d,
                       const Index& least, const Index& most, std::uint8_t* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i words[] = {_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)};
  const __m512i bytes = _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
      _mm512_packus_epi16(words[0], words[1]));
  _mm512_storeu_si512(dst, _mm512_min_epu8(_mm512_max_epu8(bytes, least), most));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i words[] = {_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)};
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words[0], words[1]),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                      _mm256_min_epu8(_mm256_max_epu8(bytes, least), most));
#else
  std::uint8_t bounds[2][4 * kWidth];
  least.store(bounds[0]);
  most.store(bounds[1]);
  std::int32_t integers[4 * kWidth];
  const Index* each[] = {&a, &b, &c, &d};
  for (std::int64_t i = 0; i < 4; ++i) each[i]->store(integers + i * kWidth);
  for (std::int64_t i = 0; i < 4 * kWidth; ++i) {
    dst[i] = static_cast<std::uint8_t>(
        std::clamp<std::int32_t>(integers[i], bounds[0][i], bounds[1][i]));
  }
#endif
}

// Stores the nearest integers, ties to even. The values must be in [0, 255].
inline void store_bytes(const Vec& x, std::uint8_t* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i nearest = _mm256_cvtps_epi32(x);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(nearest), _mm256_extracti128_si256(nearest, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), _mm_packus_epi16(words, words));
#else
  float values[kWidth];
  x.store(values);
  for (std::int64_t i = 0; i < kWidth; ++i) {
    dst[i] = static_cast<std::uint8_t>(std::nearbyint(values[i]));
  }
#endif
}

inline Vec load_bytes(const std::uint8_t* src) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src))));
#else
  float values[kWidth];
  for (std::int64_t i = 0; i < kWidth; ++i) values[i] = static_cast<float>(src[i]);
  return Vec::loadu(values);
#endif
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
