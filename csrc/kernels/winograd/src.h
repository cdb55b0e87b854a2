// The tiles of a Winograd convolution, and the transform of those of src, which the convolution and
// the gradient of its weights share.
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

  // To a tile, by a number that counts this dim's tiles fastest; returns what counts the others.
  std::int64_t go_to(std::int64_t tile) {
    const std::int64_t at = tile % all_.count();
    phase_ = at / all_.tiles;
    first = phase_ + at % all_.tiles * all_.step;
    return tile / all_.count();
  }

  // Tiles from this one to the last that lies beside it.
  std::int64_t beside() const { return all_.tiles - (first - phase_) / all_.step; }
  void skip(std::int64_t count) { first += count * all_.step; }

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

  // Tiles in a row with this one, from it on.
  std::int64_t beside() const { return w_.beside(); }

  // Past as many of these.
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

// Numbers from one plane, row or pixel to the next.
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

// Pixels of src from one tile to the next.
template <typename T>
inline constexpr int kStep = T::Width::kStride * T::Width::kM;

// Tiles beside each other that are transformed together, and their columns of pixels: 30 for
// F(4, 3), which are 5.8 KB on AVX2.
inline constexpr int kRowTiles = 7;
template <typename T>
inline constexpr int kRowColumns = (kRowTiles - 1) * kStep<T> + T::Width::kTile;

// The pixels of tiles beside each other: column j of row i lies at rows[plane][i] + j * step.
template <typename T, typename From>
struct TileRow {
  const From* rows[T::Depth::kTile][T::Height::kTile];  // null outside of src
  bool all_rows;                                        // none is
  std::int64_t step, columns, begin, end;               // columns in [begin, end) are in src

  // From the corner of the first of `tiles` on. `image`: of the channels' block.
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

// Columns of kLanes channels, transformed down and, for a position along depth, along it.
template <typename T, int kLanes>
using Columns = float[kRowColumns<T>][T::Height::kTile][kLanes];

// B^T of one column, of which `pixel(i)` is row i. All are loaded before any is stored: else GCC
// loads each again for each of its uses, 16 in place of 6, since the stores might be to it.
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

// Those in src of a row of tiles. What comes two tiles later is prefetched: 6 rows at a time are
// too many for the hardware prefetcher.
template <typename T, int kLanes, int depth, bool kAllRows, typename From>
void columns_inside(const TileRow<T, From>& row_of_tiles, Columns<T, kLanes>& t) {
  const TileRow<T, From> src = row_of_tiles;  // where stores to t cannot be to it
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
  // A loop, not unrolled: the addresses of a row of positions are in registers so, and those of all
  // would not be.
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

// B^T src B of kLanes channels of all tiles, of whose images the first begins at src, `image`
// numbers before the next. put_of(tile, depth) says where positions of a tile at a row of depth's
// B^T go, as put(row, column, value).
//
// A row of tiles has its columns transformed at once: of 6 columns of F(4, 3) a tile shares 2 with
// the next. What lies outside of src is neither loaded nor copied, which matters where maps are
// small: at 14x14 12 of 16 tiles have padding.
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

// Where a tile's positions of a row of depth go, `stride` numbers from one to the next.
template <typename T, int kLanes, typename To>
struct Positions {
  To* v;
  std::int64_t stride;

  void operator()(int row, int column, const Vec& value) const {
    store_lanes<kLanes>(value, v + (row * T::Width::kTile + column) * stride);
  }
};

// Walks to the group of for_groups in which a tile is.
class GroupOf {
 public:
  std::int64_t begin = 0, end = 0;

  GroupOf(std::int64_t tiles, std::int64_t most)
      : tiles_(tiles), groups_((tiles + most - 1) / most) {}

  // To that of a tile.
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
