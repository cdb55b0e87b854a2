// The transforms of src of short numbers: of bytes two tiles at a time, and of bfloat16 in fixed
// point.
#pragma once

#include "kernels/winograd_src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY::winograd {

// ---- bytes
// ---------------------------------------------------------------------------------------

// Bytes of a pixel of each of two tiles as words.
TORCH_BLOCKED_INLINE inline PairWords load_words(const std::uint8_t* src,
                                                 const std::uint8_t* next) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto *first = reinterpret_cast<const __m128i_u*>(src),
             *second = reinterpret_cast<const __m128i_u*>(next);
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(*first), *second, 1);
  return reinterpret_cast<PairWords>(_mm512_cvtepu8_epi16(both));
#else
  const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src));
  const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(next));
  return reinterpret_cast<PairWords>(_mm256_cvtepu8_epi16(_mm_unpacklo_epi64(first, second)));
#endif
}

// Words of the pixels of two tiles, from the first pixel of each on.
struct TwoTiles {
  const std::uint8_t *src, *next;

  TORCH_BLOCKED_INLINE auto load(std::int64_t offset) const {
    return load_words(src + offset, next + offset);
  }
  template <int row, int column>
  void store(const PairWords& value, std::int16_t* v) const {
    put_words(value, v);
  }
};

// B^T src B of a vector of two tiles, which follow each other in V.
template <typename T>
inline void src_tiles(const WinogradShape& shape, const std::array<const std::uint8_t*, 2>& images,
                      const std::array<Walk<T>, 2>& at, std::int16_t* v, std::int64_t stride) {
  const Corner first = corner_of(shape, at[0]), second = corner_of(shape, at[1]);
  alignas(64) std::uint8_t padded[2][T::kPositions * kWidth];
  if (is_inside<T>(shape, first) && is_inside<T>(shape, second)) {
    const Steps steps = steps_of(shape);
    return src_planes<T>(
        TwoTiles{images[0] + first.offset(steps), images[1] + second.offset(steps)},
        tile_steps<kWidth>(shape), v, stride);
  }
  padded_tile<T, kWidth>(shape, images[0], first, padded[0]);
  padded_tile<T, kWidth>(shape, images[1], second, padded[1]);
  src_planes<T>(TwoTiles{padded[0], padded[1]}, kPaddedSteps<T, kWidth>, v, stride);
}

// B^T src B of bytes, whose words fill a vector with two tiles.
template <typename T, typename Products>
[[gnu::flatten]] void transform_byte_src(const WinogradShape& shape, WinogradTiles tiles,
                                         const std::uint8_t* src, std::int16_t* v) {
  const std::int64_t stride = v_stride<Products>(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = block_size_of(shape.in, kWidth);
  const std::int64_t image = shape.groups * padded_ic / kWidth * block_size;
  for (std::int64_t vector = 0; vector * kWidth < shape.ic; ++vector, src += block_size) {
    Walk<T> at(shape, tiles.first);
    for_groups(tiles.count, Products::kTiles, [&](std::int64_t begin, std::int64_t count) {
      std::int16_t* to = v + begin * padded_ic + vector * count * kWidth;
      for (; count > 1; count -= 2, to += 2 * kWidth) {
        const Walk<T> first = at;
        at.next();
        src_tiles<T>(shape, {src + first.image * image, src + at.image * image}, {first, at}, to,
                     stride);
        at.next();
      }
      if (count > 0) {
        src_tile<T, kWidth>(shape, src + at.image * image, corner_of(shape, at), to, stride);
        at.next();
      }
    });
  }
}

// ---- fixed point
// ---------------------------------------------------------------------------------

// The float32 of the largest of lanes that are bits of bfloat16 without signs.
inline float largest_bfloat(const PairWords& bits) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto all = reinterpret_cast<__m512i>(bits);
  const __m256i two =
      _mm256_max_epi16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
#else
  const auto two = reinterpret_cast<__m256i>(bits);
#endif
  const __m128i one = _mm_max_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
  // There is an instruction for the least of eight: of all ones less these.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(one, _mm_set1_epi16(-1)));
  const std::uint32_t wide = (~static_cast<std::uint32_t>(_mm_cvtsi128_si32(least)) & 0xffff) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// The larger of each lane of `most` and the absolute value of bfloat16 at src, as their bits, whose
// order is that of the values.
template <typename Words>
TORCH_BLOCKED_INLINE inline void take_larger(Words& most, const std::uint16_t* src) {
  Words bits;
  std::memcpy(&bits, src, sizeof bits);
  bits &= std::int16_t{0x7fff};
  most = most > bits ? most : bits;
}

// The same of `pixels` of a row, two at a time, the last but one twice where they are odd.
template <int kPixels>
TORCH_BLOCKED_INLINE inline void take_row(PairWords& most, const std::uint16_t* row) {
  if constexpr (kPixels == 1) {
    PixelWords alone{};
    take_larger(alone, row);
    PairWords both{};
    std::memcpy(&both, &alone, sizeof alone);
    most = most > both ? most : both;
  } else {
    unrolled<(kPixels + 1) / 2>([&]<int i>() TORCH_BLOCKED_INLINE {
      take_larger(most, row + std::min(2 * i, kPixels - 2) * kWidth);
    });
  }
}

// The same of [IC vectors, rows, kPixels, kWidth].
template <int kPixels>
void take_pixels(PairWords& most, const std::uint16_t* src, std::int64_t vectors,
                 std::int64_t vector_step, std::int64_t rows, std::int64_t row_step) {
  for (; vectors > 0; --vectors, src += vector_step) {
    for (std::int64_t i = 0; i < rows; ++i) take_row<kPixels>(most, src + i * row_step);
  }
}

// The largest absolute value in a tile; NaN if one is.
template <typename T>
float largest_value(const WinogradShape& shape, const std::uint16_t* image, const Corner& at) {
  static_assert(T::Height::kTile == 6 && T::Width::kTile == 6);
  static constexpr std::array kTake{take_pixels<1>, take_pixels<2>, take_pixels<3>,
                                    take_pixels<4>, take_pixels<5>, take_pixels<6>};
  const auto inside = [](std::int64_t from) { return std::max<std::int64_t>(from, 0); };
  const std::int64_t h = inside(at.h), w = inside(at.w);
  const std::int64_t rows = std::min(at.h + T::Height::kTile, shape.in[1]) - h,
                     pixels = std::min(at.w + T::Width::kTile, shape.in[2]) - w;
  if (at.d < 0 || at.d >= shape.in[0] || pixels <= 0 || rows <= 0) return 0;
  const Steps steps = steps_of(shape);
  PairWords most{};
  kTake[static_cast<std::size_t>(pixels - 1)](
      most, image + at.d * steps.plane + h * steps.row + w * steps.pixel,
      (shape.ic + kWidth - 1) / kWidth, shape.in[0] * steps.plane, rows, steps.row);
  return largest_bfloat(most);
}

// What the products of a tile are multiplied by, where its largest value makes the largest word:
// NaN where values are none or infinite, so that all outputs of the tile are NaN. What is as small
// as almost denormal counts as 0.
inline float tile_scale(float largest, float largest_word) {
  constexpr float kSmall = 1e-33f;
  if (!std::isfinite(largest)) return std::nanf("");
  return largest > kSmall ? largest / largest_word : 0;
}

// The pixels of a tile, of which words are made by its scale.
template <typename Plane>
struct FixedTile {
  const std::uint16_t* src;
  float scale;

  auto load(std::int64_t offset) const { return load_bfloats(src + offset); }
  template <int row, int column>
  void store(const Vec& value, std::int16_t* v) const {
    store_words(value * Vec(scale * (Plane::kShare[row] * Plane::kShare[column])), v);
  }
};

// B^T src B of a tile, times `factor`.
template <typename T>
inline void fixed_tile(const WinogradShape& shape, const std::uint16_t* image, const Walk<T>& at,
                       float factor, std::int16_t* v, std::int64_t stride) {
  const Corner corner = corner_of(shape, at);
  if (is_inside<T>(shape, corner)) {
    const std::uint16_t* src = image + corner.offset(steps_of(shape));
    const TileSteps<kWidth> steps = tile_steps<kWidth>(shape);
    prefetch_tile<T>(src + 2 * T::Width::kM * steps.pixel, steps);
    return src_planes<T>(FixedTile<typename T::Width>{src, factor}, steps, v, stride);
  }
  alignas(64) std::uint16_t padded[T::kPositions * kWidth];
  padded_tile<T, kWidth>(shape, image, corner, padded);
  src_planes<T>(FixedTile<typename T::Width>{padded, factor}, kPaddedSteps<T, kWidth>, v, stride);
}

// The same as transform_src in fixed point: V ends with what the products of each tile are
// multiplied by.
template <typename T, typename Products>
[[gnu::flatten]] void transform_fixed_src(const WinogradShape& shape, WinogradTiles tiles,
                                          const std::uint16_t* src, std::int16_t* v) {
  const std::int64_t stride = v_stride<Products>(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = block_size_of(shape.in, kWidth);
  const std::int64_t image = shape.groups * padded_ic / kWidth * block_size;
  auto* scales = reinterpret_cast<float*>(v + T::kPositions * stride);
  Walk<T> at(shape, tiles.first);
  for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
    const float largest = largest_value<T>(shape, src + at.image * image, corner_of(shape, at));
    scales[i] = tile_scale(largest, Products::kLargest);
  }
  for (std::int64_t vector = 0; vector * kWidth < shape.ic; ++vector, src += block_size) {
    at = Walk<T>(shape, tiles.first);
    for_groups(tiles.count, Products::kTiles, [&](std::int64_t begin, std::int64_t count) {
      std::int16_t* to = v + begin * padded_ic + vector * count * kWidth;
      for (std::int64_t i = 0; i < count; ++i, to += kWidth, at.next()) {
        const float factor = scales[begin + i] > 0 ? 1 / scales[begin + i] : 0;
        fixed_tile<T>(shape, src + at.image * image, at, factor, to, stride);
      }
    });
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
