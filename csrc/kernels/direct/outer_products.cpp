// Sums the products of a weight's gradient: src channels times diff_dst channels, over pixels.
#include "kernels/direct/outer_products.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// A register tile of kRows x kVectors sums. 32 registers hold 8 x 3, 3 vectors of b and 1
// broadcast; 16 hold 4 x 3.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kVectors = 3;

// a [images, rows, pixels, kA], b [images, rows, pixels, kB vectors] -> sums [kA, kB vectors]
template <int kA, int kB>
void tile(const OuterProducts& p, std::int64_t first_vector) {
  Vec sums[kA * kB];
#pragma GCC unroll 24
  for (int i = 0; i < kA * kB; ++i) sums[i] = Vec(0.f);
  std::array<std::int64_t, kB> vector;
  for (int j = 0; j < kB; ++j) {
    const std::int64_t lane = (p.b_first + first_vector + j) * kWidth;
    vector[j] = lane / p.b_block * p.b_block_stride + lane % p.b_block;
  }
  for (int i = 0; i < kA; ++i) {
    for (int j = 0; j < kB; ++j) __builtin_prefetch(p.sums + i * p.sums_row + j * p.sums_vector, 1);
  }
  for (std::int64_t image = 0; image < p.images; ++image) {
    for (std::int64_t row = 0; row < p.rows; ++row) {
      const float* a = p.a + image * p.a_image + row * p.a_row;
      const float* b = p.b + image * p.b_image + row * p.b_row;
      for (std::int64_t pixel = 0; pixel < p.pixels; ++pixel, a += p.a_pixel, b += p.b_pixel) {
        __builtin_prefetch(a + p.a_ahead, 0, 2);
        Vec y[kB];
#pragma GCC unroll 3
        for (int j = 0; j < kB; ++j) {
          y[j] = Vec::loadu(b + vector[j]);
          __builtin_prefetch(b + vector[j] + p.b_ahead, 0, 2);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kA; ++i) {
          const Vec x(a[i]);
#pragma GCC unroll 3
          for (int j = 0; j < kB; ++j) sums[i * kB + j] = at::vec::fmadd(x, y[j], sums[i * kB + j]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kA; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kB; ++j) {
      float* to = p.sums + i * p.sums_row + j * p.sums_vector;
      (p.add ? Vec::loadu(to) + sums[i * kB + j] : sums[i * kB + j]).store(to);
    }
  }
}

using Tile = void (*)(const OuterProducts&, std::int64_t);

template <int kB, int... i>
constexpr std::array<Tile, kRows> tiles_of(std::integer_sequence<int, i...>) {
  return {tile<i + 1, kB>...};
}

constexpr auto kSequence = std::make_integer_sequence<int, kRows>();
// [vectors - 1][rows - 1]
constexpr std::array<std::array<Tile, kRows>, kVectors> kTiles{
    tiles_of<1>(kSequence), tiles_of<2>(kSequence), tiles_of<3>(kSequence)};

// Calls f(first, count) for parts of [0, size) of at most `most`, as even as possible.
template <typename F>
inline void for_parts(std::int64_t size, std::int64_t most, F&& f) {
  const std::int64_t parts = (size + most - 1) / most;
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t first = part * size / parts;
    f(first, (part + 1) * size / parts - first);
  }
}

}  // namespace

void outer_products(const OuterProducts& p) {
  // The vectors of b stay in L1 for all channels of a.
  for_parts(p.b_vectors, kVectors, [&](std::int64_t vector, std::int64_t vectors) {
    for (std::int64_t first = 0; first < p.a_count; first += kRows) {
      const std::int64_t rows = std::min<std::int64_t>(kRows, p.a_count - first);
      OuterProducts part = p;
      part.a += first / p.a_block * p.a_block_stride + first % p.a_block;
      part.sums += first * p.sums_row + vector * p.sums_vector;
      kTiles[static_cast<std::size_t>(vectors - 1)][static_cast<std::size_t>(rows - 1)](part,
                                                                                        vector);
    }
  });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
