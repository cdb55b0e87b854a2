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

template <typename T, int kLanes, int depth, int... rows, typename From, typename To>
inline void src_pass(Rows<rows...>, const From* src, const Steps& steps, To* v,
                     std::int64_t stride) {
  using Plane = typename T::Plane;
  constexpr int kRows[] = {rows...};
  Vec t[sizeof...(rows)][Plane::kTile];
  unrolled<Plane::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return T::Depth::template src<depth>([&](int plane) {
        return load_lanes<kLanes>(src + plane * steps.plane + i * steps.row + column * steps.pixel);
      });
    };
    unrolled<sizeof...(rows)>(
        [&]<int i>() { t[i][column] = Plane::template src<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    unrolled<Plane::kTile>([&]<int column>() {
      const Vec value = Plane::template src<column>([&](int j) { return t[i][j]; });
      store_lanes<kLanes>(value, v + (kRows[i] * Plane::kTile + column) * stride);
    });
  });
}

template <typename T, int kLanes, int depth, typename... passes, typename From, typename To>
inline void src_plane(Passes<passes...>, const From* src, const Steps& steps, To* v,
                      std::int64_t stride) {
  (src_pass<T, kLanes, depth>(passes(), src, steps, v, stride), ...);
}

// The tile at (d, h, w) of an image with zeros around it, [planes, kTile, kTile, kLanes].
template <typename T, int kLanes, typename Number>
void padded_tile(const WinogradShape& shape, const Number* image, std::int64_t d, std::int64_t h,
                 std::int64_t w, Number* tile) {
  constexpr int kTile = T::Plane::kTile;
  const auto fill = [&](const Number* row, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < kTile; ++i, tile += kLanes) {
      const bool inside = i >= begin && i < end;
      store_lanes<kLanes>(inside ? load_lanes<kLanes>(row + i * shape.block) : Vec(0.f), tile);
    }
  };
  for (std::int64_t plane = d; plane < d + T::Depth::kTile; ++plane) {
    for (std::int64_t i = h; i < h + kTile; ++i) {
      const bool inside = plane >= 0 && plane < shape.in[0] && i >= 0 && i < shape.in[1];
      fill(image + ((plane * shape.in[1] + i) * shape.in[2] + w) * shape.block, -w,
           inside ? shape.in[2] - w : 0);
    }
  }
}

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
  constexpr int kTile = T::Plane::kTile;
  const std::int64_t d = at.d - shape.padding[0], h = at.h - shape.padding[1],
                     w = at.w - shape.padding[2];
  const bool inside = d >= 0 && h >= 0 && w >= 0 && d + T::Depth::kTile <= shape.in[0] &&
                      h + kTile <= shape.in[1] && w + kTile <= shape.in[2];
  alignas(64) From padded[T::kPositions * kLanes];
  Steps steps{shape.in[1] * shape.in[2] * shape.block, shape.in[2] * shape.block, shape.block};
  const From* src = padded;
  if (inside) {
    src = image + d * steps.plane + h * steps.row + w * steps.pixel;
    prefetch_tile<T>(src + 2 * T::Plane::kM * steps.pixel, steps);
  } else {
    padded_tile<T, kLanes>(shape, image, d, h, w, padded);
    steps = {T::kPlane * kLanes, kTile * kLanes, kLanes};
  }
  unrolled<T::Depth::kTile>([&]<int depth>() {
    src_plane<T, kLanes, depth>(typename T::Plane::SrcPasses(), src, steps,
                                v + depth * T::kPlane * stride, stride);
  });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
