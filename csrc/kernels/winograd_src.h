// The tiles of a Winograd convolution, and the transform of those of src, which the convolution and
// the gradient of its weights share.
#pragma once

#include <array>
#include <cstring>

#include "kernels/winograd_order.h"
#include "kernels/winograd_transforms.h"

namespace torch_blocked::kernels::CPU_CAPABILITY::winograd {

// A tile of outputs: the transforms along depth, height and width. Positions are numbered along w,
// then h, then d, and so are the transformed weights.
template <typename Along, typename Down, typename Across>
struct Tile {
  using Depth = Along;
  using Height = Down;
  using Width = Across;
  static constexpr int kPlane = Height::kTile * Width::kTile, kPositions = Depth::kTile * kPlane;
  static constexpr int kOutputs = Depth::kM * Height::kM * Width::kM;
  static constexpr int kWeightsPlane = Height::kWeights * Width::kWeights,
                       kWeights = Depth::kWeights * kWeightsPlane;

  // The weights of each position.
  static constexpr std::array<std::uint8_t, kPositions> kWeightsOf = [] {
    std::array<std::uint8_t, kPositions> all{};
    for (int i = 0; i < kPositions; ++i) {
      const int d = i / kPlane, h = i % kPlane / Width::kTile, w = i % Width::kTile;
      all[i] =
          static_cast<std::uint8_t>(Depth::weights_of(d) * kWeightsPlane +
                                    Height::weights_of(h) * Width::kWeights + Width::weights_of(w));
    }
    return all;
  }();
};

// Walks the tiles along one dim; `first` is the first output of a tile.
class WalkAlong {
 public:
  std::int64_t first;

  WalkAlong(std::int64_t out, std::int64_t m, std::int64_t dilation) : all_(out, m, dilation) {}

  // To a tile, by a number that counts this dim's tiles fastest; returns what counts the others.
  std::int64_t go_to(std::int64_t tile) {
    const std::int64_t at = tile % all_.count();
    phase_ = at / all_.tiles;
    first = phase_ + at % all_.tiles * all_.step;
    return tile / all_.count();
  }

  // False from the last tile to the first.
  bool next() {
    first += all_.step;
    if (first < phase_ + all_.tiles * all_.step) return true;
    if (++phase_ == all_.phases) phase_ = 0;
    first = phase_;
    return phase_ > 0;
  }

 private:
  WinogradAlong all_;
  std::int64_t phase_ = 0;
};

// Walks the tiles of one image after the other.
template <typename T>
class Walk {
 public:
  std::int64_t image;

  Walk(const WinogradShape& shape, std::int64_t tile)
      : d_(shape.out[0], T::Depth::kM, shape.dilation[0]),
        h_(shape.out[1], T::Height::kM, shape.dilation[1]),
        w_(shape.out[2], T::Width::kM, shape.dilation[2]) {
    image = d_.go_to(h_.go_to(w_.go_to(tile)));
  }

  // The first output of the tile.
  std::int64_t d() const { return d_.first; }
  std::int64_t h() const { return h_.first; }
  std::int64_t w() const { return w_.first; }

  void next() {
    if (w_.next() || h_.next() || d_.next()) return;
    ++image;
  }

 private:
  WalkAlong d_, h_, w_;
};

// Numbers from one plane, row or pixel to the next.
struct Steps {
  std::int64_t plane, row, pixel;

  Steps times(const std::array<std::int64_t, 3>& factors) const {
    return {plane * factors[0], row * factors[1], pixel * factors[2]};
  }
};

// The same of a tile whose pixels follow each other. With their step a constant, the addresses of a
// tile of 6 x 6 are 6 in registers; as variables most of the 36 lie in memory, which took a third
// of the time.
template <int kLanes>
struct TileSteps {
  static constexpr std::int64_t pixel = kLanes;
  std::int64_t plane, row;
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

template <typename T, int depth, int... rows, typename Source, int kLanes, typename To>
inline void src_pass(Rows<rows...>, const Source& src, const TileSteps<kLanes>& steps, To* v,
                     std::int64_t stride) {
  using Height = typename T::Height;
  using Width = typename T::Width;
  constexpr int kRows[] = {rows...};
  using Lanes = std::remove_cvref_t<decltype(src.load(0))>;
  Lanes t[sizeof...(rows)][Width::kTile];
  unrolled<Width::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return T::Depth::template src<depth>([&](int plane) {
        return src.load(plane * steps.plane + i * steps.row + column * steps.pixel);
      });
    };
    unrolled<sizeof...(rows)>(
        [&]<int i>() { t[i][column] = Height::template src<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    unrolled<Width::kTile>([&]<int column>() {
      const Lanes value = Width::template src<column>([&](int j) { return t[i][j]; });
      src.template store<kRows[i], column>(value, v + (kRows[i] * Width::kTile + column) * stride);
    });
  });
}

template <typename T, int depth, typename... passes, typename Source, int kLanes, typename To>
inline void src_plane(Passes<passes...>, const Source& src, const TileSteps<kLanes>& steps, To* v,
                      std::int64_t stride) {
  (src_pass<T, depth>(passes(), src, steps, v, stride), ...);
}

// B^T src B; position p to v + p * stride.
template <typename T, typename Source, int kLanes, typename To>
inline void src_planes(const Source& src, const TileSteps<kLanes>& steps, To* v,
                       std::int64_t stride) {
  unrolled<T::Depth::kTile>([&]<int depth>() {
    src_plane<T, depth>(typename T::Height::SrcPasses(), src, steps, v + depth * T::kPlane * stride,
                        stride);
  });
}

inline Steps steps_of(const WinogradShape& shape) {
  return {shape.in_steps[0], shape.in_steps[1], shape.in_steps[2]};
}

// Numbers of an image's block of channels.
inline std::int64_t block_size_of(const std::array<std::int64_t, 3>& sizes, std::int64_t block) {
  return sizes[0] * sizes[1] * sizes[2] * block;
}

// The first pixel of src of a tile, which may lie in the padding.
struct Corner {
  std::int64_t d, h, w;

  Corner operator+(const Corner& other) const { return {d + other.d, h + other.h, w + other.w}; }
  std::int64_t offset(const Steps& steps) const {
    return d * steps.plane + h * steps.row + w * steps.pixel;
  }
};

template <typename T>
Corner corner_of(const WinogradShape& shape, const Walk<T>& at) {
  const auto& [d, h, w] = shape.stride;
  return {at.d() * d - shape.padding[0], at.h() * h - shape.padding[1],
          at.w() * w - shape.padding[2]};
}

// From that to the one that a part of the kernel meets, of which there are shape.parts. Their
// divisions take a tenth of a tile's time.
template <typename T>
Corner part_offset(const WinogradShape& shape, std::int64_t part) {
  const std::int64_t w = part % shape.parts[2], h = part / shape.parts[2] % shape.parts[1],
                     d = part / shape.parts[2] / shape.parts[1];
  return {d * T::Depth::kTaps * shape.dilation[0], h * T::Height::kTaps * shape.dilation[1],
          w * T::Width::kTaps * shape.dilation[2]};
}

// Whether all pixels of a tile are in src.
template <typename T>
inline bool is_inside(const WinogradShape& shape, const Corner& at) {
  const auto inside = [&](std::size_t i, std::int64_t first, std::int64_t tile) {
    return first >= 0 && first + (tile - 1) * shape.dilation[i] < shape.in[i];
  };
  return inside(0, at.d, T::Depth::kTile) && inside(1, at.h, T::Height::kTile) &&
         inside(2, at.w, T::Width::kTile);
}

// Whether the pixels of a tile follow each other in src.
template <int kLanes>
inline bool is_dense(const WinogradShape& shape) {
  return shape.in_steps[2] * shape.dilation[2] == kLanes;
}

template <int kLanes>
inline TileSteps<kLanes> tile_steps(const WinogradShape& shape) {
  return {shape.in_steps[0] * shape.dilation[0], shape.in_steps[1] * shape.dilation[1]};
}

// A tile of an image with padding around it, [planes, rows, pixels, kLanes].
template <typename T, int kLanes, typename Number>
void padded_tile(const WinogradShape& shape, const Number* image, const Corner& at, Number* tile) {
  constexpr std::int64_t kPixels = T::Width::kTile;
  const auto padding = static_cast<Number>(shape.padding_number);
  const auto& [step_d, step_h, step_w] = shape.dilation;
  const Steps steps = steps_of(shape);
  std::int64_t begin = 0, end = kPixels;  // of the pixels that are inside
  while (begin < end && at.w + begin * step_w < 0) ++begin;
  while (end > begin && at.w + (end - 1) * step_w >= shape.in[2]) --end;
  for (std::int64_t plane = 0; plane < T::Depth::kTile; ++plane) {
    const std::int64_t d = at.d + plane * step_d;
    for (std::int64_t row = 0; row < T::Height::kTile; ++row, tile += kPixels * kLanes) {
      const std::int64_t h = at.h + row * step_h;
      std::fill_n(tile, kPixels * kLanes, padding);
      if (d < 0 || d >= shape.in[0] || h < 0 || h >= shape.in[1]) continue;
      const Number* from = image + Corner{d, h, at.w}.offset(steps);
      for (std::int64_t i = begin; i < end; ++i) {
        std::memcpy(tile + i * kLanes, from + i * step_w * steps.pixel, kLanes * sizeof(Number));
      }
    }
  }
}

template <typename T, int kLanes>
inline constexpr TileSteps<kLanes> kPaddedSteps{T::kPlane * kLanes, T::Width::kTile * kLanes};

// Pixels of src from one tile to the next.
template <typename T>
inline constexpr int kStep = T::Width::kStride * T::Width::kM;

// Prefetches what the tile two further on reads first: 6 rows at a time are too many for the
// hardware prefetcher. With src in L3 this saves a quarter of the time.
template <typename T, typename Number, int kLanes>
inline void prefetch_tile(const Number* tile, const TileSteps<kLanes>& steps) {
  for (int plane = 0; plane < T::Depth::kTile; ++plane) {
    for (int i = 0; i < T::Height::kTile; ++i) {
      for (int j = T::Width::kTile - kStep<T>; j < T::Width::kTile; ++j) {
        __builtin_prefetch(tile + plane * steps.plane + i * steps.row + j * steps.pixel);
      }
    }
  }
}

// B^T src B of kLanes channels of the tile at a corner; position p to v + p * stride. `image`: of
// the channels' block.
template <typename T, int kLanes, typename From, typename To>
inline void src_tile(const WinogradShape& shape, const From* image, const Corner& corner, To* v,
                     std::int64_t stride) {
  alignas(64) From padded[T::kPositions * kLanes];
  TileSteps<kLanes> steps = kPaddedSteps<T, kLanes>;
  const From* src = padded;
  if (is_dense<kLanes>(shape) && is_inside<T>(shape, corner)) {
    src = image + corner.offset(steps_of(shape));
    steps = tile_steps<kLanes>(shape);
    prefetch_tile<T>(src + 2 * kStep<T> * steps.pixel, steps);
  } else {
    padded_tile<T, kLanes>(shape, image, corner, padded);
  }
  src_planes<T>(OneTile<kLanes, From>{src}, steps, v, stride);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
