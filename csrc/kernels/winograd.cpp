// The transforms of Winograd convolution F(2x2, 3x3) and F(4x4, 3x3).
//
// F(4, 3) interpolates at 0, +-1/sqrt(2), +-sqrt(2) and infinity: 2-3 times closer to the exact
// result than with the textbook's 0, +-1, +-2. Source: Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks", 2015.
#include "kernels/winograd.h"

#include <array>
#include <cstring>

#include "kernels/epilogue.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

constexpr float kSqrt2 = 1.41421356237309505f, kHalfSqrt2 = 0.70710678118654752f;

inline Vec fma(float a, const Vec& b, const Vec& c) { return at::vec::fmadd(Vec(a), b, c); }

// Rows of a transform that are worked out together: they share sums, and fit in 16 registers.
template <int... rows>
struct Rows {};

template <typename... passes>
struct Passes {};

// Each is written for one column: input(r) gives row i of B^T r, and so on, with r(i) its elements.
struct F4 {
  static constexpr int kM = 4, kTile = 6;
  using SrcPasses = Passes<Rows<0>, Rows<1, 2>, Rows<3, 4>, Rows<5>>;
  using DstPasses = Passes<Rows<0, 2>, Rows<1, 3>>;

  // B^T
  template <int row, typename R>
  static Vec src(R&& r) {
    if constexpr (row == 0) return fma(-2.5f, r(2), r(0) + r(4));
    if constexpr (row == 5) return fma(-2.5f, r(3), r(1) + r(5));
    const Vec outer_even = fma(-2.f, r(2), r(4));
    const Vec outer_odd = fma(kSqrt2, r(1), Vec(-kHalfSqrt2) * r(3));
    if constexpr (row == 1) return outer_even - outer_odd;
    if constexpr (row == 2) return outer_even + outer_odd;
    const Vec inner_even = fma(-0.5f, r(2), r(4));
    const Vec inner_odd = fma(kHalfSqrt2, r(1), Vec(-kSqrt2) * r(3));
    if constexpr (row == 3) return inner_even - inner_odd;
    return inner_even + inner_odd;
  }

  // A^T
  template <int row, typename R>
  static Vec dst(R&& r) {
    const Vec sum1 = r(1) + r(2), sum2 = r(3) + r(4);
    if constexpr (row == 0) return r(0) + sum1 + sum2;
    if constexpr (row == 2) return fma(0.5f, sum1, sum2 + sum2);
    const Vec difference1 = r(1) - r(2), difference2 = r(3) - r(4);
    if constexpr (row == 1) return fma(kHalfSqrt2, difference1, Vec(kSqrt2) * difference2);
    return fma(kHalfSqrt2 / 2, difference1, fma(2 * kSqrt2, difference2, r(5)));
  }

  // G
  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 5) return r(2);
    constexpr float third = 1.f / 3;
    constexpr float sign = row % 2 == 1 ? 1.f : -1.f;
    if constexpr (row < 3) {
      return Vec(-third) * (r(0) + r(0) + r(2) + Vec(sign * kSqrt2) * r(1));
    }
    return Vec(third) * (fma(0.5f, r(0), r(2)) + Vec(sign * kHalfSqrt2) * r(1));
  }

  // A
  template <int row, typename R>
  static Vec diff_dst(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 5) return r(3);
    constexpr float factor = row < 3 ? 0.5f : 2.f;
    const Vec even = fma(factor, r(2), r(0)), odd = fma(factor, r(3), r(1));
    constexpr float sign = row % 2 == 1 ? 1.f : -1.f;
    return fma(sign * (row < 3 ? kHalfSqrt2 : kSqrt2), odd, even);
  }

  // G^T
  template <int row, typename R>
  static Vec diff_weights(R&& r) {
    constexpr float third = 1.f / 3;
    if constexpr (row == 1) {
      return fma(third * kSqrt2, r(2) - r(1), Vec(third * kHalfSqrt2) * (r(3) - r(4)));
    }
    const Vec inner = r(1) + r(2), outer = r(3) + r(4);
    if constexpr (row == 0) return fma(-2 * third, inner, fma(0.5f * third, outer, r(0)));
    return fma(third, outer - inner, r(5));
  }
};

struct F2 {
  static constexpr int kM = 2, kTile = 4;
  using SrcPasses = Passes<Rows<0>, Rows<1, 2>, Rows<3>>;
  using DstPasses = Passes<Rows<0, 1>>;

  template <int row, typename R>
  static Vec src(R&& r) {
    if constexpr (row == 0) return r(0) - r(2);
    if constexpr (row == 1) return r(1) + r(2);
    if constexpr (row == 2) return r(2) - r(1);
    return r(3) - r(1);
  }

  template <int row, typename R>
  static Vec dst(R&& r) {
    if constexpr (row == 0) return r(0) + (r(1) + r(2));
    return (r(1) - r(2)) + r(3);
  }

  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 1) return Vec(0.5f) * (r(0) + r(2) + r(1));
    if constexpr (row == 2) return Vec(0.5f) * (r(0) + r(2) - r(1));
    return r(2);
  }
};

// Calls f.operator()<i>() for i in [0, kCount).
template <int kCount, typename F>
inline void unrolled(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// Walks the tiles of one image after the other.
struct Position {
  std::int64_t image, h, w;

  Position(std::int64_t tile, std::int64_t tiles_h, std::int64_t tiles_w)
      : image(tile / (tiles_h * tiles_w)), h(tile / tiles_w % tiles_h), w(tile % tiles_w) {}

  void next(std::int64_t tiles_h, std::int64_t tiles_w) {
    if (++w < tiles_w) return;
    w = 0;
    if (++h < tiles_h) return;
    h = 0;
    ++image;
  }
};

template <typename T, int kLanes, int... rows>
inline void src_pass(Rows<rows...>, const float* src, std::int64_t row_stride,
                     std::int64_t pixel_stride, float* v, std::int64_t stride) {
  constexpr int kRows[] = {rows...};
  Vec t[sizeof...(rows)][T::kTile];
  unrolled<T::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return Vec::loadu(src + i * row_stride + column * pixel_stride, kLanes);
    };
    unrolled<sizeof...(rows)>([&]<int i>() { t[i][column] = T::template src<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    unrolled<T::kTile>([&]<int column>() {
      T::template src<column>([&](int j) {
        return t[i][j];
      }).store(v + (kRows[i] * T::kTile + column) * stride, kLanes);
    });
  });
}

// B^T src B of kLanes channels of one tile; position p to v + p * stride.
template <typename T, int kLanes, typename... passes>
inline void src_tile(Passes<passes...>, const float* src, std::int64_t row_stride,
                     std::int64_t pixel_stride, float* v, std::int64_t stride) {
  (src_pass<T, kLanes>(passes(), src, row_stride, pixel_stride, v, stride), ...);
}

// The tile at (h, w) of an image with zeros around it, [kTile, kTile, kLanes].
template <typename T, int kLanes>
void padded_tile(const WinogradShape& shape, const float* image, std::int64_t h, std::int64_t w,
                 float* tile) {
  std::memset(tile, 0, sizeof(float) * T::kTile * T::kTile * kLanes);
  const std::int64_t begin = std::max<std::int64_t>(0, -w);
  const std::int64_t end = std::min<std::int64_t>(T::kTile, shape.in_w - w);
  for (std::int64_t i = std::max<std::int64_t>(0, -h); i < T::kTile && h + i < shape.in_h; ++i) {
    for (std::int64_t j = begin; j < end; ++j) {
      Vec::loadu(image + ((h + i) * shape.in_w + w + j) * shape.block, kLanes)
          .store(tile + (i * T::kTile + j) * kLanes, kLanes);
    }
  }
}

// What the tile two further on will read first; 6 rows at a time are too many for the hardware to
// foresee: src in L3 takes a quarter less time.
template <typename T>
inline void prefetch_tile(const WinogradShape& shape, const float* image, std::int64_t h,
                          std::int64_t w) {
  for (int i = 0; i < T::kTile; ++i) {
    for (int j = T::kTile - T::kM; j < T::kTile; ++j) {
      __builtin_prefetch(image + ((h + i) * shape.in_w + w + j) * shape.block);
    }
  }
}

// Flattened: left to itself, GCC calls a function for each row of half-filled vectors (8c on
// AVX-512).
template <typename T, int kLanes>
[[gnu::flatten]] void transform_src(const WinogradShape& shape, WinogradTiles tiles,
                                    const float* src, float* v) {
  const std::int64_t tiles_h = (shape.out_h + T::kM - 1) / T::kM;
  const std::int64_t tiles_w = (shape.out_w + T::kM - 1) / T::kM;
  const std::int64_t stride = v_stride(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = shape.in_h * shape.in_w * shape.block;
  const std::int64_t blocks = (shape.ic + shape.block - 1) / shape.block;
  alignas(64) float padded[T::kTile * T::kTile * kLanes];
  for (std::int64_t channel = 0; channel < shape.ic; channel += kLanes) {
    const float* first = src + channel / shape.block * block_size + channel % shape.block;
    Position at(tiles.first, tiles_h, tiles_w);
    for_groups(tiles.count, [&](std::int64_t begin, std::int64_t count) {
      // [tiles of the group, kWidth]
      float* to = v + begin * padded_ic + channel / kWidth * count * kWidth + channel % kWidth;
      for (std::int64_t i = 0; i < count; ++i, to += kWidth, at.next(tiles_h, tiles_w)) {
        const float* image = first + at.image * blocks * block_size;
        const std::int64_t h = at.h * T::kM - shape.pad_h, w = at.w * T::kM - shape.pad_w;
        const bool inside =
            h >= 0 && w >= 0 && h + T::kTile <= shape.in_h && w + T::kTile <= shape.in_w;
        if (inside) prefetch_tile<T>(shape, image, h, w + 2 * T::kM);
        if (!inside) padded_tile<T, kLanes>(shape, image, h, w, padded);
        src_tile<T, kLanes>(typename T::SrcPasses(),
                            inside ? image + (h * shape.in_w + w) * shape.block : padded,
                            inside ? shape.in_w * shape.block : T::kTile * kLanes,
                            inside ? shape.block : kLanes, to, stride);
      }
    });
  }
}

// Where one tile's outputs go: rows x columns of them are inside dst.
struct DstTile {
  float* dst;
  std::int64_t row_stride, pixel_stride, rows, columns;
};

// What happens to an output on its way to memory.
struct Store {
  Vec bias, lanes;  // lanes: all bits of the channels there are, none of the tail
  Finish finish;
  bool stream;

  template <int kLanes>
  void operator()(const Vec& sum, float* dst) const {
    const Vec value = finish(sum + bias, dst, kLanes) & lanes;
    kLanes == kWidth&& stream ? kernels::CPU_CAPABILITY::stream(value, dst)
                              : value.store(dst, kLanes);
  }
};

template <typename T, int kLanes, int... rows>
inline void dst_pass(Rows<rows...>, const float* m, std::int64_t stride, const Store& store,
                     const DstTile& to) {
  constexpr int kRows[] = {rows...};
  Vec t[sizeof...(rows)][T::kTile];
  unrolled<T::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return Vec::loadu(m + (i * T::kTile + column) * stride, kLanes);
    };
    unrolled<sizeof...(rows)>([&]<int i>() { t[i][column] = T::template dst<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    if (kRows[i] >= to.rows) return;
    unrolled<T::kM>([&]<int column>() {
      if (column >= to.columns) return;
      store.template operator()<kLanes>(
          T::template dst<column>([&](int j) { return t[i][j]; }),
          to.dst + kRows[i] * to.row_stride + column * to.pixel_stride);
    });
  });
}

template <typename T, int kLanes, typename... passes>
inline void dst_tile(Passes<passes...>, const float* m, std::int64_t stride, const Store& store,
                     const DstTile& to) {
  (dst_pass<T, kLanes>(passes(), m, stride, store, to), ...);
}

template <typename T, int kLanes>
[[gnu::flatten]] void transform_dst(const WinogradShape& shape, WinogradTiles tiles,
                                    std::int64_t group, const float* m, const WinogradDst& to) {
  const std::int64_t tiles_h = (shape.out_h + T::kM - 1) / T::kM;
  const std::int64_t tiles_w = (shape.out_w + T::kM - 1) / T::kM;
  const std::int64_t block_size = shape.out_h * shape.out_w * shape.block;
  const std::int64_t blocks = (shape.oc + shape.block - 1) / shape.block;
  const std::int64_t first = group * kGroupChannels;
  const std::int64_t end = std::min(first + kGroupChannels, blocks * shape.block);
  for (std::int64_t channel = first; channel < end; channel += kLanes, m += kLanes) {
    const std::int64_t count = std::clamp<std::int64_t>(shape.oc - channel, 0, kLanes);
    const Store store{to.bias && count ? Vec::loadu(to.bias + channel, count) : Vec(0.f),
                      lanes_mask(count), Finish(to.epilogue, to.residual, to.dst), shape.stream};
    float* block = to.dst + channel / shape.block * block_size + channel % shape.block;
    Position at(tiles.first, tiles_h, tiles_w);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next(tiles_h, tiles_w)) {
      const std::int64_t h = at.h * T::kM, w = at.w * T::kM;
      dst_tile<T, kLanes>(
          typename T::DstPasses(), m + i * kGroupChannels, m_stride(tiles.count), store,
          {block + at.image * blocks * block_size + (h * shape.out_w + w) * shape.block,
           shape.out_w * shape.block, shape.block, shape.out_h - h, shape.out_w - w});
    }
  }
}

// G weights G^T of one input channel and a vector of output channels; position p to u + p * stride.
template <typename T>
inline void weights_tile(const float (*taps)[kWidth], float* u, std::int64_t stride) {
  Vec t[T::kTile][3];
  unrolled<3>([&]<int column>() {
    const auto element = [&](int i) { return Vec::loadu(taps[i * 3 + column]); };
    unrolled<T::kTile>([&]<int row>() { t[row][column] = T::template weights<row>(element); });
  });
  unrolled<T::kTile>([&]<int row>() {
    unrolled<T::kTile>([&]<int column>() {
      const Vec value = T::template weights<column>([&](int j) { return t[row][j]; });
      float* to = u + (row * T::kTile + column) * stride;
      // U is often larger than the caches. A whole cache line need not be read to be written.
      sizeof(Vec) == 64 ? stream(value, to) : value.store(to);
    });
  });
}

template <typename T>
void transform_weights(const WinogradWeights& w, std::int64_t channel, std::int64_t begin,
                       std::int64_t end, std::int64_t padded_oc, float* u) {
  constexpr std::int64_t positions = T::kTile * T::kTile;
  const std::int64_t first = channel / kGroupChannels * kGroupChannels;  // of the group
  const std::int64_t channels = std::min(kGroupChannels, padded_oc - first);
  u += first * positions * w.ic + channel - first;
  const std::int64_t count = std::clamp<std::int64_t>(w.oc - channel, 0, kWidth);
  alignas(64) float taps[9][kWidth] = {};
  for (std::int64_t ic = begin; ic < end; ++ic) {
    for (std::int64_t lane = 0; lane < count; ++lane) {
      const float* from = w.data + (channel + lane) * w.oc_stride + ic * w.ic_stride;
      for (int i = 0; i < 9; ++i) taps[i][lane] = from[i / 3 * w.h_stride + i % 3 * w.w_stride];
    }
    weights_tile<T>(taps, u + ic * channels, w.ic * channels);
  }
  stream_fence();
}

template <typename T>
std::int64_t v_size(const WinogradShape& shape, std::int64_t tiles) {
  return T::kTile * T::kTile * v_stride(shape.ic, tiles);
}

template <typename T>
std::int64_t m_size(const WinogradShape&, std::int64_t tiles) {
  return T::kTile * T::kTile * m_stride(tiles);
}

template <typename T>
void src_of(const WinogradShape& shape, WinogradTiles tiles, const float* src, float* v) {
  const bool whole = shape.block % kWidth == 0;
  (whole ? transform_src<T, kWidth> : transform_src<T, 8>)(shape, tiles, src, v);
}

template <typename T>
void dst_of(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group, const float* m,
            const WinogradDst& dst) {
  const bool whole = shape.block % kWidth == 0;
  (whole ? transform_dst<T, kWidth> : transform_dst<T, 8>)(shape, tiles, group, m, dst);
}

template <typename T>
void multiply_of(const WinogradShape& shape, std::int64_t tiles, std::int64_t group, const float* v,
                 const float* u, float* m) {
  winograd_multiply(shape, T::kTile * T::kTile, tiles, group, v, u, m);
}

template <typename T>
constexpr Winograd winograd_of() {
  return {.m = T::kM,
          .positions = T::kTile * T::kTile,
          .src = src_of<T>,
          .multiply = multiply_of<T>,
          .dst = dst_of<T>,
          .weights = transform_weights<T>,
          .channels = kGroupChannels,
          .group_tiles = kGroupTiles,
          .v_size = v_size<T>,
          .m_size = m_size<T>};
}

// --- the gradient of the weights

std::int64_t slab_stride(std::int64_t channels, std::int64_t slab) {
  return slab * round_up(channels, kWidth) + kPad;
}

// Calls f(channel, image, at, to) for every vector of channels and tile of the slab; clears the
// rest.
template <typename T, typename F>
inline void for_slab(const WinogradShape& shape, WinogradTiles tiles, std::int64_t slab,
                     std::int64_t channels, float* values, F&& f) {
  const std::int64_t tiles_h = (shape.out_h + T::kM - 1) / T::kM;
  const std::int64_t tiles_w = (shape.out_w + T::kM - 1) / T::kM;
  const std::int64_t stride = slab_stride(channels, slab);
  for (std::int64_t channel = 0; channel < channels; channel += kWidth) {
    float* to = values + channel * slab;  // [slab, kWidth]
    Position at(tiles.first, tiles_h, tiles_w);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next(tiles_h, tiles_w)) {
      f(channel, at, to + i * kWidth, stride);
    }
    for (std::int64_t position = 0; position < T::kTile * T::kTile; ++position) {
      std::fill(to + position * stride + tiles.count * kWidth,
                to + position * stride + slab * kWidth, 0.f);
    }
  }
}

// The first float of a vector of channels of an image.
inline const float* channel_of(const float* data, const WinogradShape& shape, std::int64_t image,
                               std::int64_t channels, std::int64_t channel, std::int64_t pixels) {
  const std::int64_t blocks = (channels + shape.block - 1) / shape.block;
  return data + (image * blocks + channel / shape.block) * pixels * shape.block +
         channel % shape.block;
}

template <typename T>
[[gnu::flatten]] void slab_of_src(const WinogradShape& shape, WinogradTiles tiles,
                                  std::int64_t slab, const float* src, float* v) {
  alignas(64) float padded[T::kTile * T::kTile * kWidth];
  for_slab<T>(shape, tiles, slab, shape.ic, v,
              [&](std::int64_t channel, const Position& at, float* to, std::int64_t stride) {
                const float* image =
                    channel_of(src, shape, at.image, shape.ic, channel, shape.in_h * shape.in_w);
                const std::int64_t h = at.h * T::kM - shape.pad_h, w = at.w * T::kM - shape.pad_w;
                const bool inside =
                    h >= 0 && w >= 0 && h + T::kTile <= shape.in_h && w + T::kTile <= shape.in_w;
                if (inside) prefetch_tile<T>(shape, image, h, w + 2 * T::kM);
                if (!inside) padded_tile<T, kWidth>(shape, image, h, w, padded);
                src_tile<T, kWidth>(typename T::SrcPasses(),
                                    inside ? image + (h * shape.in_w + w) * shape.block : padded,
                                    inside ? shape.in_w * shape.block : T::kTile * kWidth,
                                    inside ? shape.block : kWidth, to, stride);
              });
}

// A diff_dst A^T of one vector of channels of one tile.
template <typename T>
inline void diff_dst_tile(const float* diff, std::int64_t row_stride, std::int64_t pixel_stride,
                          float* d, std::int64_t stride) {
  Vec t[T::kTile][T::kM];
  unrolled<T::kM>([&]<int column>() {
    const auto element = [&](int i) {
      return Vec::loadu(diff + i * row_stride + column * pixel_stride);
    };
    unrolled<T::kTile>([&]<int row>() { t[row][column] = T::template diff_dst<row>(element); });
  });
  unrolled<T::kTile>([&]<int row>() {
    unrolled<T::kTile>([&]<int column>() {
      T::template diff_dst<column>([&](int j) {
        return t[row][j];
      }).store(d + (row * T::kTile + column) * stride);
    });
  });
}

template <typename T>
[[gnu::flatten]] void slab_of_diff_dst(const WinogradShape& shape, WinogradTiles tiles,
                                       std::int64_t slab, const float* diff_dst, float* d) {
  alignas(64) float padded[T::kM * T::kM * kWidth];
  for_slab<T>(shape, tiles, slab, shape.oc, d,
              [&](std::int64_t channel, const Position& at, float* to, std::int64_t stride) {
                const float* image = channel_of(diff_dst, shape, at.image, shape.oc, channel,
                                                shape.out_h * shape.out_w);
                const std::int64_t h = at.h * T::kM, w = at.w * T::kM;
                const float* tile = image + (h * shape.out_w + w) * shape.block;
                const std::int64_t rows = shape.out_h - h, columns = shape.out_w - w;
                if (rows >= T::kM && columns >= T::kM) {
                  return diff_dst_tile<T>(tile, shape.out_w * shape.block, shape.block, to, stride);
                }
                std::memset(padded, 0, sizeof padded);
                for (std::int64_t i = 0; i < std::min<std::int64_t>(rows, T::kM); ++i) {
                  for (std::int64_t j = 0; j < std::min<std::int64_t>(columns, T::kM); ++j) {
                    Vec::loadu(tile + (i * shape.out_w + j) * shape.block)
                        .store(padded + (i * T::kM + j) * kWidth);
                  }
                }
                diff_dst_tile<T>(padded, T::kM * kWidth, kWidth, to, stride);
              });
}

// G^T sums G
template <typename T>
[[gnu::flatten]] void diff_weights(const float* sums, std::int64_t position_stride, float* to,
                                   std::int64_t tap_stride) {
  Vec t[3][T::kTile];
  unrolled<T::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return Vec::loadu(sums + (i * T::kTile + column) * position_stride);
    };
    unrolled<3>([&]<int row>() { t[row][column] = T::template diff_weights<row>(element); });
  });
  unrolled<3>([&]<int row>() {
    unrolled<3>([&]<int column>() {
      T::template diff_weights<column>([&](int j) {
        return t[row][j];
      }).store(to + (row * 3 + column) * tap_stride);
    });
  });
}

}  // namespace

constinit const WinogradGradient winograd_gradient{.m = F4::kM,
                                                   .positions = F4::kTile * F4::kTile,
                                                   .src = slab_of_src<F4>,
                                                   .diff_dst = slab_of_diff_dst<F4>,
                                                   .stride = slab_stride,
                                                   .weights = diff_weights<F4>};

constinit const Winograd winograd2 = winograd_of<F2>(), winograd4 = winograd_of<F4>();

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
