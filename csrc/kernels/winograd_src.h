// The tiles of a Winograd convolution, and the transform of those of src, which the convolution and
// the gradient of its weights share.
#pragma once

#include <cstring>

#include "kernels/winograd_order.h"
#include "kernels/winograd_transforms.h"

namespace torch_blocked::kernels::CPU_CAPABILITY::winograd {

// A tile of outputs: Along's transform along depth, Across' along height and width. Positions are
// numbered along w, then h, then d.
template <typename Along, typename Across>
struct Tile {
  using Depth = Along;
  using Plane = Across;
  static constexpr int kPlane = Plane::kTile * Plane::kTile, kPositions = Depth::kTile * kPlane;
};

// Tiles in an image: along d, h, w.
template <typename T>
std::array<std::int64_t, 3> tile_counts(const WinogradShape& shape) {
  const auto tiles = [&](std::size_t i, std::int64_t m) { return (shape.out[i] + m - 1) / m; };
  return {tiles(0, T::Depth::kM), tiles(1, T::Plane::kM), tiles(2, T::Plane::kM)};
}

// Walks the tiles of one image after the other; d, h and w are the first output of a tile.
template <typename T>
class Walk {
 public:
  std::int64_t image, d, h, w;

  Walk(const WinogradShape& shape, std::int64_t tile) : tiles_(tile_counts<T>(shape)) {
    w = tile % tiles_[2] * T::Plane::kM;
    h = tile / tiles_[2] % tiles_[1] * T::Plane::kM;
    d = tile / (tiles_[2] * tiles_[1]) % tiles_[0] * T::Depth::kM;
    image = tile / (tiles_[2] * tiles_[1] * tiles_[0]);
  }

  void next() {
    if ((w += T::Plane::kM) < tiles_[2] * T::Plane::kM) return;
    w = 0;
    if ((h += T::Plane::kM) < tiles_[1] * T::Plane::kM) return;
    h = 0;
    if ((d += T::Depth::kM) < tiles_[0] * T::Depth::kM) return;
    d = 0;
    ++image;
  }

 private:
  std::array<std::int64_t, 3> tiles_;
};

// Numbers from one plane, row or pixel to the next.
struct Steps {
  std::int64_t plane, row, pixel;
};

// kWidth words of a pixel, and of two. Vectors of GCC, which keeps their arrays in registers; those
// of a class of them it does not.
using PixelWords [[gnu::vector_size(2 * kWidth)]] = std::int16_t;
using PairWords [[gnu::vector_size(4 * kWidth)]] = std::int16_t;

// Bytes of a pixel as words, or of two.
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

// kLanes channels of the pixels of a tile, and words of those of two, all from the first pixel on.
template <int kLanes, typename From>
struct OneTile {
  const From* src;

  auto load(std::int64_t offset) const { return load_lanes<kLanes>(src + offset); }
  template <int row, int column, typename To>
  void store(const Vec& value, To* v) const {
    store_lanes<kLanes>(value, v);
  }
};

template <int kLanes>
struct OneTile<kLanes, std::uint8_t> {
  const std::uint8_t* src;

  TORCH_BLOCKED_INLINE auto load(std::int64_t offset) const { return load_words(src + offset); }
  template <int row, int column>
  void store(const PixelWords& value, std::int16_t* v) const {
    put_words(value, v);
  }
};

template <typename T, int depth, int... rows, typename Source, typename To>
inline void src_pass(Rows<rows...>, const Source& src, const Steps& steps, To* v,
                     std::int64_t stride) {
  using Plane = typename T::Plane;
  constexpr int kRows[] = {rows...};
  using Lanes = std::remove_cvref_t<decltype(src.load(0))>;
  Lanes t[sizeof...(rows)][Plane::kTile];
  unrolled<Plane::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return T::Depth::template src<depth>([&](int plane) {
        return src.load(plane * steps.plane + i * steps.row + column * steps.pixel);
      });
    };
    unrolled<sizeof...(rows)>(
        [&]<int i>() { t[i][column] = Plane::template src<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    unrolled<Plane::kTile>([&]<int column>() {
      const Lanes value = Plane::template src<column>([&](int j) { return t[i][j]; });
      src.template store<kRows[i], column>(value, v + (kRows[i] * Plane::kTile + column) * stride);
    });
  });
}

template <typename T, int depth, typename... passes, typename Source, typename To>
inline void src_plane(Passes<passes...>, const Source& src, const Steps& steps, To* v,
                      std::int64_t stride) {
  (src_pass<T, depth>(passes(), src, steps, v, stride), ...);
}

// B^T src B; position p to v + p * stride.
template <typename T, typename Source, typename To>
inline void src_planes(const Source& src, const Steps& steps, To* v, std::int64_t stride) {
  unrolled<T::Depth::kTile>([&]<int depth>() {
    src_plane<T, depth>(typename T::Plane::SrcPasses(), src, steps, v + depth * T::kPlane * stride,
                        stride);
  });
}

inline Steps steps_of(const WinogradShape& shape) {
  return {shape.in[1] * shape.in[2] * shape.block, shape.in[2] * shape.block, shape.block};
}

// The first pixel of src of a tile, which may lie in the padding.
struct Corner {
  std::int64_t d, h, w;

  template <typename T>
  Corner(const WinogradShape& shape, const Walk<T>& at)
      : d(at.d - shape.padding[0]), h(at.h - shape.padding[1]), w(at.w - shape.padding[2]) {}
  std::int64_t offset(const Steps& steps) const {
    return d * steps.plane + h * steps.row + w * steps.pixel;
  }
};

// Whether all pixels of a tile are in src.
template <typename T>
inline bool is_inside(const WinogradShape& shape, const Corner& at) {
  constexpr int kTile = T::Plane::kTile;
  return at.d >= 0 && at.h >= 0 && at.w >= 0 && at.d + T::Depth::kTile <= shape.in[0] &&
         at.h + kTile <= shape.in[1] && at.w + kTile <= shape.in[2];
}

// A tile of an image with padding around it, [planes, kTile, kTile, kLanes].
template <typename T, int kLanes, typename Number>
void padded_tile(const WinogradShape& shape, const Number* image, const Corner& at, Number* tile) {
  constexpr std::int64_t kTile = T::Plane::kTile;
  const auto padding = static_cast<Number>(shape.padding_number);
  const std::int64_t begin = std::clamp<std::int64_t>(-at.w, 0, kTile),
                     end = std::clamp(shape.in[2] - at.w, begin, kTile);
  for (std::int64_t plane = at.d; plane < at.d + T::Depth::kTile; ++plane) {
    for (std::int64_t h = at.h; h < at.h + kTile; ++h, tile += kTile * kLanes) {
      std::fill_n(tile, kTile * kLanes, padding);
      if (plane < 0 || plane >= shape.in[0] || h < 0 || h >= shape.in[1]) continue;
      const Number* row = image + ((plane * shape.in[1] + h) * shape.in[2] + at.w) * shape.block;
      for (std::int64_t i = begin; i < end; ++i) {
        std::memcpy(tile + i * kLanes, row + i * shape.block, kLanes * sizeof(Number));
      }
    }
  }
}

template <typename T, int kLanes>
inline constexpr Steps kPaddedSteps{T::kPlane * kLanes, T::Plane::kTile * kLanes, kLanes};

// Prefetches what the tile two further on reads first: 6 rows at a time are too many for the
// hardware prefetcher. With src in L3 this saves a quarter of the time.
template <typename T, typename Number>
inline void prefetch_tile(const Number* tile, const Steps& steps) {
  for (int plane = 0; plane < T::Depth::kTile; ++plane) {
    for (int i = 0; i < T::Plane::kTile; ++i) {
      for (int j = T::Plane::kTile - T::Plane::kM; j < T::Plane::kTile; ++j) {
        __builtin_prefetch(tile + plane * steps.plane + i * steps.row + j * steps.pixel);
      }
    }
  }
}

// B^T src B of kLanes channels of the tile `at`; position p to v + p * stride. `image`: of the
// channels' block.
template <typename T, int kLanes, typename From, typename To>
inline void src_tile(const WinogradShape& shape, const From* image, const Walk<T>& at, To* v,
                     std::int64_t stride) {
  const Corner corner(shape, at);
  alignas(64) From padded[T::kPositions * kLanes];
  Steps steps = steps_of(shape);
  const From* src = padded;
  if (is_inside<T>(shape, corner)) {
    src = image + corner.offset(steps);
    prefetch_tile<T>(src + 2 * T::Plane::kM * steps.pixel, steps);
  } else {
    padded_tile<T, kLanes>(shape, image, corner, padded);
    steps = kPaddedSteps<T, kLanes>;
  }
  src_planes<T>(OneTile<kLanes, From>{src}, steps, v, stride);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
