// The tiles of a Winograd convolution and the transform of src tiles. The convolution and the
// gradient of its weights share them.
#pragma once

#include <array>
#include <cstring>

#include "kernels/winograd/order.h"
#include "kernels/winograd/transforms.h"

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

  // Goes to a tile by a number in which this dim counts fastest. Returns the number for the other
  // dims.
  std::int64_t go_to(std::int64_t tile) {
    const std::int64_t at = tile % all_.count();
    phase_ = at / all_.tiles;
    first = phase_ + at % all_.tiles * all_.step;
    return tile / all_.count();
  }

  // The number of tiles from this one to the last one adjacent to it.
  std::int64_t beside() const { return all_.tiles - (first - phase_) / all_.step; }
  void skip(std::int64_t count) { first += count * all_.step; }

  // Returns false when it goes from the last tile to the first.
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

  // The number of adjacent tiles in a row, from this one on.
  std::int64_t beside() const { return w_.beside(); }

  // Skips `count` of these.
  void pass(std::int64_t count) {
    w_.skip(count - 1);
    next();
  }

  void next() {
    if (w_.next() || h_.next() || d_.next()) return;
    ++image;
  }

 private:
  WalkAlong d_, h_, w_;
};

// The distances between planes, rows and pixels.
struct Steps {
  std::int64_t plane, row, pixel;

  Steps times(const std::array<std::int64_t, 3>& factors) const {
    return {plane * factors[0], row * factors[1], pixel * factors[2]};
  }
};

inline Steps steps_of(const WinogradShape& shape) {
  return {shape.in_steps[0], shape.in_steps[1], shape.in_steps[2]};
}

// Numbers of an image's block of channels.
inline std::int64_t block_size_of(const std::array<std::int64_t, 3>& sizes, std::int64_t block) {
  return sizes[0] * sizes[1] * sizes[2] * block;
}

// The first src pixel of a tile. It may lie in the padding.
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

// The offset from a tile's corner to the corner that part `part` of the kernel meets. The divisions
// take a tenth of a tile's time.
template <typename T>
Corner part_offset(const WinogradShape& shape, std::int64_t part) {
  const std::int64_t w = part % shape.parts[2], h = part / shape.parts[2] % shape.parts[1],
                     d = part / shape.parts[2] / shape.parts[1];
  return {d * T::Depth::kTaps * shape.dilation[0], h * T::Height::kTaps * shape.dilation[1],
          w * T::Width::kTaps * shape.dilation[2]};
}

// The src pixels from one tile to the next.
template <typename T>
inline constexpr int kStep = T::Width::kStride * T::Width::kM;

// The adjacent tiles that are transformed together, and their columns of pixels: 30 for F(4, 3),
// which are 5.8 KB on AVX2.
inline constexpr int kRowTiles = 7;
template <typename T>
inline constexpr int kRowColumns = (kRowTiles - 1) * kStep<T> + T::Width::kTile;

// The pixels of adjacent tiles: column j of row i lies at rows[plane][i] + j * step.
template <typename T, typename From>
struct TileRow {
  const From* rows[T::Depth::kTile][T::Height::kTile];  // null outside of src
  bool all_rows;                                        // none is
  std::int64_t step, columns, begin, end;               // columns in [begin, end) are in src

  // Begins at the corner of the first of `tiles` tiles. `image` is that of the block of channels.
  TileRow(const WinogradShape& shape, const From* image, const Corner& at, std::int64_t tiles)
      : all_rows(true),
        step(shape.in_steps[2] * shape.dilation[2]),
        columns((tiles - 1) * kStep<T> + T::Width::kTile) {
    const auto& [step_d, step_h, step_w] = shape.dilation;
    for (int plane = 0; plane < T::Depth::kTile; ++plane) {
      for (int i = 0; i < T::Height::kTile; ++i) {
        const std::int64_t d = at.d + plane * step_d, h = at.h + i * step_h;
        const bool is_inside = d >= 0 && d < shape.in[0] && h >= 0 && h < shape.in[1];
        rows[plane][i] = is_inside ? image + Corner{d, h, at.w}.offset(steps_of(shape)) : nullptr;
        all_rows &= is_inside;
      }
    }
    const auto columns_before = [&](std::int64_t w) {
      return step_w == 1 ? w - at.w : (w - at.w + step_w - 1) / step_w;
    };
    begin = at.w >= 0 ? 0 : std::min(columns_before(0), columns);
    end = std::clamp(columns_before(shape.in[2]), begin, columns);
  }
};

// Columns of kLanes channels, transformed along height and, for one position, along depth.
template <typename T, int kLanes>
using Columns = float[kRowColumns<T>][T::Height::kTile][kLanes];

// B^T of one column; `pixel(i)` is row i. All pixels are loaded before any result is stored.
// Otherwise GCC assumes that stores change them and loads each again for each use, 16 loads instead
// of 6.
template <typename T, int kLanes, typename Pixel>
TORCH_BLOCKED_INLINE inline void transform_column(Pixel&& pixel,
                                                  float (&to)[T::Height::kTile][kLanes]) {
  constexpr int kRows = T::Height::kTile;
  Vec pixels[kRows], values[kRows];
  unrolled<kRows>([&]<int i>() TORCH_BLOCKED_INLINE { pixels[i] = pixel(i); });
  unrolled<kRows>([&]<int i>() TORCH_BLOCKED_INLINE {
    values[i] = T::Height::template src<i>([&](int row) { return pixels[row]; });
  });
  unrolled<kRows>([&]<int i>() TORCH_BLOCKED_INLINE { values[i].store(to[i], kLanes); });
}

// Transforms the columns of a row of tiles that lie in src. It prefetches two tiles ahead, because
// 6 rows at a time are too many for the hardware prefetcher.
template <typename T, int kLanes, int depth, bool kAllRows, typename From>
void columns_inside(const TileRow<T, From>& row_of_tiles, Columns<T, kLanes>& t) {
  const TileRow<T, From> src = row_of_tiles;  // a copy, which stores to t cannot change
  constexpr int kRows = T::Height::kTile;
  const std::int64_t ahead = 2 * kStep<T> * src.step, step = src.step, end = src.end;
  for (std::int64_t j = src.begin, at = j * step; j < end; ++j, at += step) {
    if constexpr (kAllRows) {
      unrolled<T::Depth::kTile>([&]<int plane>() TORCH_BLOCKED_INLINE {
        unrolled<kRows>([&]<int i>() TORCH_BLOCKED_INLINE {
          __builtin_prefetch(src.rows[plane][i] + at + ahead);
        });
      });
    }
    const auto pixel = [&](int i) {
      return T::Depth::template src<depth>([&](int plane) {
        const From* row = src.rows[plane][i];
        return kAllRows || row ? load_lanes<kLanes>(row + at) : Vec(0.f);
      });
    };
    transform_column<T, kLanes>(pixel, t[j]);
  }
}

template <typename T, int kLanes, int depth, typename From>
inline void transform_columns(const TileRow<T, From>& src, Columns<T, kLanes>& t) {
  const auto clear = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      transform_column<T, kLanes>([](int) { return Vec(0.f); }, t[j]);
    }
  };
  clear(0, src.begin);
  (src.all_rows ? columns_inside<T, kLanes, depth, true, From>
                : columns_inside<T, kLanes, depth, false, From>)(src, t);
  clear(src.end, src.columns);
}

// B^T of the rows of one tile, whose columns begin at t: put(row, column, value).
template <typename T, int kLanes, typename Put>
inline void transform_rows(const float (*t)[T::Height::kTile][kLanes], Put&& put) {
  constexpr int kColumns = T::Width::kTile;
  // Not unrolled: the addresses of one row of positions fit in registers, those of all rows do
  // not.
#pragma GCC unroll 1
  for (int row = 0; row < T::Height::kTile; ++row) {
    Vec pixels[kColumns], values[kColumns];
    unrolled<kColumns>([&]<int j>()
                           TORCH_BLOCKED_INLINE { pixels[j] = Vec::loadu(t[j][row], kLanes); });
    unrolled<kColumns>([&]<int column>() TORCH_BLOCKED_INLINE {
      values[column] = T::Width::template src<column>([&](int j) { return pixels[j]; });
    });
    unrolled<kColumns>([&]<int column>()
                           TORCH_BLOCKED_INLINE { put(row, column, values[column]); });
  }
}

// B^T src B for kLanes channels of all tiles. The first image begins at src; images lie `image`
// numbers apart. put_of(tile, depth) returns put(row, column, value), which stores the positions of
// a tile at one row of depth's B^T.
//
// The columns of a row of tiles are transformed together, because a tile of F(4, 3) shares 2 of its
// 6 columns with the next. Padding is neither loaded nor copied, which matters for small maps: at
// 14x14, 12 of 16 tiles have padding.
template <typename T, int kLanes, typename From, typename PutOf>
inline void transform_tiles(const WinogradShape& shape, WinogradTiles tiles, const From* src,
                            std::int64_t image, const Corner& offset, PutOf&& put_of) {
  alignas(64) Columns<T, kLanes> t;
  Walk<T> at(shape, tiles.first);
  for (std::int64_t tile = 0, count; tile < tiles.count; tile += count, at.pass(count)) {
    count = std::min({at.beside(), tiles.count - tile, std::int64_t{kRowTiles}});
    const TileRow<T, From> row(shape, src + at.image * image, corner_of(shape, at) + offset, count);
    unrolled<T::Depth::kTile>([&]<int depth>() {
      transform_columns<T, kLanes, depth>(row, t);
      for (std::int64_t i = 0; i < count; ++i) {
        transform_rows<T, kLanes>(t + i * kStep<T>, put_of(tile + i, depth));
      }
    });
  }
}

// Stores a tile's positions of one row of depth, `stride` numbers apart.
template <typename T, int kLanes, typename To>
struct Positions {
  To* v;
  std::int64_t stride;

  void operator()(int row, int column, const Vec& value) const {
    store_lanes<kLanes>(value, v + (row * T::Width::kTile + column) * stride);
  }
};

// Finds the group of for_groups that has a tile.
class GroupOf {
 public:
  std::int64_t begin = 0, end = 0;

  GroupOf(std::int64_t tiles, std::int64_t most)
      : tiles_(tiles), groups_((tiles + most - 1) / most) {}

  // Goes to the group of a tile.
  void go_to(std::int64_t tile) {
    while (tile >= end) go_by(1);
    while (tile < begin) go_by(-1);
  }

 private:
  std::int64_t tiles_, groups_, at_ = -1;

  void go_by(std::int64_t way) {
    at_ += way;
    begin = at_ * tiles_ / groups_;
    end = (at_ + 1) * tiles_ / groups_;
  }
};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
