// One lane of a register tile: adds to kRows x kVectors sums the products of one number of each row
// and that lane's weights.
#pragma once

#include <type_traits>

#include "kernels/vector/products.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

template <typename Sum, int kRows, int kVectors>
struct Sums {
  Sum values[kRows * kVectors];

  // Always constructed with values: otherwise GCC clears them in memory and leaves them there.
  template <int... i>
  TORCH_BLOCKED_INLINE Sums(const Sum* start, std::integer_sequence<int, i...>)
      : values{start[i % kVectors]...} {}
  // Each row begins with the vectors at `start`.
  TORCH_BLOCKED_INLINE explicit Sums(const Sum* start)
      : Sums(start, std::make_integer_sequence<int, kRows * kVectors>()) {}

  TORCH_BLOCKED_INLINE Sum& operator()(int i, int j) { return values[i * kVectors + j]; }
};

#if defined(CPU_CAPABILITY_AVX2)
// AVX2's 16 registers are just enough for 12 sums, 3 vectors of weights and one number. But GCC
// reads weights from memory again for each product, or keeps a sum in memory once several lanes are
// unrolled. So the instructions of a row are written out: 20 a lane, where a loop of single lanes
// has 26. A tile of 4 x 3 sums and 64 lanes takes 403 and 405 cycles on a Zen 3; the FMAs alone
// need 384. While other guests of the host slow the core down, it is 480 and 600.
TORCH_BLOCKED_INLINE inline void add_products(const float* number, const __m256 (&weights)[3],
                                              Vec* sums) {
  __m256 x, a = sums[0], b = sums[1], c = sums[2];
  asm volatile(
      "vbroadcastss %4, %3\n\t"
      "vfmadd231ps %5, %3, %0\n\t"
      "vfmadd231ps %6, %3, %1\n\t"
      "vfmadd231ps %7, %3, %2"
      : "+x"(a), "+x"(b), "+x"(c), "=&x"(x)
      : "m"(*number), "x"(weights[0]), "x"(weights[1]), "x"(weights[2]));
  sums[0] = a, sums[1] = b, sums[2] = c;
}

TORCH_BLOCKED_INLINE inline void add_products(const float* number, const __m256 (&weights)[2],
                                              Vec* sums) {
  __m256 x, a = sums[0], b = sums[1];
  asm volatile(
      "vbroadcastss %3, %2\n\t"
      "vfmadd231ps %4, %2, %0\n\t"
      "vfmadd231ps %5, %2, %1"
      : "+x"(a), "+x"(b), "=&x"(x)
      : "m"(*number), "x"(weights[0]), "x"(weights[1]));
  sums[0] = a, sums[1] = b;
}

TORCH_BLOCKED_INLINE inline void add_products(const float* number, const __m256 (&weights)[1],
                                              Vec* sums) {
  __m256 x, a = sums[0];
  asm volatile(
      "vbroadcastss %2, %1\n\t"
      "vfmadd231ps %3, %1, %0"
      : "+x"(a), "=&x"(x)
      : "m"(*number), "x"(weights[0]));
  sums[0] = a;
}

template <typename Products>
constexpr bool kHasRows = std::is_base_of_v<Floats, Products>;
#else
template <typename Products>
constexpr bool kHasRows = false;
#endif

// How many lanes are worth unrolling.
template <typename Products>
constexpr int kUnrolledLanes = kHasRows<Products> ? kWidth : 1;

// Prefetches the lines of later weights for kLanes lanes, `share` numbers for each.
template <int kLanes, typename Number>
TORCH_BLOCKED_INLINE inline void prefetch_share(const Number* ahead, std::int64_t share) {
  constexpr std::int64_t kLine = 64 / sizeof(Number);
  std::int64_t i = 0;
  do {
    __builtin_prefetch(ahead + i, 0, 2);
  } while (kLanes > 1 && (i += kLine) < kLanes * share);
}

// Where the numbers of a lane lie, one for each row.
template <typename Number>
struct EvenRows {
  const Number* first;
  std::int64_t step;

  TORCH_BLOCKED_INLINE const Number* operator()(int i) const { return first + i * step; }
};

// sums[i, j] += *row(i) * weights[j], where weights[j] is a vector
template <typename Products, int kRows, int kVectors, typename Row>
TORCH_BLOCKED_INLINE inline void add_lane(const Row& row, const typename Products::Number* weights,
                                          typename Products::Sum* sums) {
  constexpr int kVector = kWidth * Products::kChannels;
#if defined(CPU_CAPABILITY_AVX2)
  if constexpr (kHasRows<Products>) {
    __m256 w[kVectors];
    TORCH_BLOCKED_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      asm volatile("vmovups %1, %0"
                   : "=x"(w[j])
                   : "m"(*reinterpret_cast<const __m256_u*>(weights + j * kVector)));
    }
    TORCH_BLOCKED_UNROLL
    for (int i = 0; i < kRows; ++i) add_products(row(i), w, sums + i * kVectors);
    return;
  }
#endif
  typename Products::Weights w[kVectors];
  TORCH_BLOCKED_UNROLL
  for (int j = 0; j < kVectors; ++j) w[j] = Products::weights(weights + j * kVector);
  TORCH_BLOCKED_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const auto x = Products::repeat(row(i));
    TORCH_BLOCKED_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      sums[i * kVectors + j] = Products::add(sums[i * kVectors + j], x, w[j]);
    }
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
