// Lets AddressSanitizer see what vectors read and write under a mask, or past the cache. GCC checks
// the address of a dereference, but not of these instructions, which write the ends of rows.
//
// CMakeLists.txt includes this before each kernel in the build type Asan.
#pragma once

#if defined(__cplusplus) && defined(__AVX2__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

extern "C" {
void __asan_loadN(void*, std::size_t);
void __asan_storeN(void*, std::size_t);
}

namespace watched {

// Calls check(address, bytes) for each run of lanes that are set.
template <typename Check>
inline void runs(const void* at, std::uint64_t lanes, std::size_t bytes, Check check) {
  auto* address = static_cast<char*>(const_cast<void*>(at));
  while (lanes != 0) {
    const int skipped = __builtin_ctzll(lanes);
    lanes >>= skipped;
    address += static_cast<std::size_t>(skipped) * bytes;
    const int run = ~lanes == 0 ? 64 : __builtin_ctzll(~lanes);
    check(address, static_cast<std::size_t>(run) * bytes);
    if (run == 64) return;
    lanes >>= run;
    address += static_cast<std::size_t>(run) * bytes;
  }
}

// Not inline: that would take the compiler 1.5 times as long.
[[gnu::noinline]] inline void reads(const void* at, std::uint64_t lanes, std::size_t bytes) {
  runs(at, lanes, bytes, __asan_loadN);
}
[[gnu::noinline]] inline void writes(const void* at, std::uint64_t lanes, std::size_t bytes) {
  runs(at, lanes, bytes, __asan_storeN);
}

// AVX2 has masks in vectors, whose lanes begin with their bit.
inline std::uint64_t lanes4(__m256i mask) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}
inline std::uint64_t lanes8(__m256i mask) {
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(mask)));
}

}  // namespace watched

// clang-format off
#define _mm256_maskload_ps(at, mask) (watched::reads(at, watched::lanes4(mask), 4), _mm256_maskload_ps(at, mask))
#define _mm256_maskload_pd(at, mask) (watched::reads(at, watched::lanes8(mask), 8), _mm256_maskload_pd(at, mask))
#define _mm256_maskload_epi32(at, mask) (watched::reads(at, watched::lanes4(mask), 4), _mm256_maskload_epi32(at, mask))
#define _mm256_maskload_epi64(at, mask) (watched::reads(at, watched::lanes8(mask), 8), _mm256_maskload_epi64(at, mask))
#define _mm256_maskstore_ps(at, mask, x) (watched::writes(at, watched::lanes4(mask), 4), _mm256_maskstore_ps(at, mask, x))
#define _mm256_maskstore_pd(at, mask, x) (watched::writes(at, watched::lanes8(mask), 8), _mm256_maskstore_pd(at, mask, x))
#define _mm256_maskstore_epi32(at, mask, x) (watched::writes(at, watched::lanes4(mask), 4), _mm256_maskstore_epi32(at, mask, x))
#define _mm256_stream_ps(at, x) (watched::writes(at, 0xff, 4), _mm256_stream_ps(at, x))

#if defined(__AVX512F__)
#define _mm256_mask_loadu_epi16(x, mask, at) (watched::reads(at, mask, 2), _mm256_mask_loadu_epi16(x, mask, at))
#define _mm512_mask_loadu_epi8(x, mask, at) (watched::reads(at, mask, 1), _mm512_mask_loadu_epi8(x, mask, at))
#define _mm512_mask_loadu_epi16(x, mask, at) (watched::reads(at, mask, 2), _mm512_mask_loadu_epi16(x, mask, at))
#define _mm512_mask_loadu_epi32(x, mask, at) (watched::reads(at, mask, 4), _mm512_mask_loadu_epi32(x, mask, at))
#define _mm512_mask_loadu_epi64(x, mask, at) (watched::reads(at, mask, 8), _mm512_mask_loadu_epi64(x, mask, at))
#define _mm512_mask_loadu_ps(x, mask, at) (watched::reads(at, mask, 4), _mm512_mask_loadu_ps(x, mask, at))
#define _mm512_mask_loadu_pd(x, mask, at) (watched::reads(at, mask, 8), _mm512_mask_loadu_pd(x, mask, at))
#define _mm512_maskz_loadu_epi8(mask, at) (watched::reads(at, mask, 1), _mm512_maskz_loadu_epi8(mask, at))
#define _mm512_maskz_loadu_epi16(mask, at) (watched::reads(at, mask, 2), _mm512_maskz_loadu_epi16(mask, at))
#define _mm512_maskz_loadu_ps(mask, at) (watched::reads(at, mask, 4), _mm512_maskz_loadu_ps(mask, at))
#define _mm512_maskz_loadu_pd(mask, at) (watched::reads(at, mask, 8), _mm512_maskz_loadu_pd(mask, at))
#define _mm_mask_storeu_epi8(at, mask, x) (watched::writes(at, mask, 1), _mm_mask_storeu_epi8(at, mask, x))
#define _mm512_mask_storeu_epi8(at, mask, x) (watched::writes(at, mask, 1), _mm512_mask_storeu_epi8(at, mask, x))
#define _mm512_mask_storeu_epi16(at, mask, x) (watched::writes(at, mask, 2), _mm512_mask_storeu_epi16(at, mask, x))
#define _mm512_mask_storeu_epi32(at, mask, x) (watched::writes(at, mask, 4), _mm512_mask_storeu_epi32(at, mask, x))
#define _mm512_mask_storeu_epi64(at, mask, x) (watched::writes(at, mask, 8), _mm512_mask_storeu_epi64(at, mask, x))
#define _mm512_mask_storeu_ps(at, mask, x) (watched::writes(at, mask, 4), _mm512_mask_storeu_ps(at, mask, x))
#define _mm512_mask_storeu_pd(at, mask, x) (watched::writes(at, mask, 8), _mm512_mask_storeu_pd(at, mask, x))
#define _mm512_stream_ps(at, x) (watched::writes(at, 0xffff, 4), _mm512_stream_ps(at, x))
#endif
// clang-format on

#endif
