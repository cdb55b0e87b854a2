// Transforms src of short numbers: bytes two tiles at a time, and bfloat16 in fixed point.
#pragma once

#include "kernels/winograd/src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY::winograd {

// ---- bytes ----

// Rows of a transform that are computed together because they share sums.
template <int... rows>
struct Rows {};

template <typename... passes>
struct Passes {};

// The passes of WholeF4. All rows at once would take more registers than there are.
using BytePasses = Passes<Rows<0>, Rows<1, 2>, Rows<3, 4>, Rows<5>>;

// The steps of a tile whose pixels are adjacent. Because the step of pixels is a constant, the
// addresses of a tile of 6 x 6 take 6 registers. With variables most of the 36 addresses lay in
// memory, which took a third of the time.
struct TileSteps {
  static constexpr std::int64_t pixel = kWidth;
  std::int64_t row;
};

// kWidth words of a pixel, and of two pixels. These are GCC's vectors: it keeps arrays of them in
// registers, but not arrays of a class of vectors.
using PixelWords [[gnu::vector_size(2 * kWidth)]] = std::int16_t;
using PairWords [[gnu::vector_size(4 * kWidth)]] = std::int16_t;

// Loads the bytes of a pixel as words.
TORCH_BLOCKED_INLINE inline PixelWords load_words(const std::uint8_t* src) {
  using Bytes [[gnu::vector_size(kWidth)]] = std::uint8_t;
  Bytes bytes;
  std::memcpy(&bytes, src, sizeof bytes);
  return __builtin_convertvector(bytes, PixelWords);
}

template <typename Words>
TORCH_BLOCKED_INLINE inline void put_words(const Words& words, std::int16_t* dst) {
  std::memcpy(dst, &words, sizeof words);
}

// Loads the bytes of one pixel of each of two tiles as words.
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

// Load words of a tile's pixels, or of two tiles' pixels, by their offset from the first pixel.
struct OneTile {
  const std::uint8_t* src;

  TORCH_BLOCKED_INLINE auto load(std::int64_t offset) const { return load_words(src + offset); }
};

struct TwoTiles {
  const std::uint8_t *src, *next;

  TORCH_BLOCKED_INLINE auto load(std::int64_t offset) const {
    return load_words(src + offset, next + offset);
  }
};

template <typename T, int... rows, typename Source>
inline void src_pass(Rows<rows...>, const Source& src, const TileSteps& steps, std::int16_t* v,
                     std::int64_t stride) {
  using Height = typename T::Height;
  using Width = typename T::Width;
  constexpr int kRows[] = {rows...};
  using Words = std::remove_cvref_t<decltype(src.load(0))>;
  Words t[sizeof...(rows)][Width::kTile];
  unrolled<Width::kTile>([&]<int column>() {
    const auto element = [&](int i) { return src.load(i * steps.row + column * steps.pixel); };
    unrolled<sizeof...(rows)>(
        [&]<int i>() { t[i][column] = Height::template src<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    unrolled<Width::kTile>([&]<int column>() {
      const Words value = Width::template src<column>([&](int j) { return t[i][j]; });
      put_words(value, v + (kRows[i] * Width::kTile + column) * stride);
    });
  });
}

template <typename T, typename... passes, typename Source>
inline void src_passes(Passes<passes...>, const Source& src, const TileSteps& steps,
                       std::int16_t* v, std::int64_t stride) {
  (src_pass<T>(passes(), src, steps, v, stride), ...);
}

// B^T src B; position p to v + p * stride.
template <typename T, typename Source>
inline void src_words(const Source& src, const TileSteps& steps, std::int16_t* v,
                      std::int64_t stride) {
  src_passes<T>(BytePasses(), src, steps, v, stride);
}

// Whether all pixels of a tile are in src.
template <typename T>
inline bool is_inside(const WinogradShape& shape, const Corner& at) {
  const auto inside = [&](std::size_t i, std::int64_t first, std::int64_t tile) {
    return first >= 0 && first + tile <= shape.in[i];
  };
  return inside(0, at.d, 1) && inside(1, at.h, T::Height::kTile) &&
         inside(2, at.w, T::Width::kTile);
}

// Copies a tile of an image with padding around it, [rows, pixels, kWidth].
template <typename T>
void padded_tile(const WinogradShape& shape, const std::uint8_t* image, const Corner& at,
                 std::uint8_t* tile) {
  constexpr std::int64_t kPixels = T::Width::kTile;
  const std::int64_t begin = std::clamp<std::int64_t>(-at.w, 0, kPixels),
                     end = std::clamp(shape.in[2] - at.w, begin, kPixels);  // of what is inside
  for (std::int64_t h = at.h; h < at.h + T::Height::kTile; ++h, tile += kPixels * kWidth) {
    std::fill_n(tile, kPixels * kWidth, shape.padding_number);
    if (at.d < 0 || at.d >= shape.in[0] || h < 0 || h >= shape.in[1]) continue;
    const std::uint8_t* from = image + Corner{at.d, h, at.w + begin}.offset(steps_of(shape));
    std::memcpy(tile + begin * kWidth, from, static_cast<std::size_t>((end - begin) * kWidth));
  }
}

template <typename T>
inline constexpr TileSteps kPaddedSteps{T::Width::kTile * kWidth};

// B^T src B for a vector of one tile.
template <typename T>
inline void src_tile(const WinogradShape& shape, const std::uint8_t* image, const Walk<T>& at,
                     std::int16_t* v, std::int64_t stride) {
  const Corner corner = corner_of(shape, at);
  alignas(64) std::uint8_t padded[T::kPositions * kWidth];
  if (is_inside<T>(shape, corner)) {
    const OneTile tile{image + corner.offset(steps_of(shape))};
    return src_words<T>(tile, {shape.in_steps[1]}, v, stride);
  }
  padded_tile<T>(shape, image, corner, padded);
  src_words<T>(OneTile{padded}, kPaddedSteps<T>, v, stride);
}

// The same for two tiles, which are adjacent in V.
template <typename T>
inline void src_tiles(const WinogradShape& shape, const std::array<const std::uint8_t*, 2>& images,
                      const std::array<Walk<T>, 2>& at, std::int16_t* v, std::int64_t stride) {
  const Corner first = corner_of(shape, at[0]), second = corner_of(shape, at[1]);
  alignas(64) std::uint8_t padded[2][T::kPositions * kWidth];
  if (is_inside<T>(shape, first) && is_inside<T>(shape, second)) {
    const Steps steps = steps_of(shape);
    return src_words<T>(TwoTiles{images[0] + first.offset(steps), images[1] + second.offset(steps)},
                        {shape.in_steps[1]}, v, stride);
  }
  padded_tile<T>(shape, images[0], first, padded[0]);
  padded_tile<T>(shape, images[1], second, padded[1]);
  src_words<T>(TwoTiles{padded[0], padded[1]}, kPaddedSteps<T>, v, stride);
}

// B^T src B for bytes. The words of two tiles fill a vector.
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
        src_tile(shape, src + at.image * image, at, to, stride);
        at.next();
      }
    });
  }
}

// ---- fixed point ----

// The largest of lanes that are bits of bfloat16 without signs, as float32.
inline float largest_bfloat(const PairWords& bits) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto all = reinterpret_cast<__m512i>(bits);
  const __m256i two =
      _mm256_max_epi16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
#else
  const auto two = reinterpret_cast<__m256i>(bits);
#endif
  const __m128i one = _mm_max_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
  // There is an instruction for the least of eight, so it runs on the complement.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(one, _mm_set1_epi16(-1)));
  const std::uint32_t wide = (~static_cast<std::uint32_t>(_mm_cvtsi128_si32(least)) & 0xffff) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Sets each lane of `most` to the larger of itself and the absolute value of the bfloat16 at src.
// It compares their bits, which have the order of the values.
template <typename Words>
TORCH_BLOCKED_INLINE inline void take_larger(Words& most, const std::uint16_t* src) {
  Words bits;
  std::memcpy(&bits, src, sizeof bits);
  bits &= std::int16_t{0x7fff};
  most = most > bits ? most : bits;
}

// The same for kPixels pixels of a row, two at a time. If their number is odd, one is taken twice.
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

// The same for [IC vectors, rows, kPixels, kWidth].
template <int kPixels>
void take_pixels(PairWords& most, const std::uint16_t* src, std::int64_t vectors,
                 std::int64_t vector_step, std::int64_t rows, std::int64_t row_step) {
  for (; vectors > 0; --vectors, src += vector_step) {
    for (std::int64_t i = 0; i < rows; ++i) take_row<kPixels>(most, src + i * row_step);
  }
}

// The largest absolute value in a tile; NaN if any value is NaN.
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

// The factor of a tile's products, if its largest value becomes the largest word. It is NaN if a
// value is NaN or infinite, so that all outputs of the tile are NaN. Almost denormal values count
// as 0.
inline float tile_scale(float largest, float largest_word) {
  constexpr float kSmall = 1e-33f;
  if (!std::isfinite(largest)) return std::nanf("");
  return largest > kSmall ? largest / largest_word : 0;
}

// Stores the words of a tile, which are values times `factor`.
template <typename T>
struct FixedPositions {
  std::int16_t* v;
  std::int64_t stride;
  float factor;

  void operator()(int row, int column, const Vec& value) const {
    constexpr auto& kShare = T::Width::kShare;
    store_words(value * Vec(factor * (kShare[row] * kShare[column])),
                v + (row * T::Width::kTile + column) * stride);
  }
};

// transform_src in fixed point. V ends with the factor of each tile's products.
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
    GroupOf group(tiles.count, Products::kTiles);
    const auto put_of = [&](std::int64_t tile, int) {
      group.go_to(tile);
      return FixedPositions<T>{
          v + group.begin * padded_ic +
              (vector * (group.end - group.begin) + tile - group.begin) * kWidth,
          stride, scales[tile] > 0 ? 1 / scales[tile] : 0};
    };
    transform_tiles<T, kWidth>(shape, tiles, src, image, Corner{}, put_of);
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
