// The gradient of 3x3 weights by Winograd's F(4x4, 3x3): transforms of src, diff_dst and the sums
// of their products.
#include "kernels/winograd/src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace winograd {
namespace {

// Tiles for kernels of one tap along depth.
using T = Tile<F1, F4, F4>;
using Plane = F4;

std::int64_t slab_stride(std::int64_t channels, std::int64_t slab) {
  return slab * round_up(channels, kWidth) + kLine<float>;
}

// Clears the part of a slab that the tiles of a vector of channels do not fill.
inline void clear_rest(std::int64_t tiles, std::int64_t slab, std::int64_t stride, float* to) {
  for (std::int64_t position = 0; position < T::kPositions; ++position) {
    std::fill(to + position * stride + tiles * kWidth, to + position * stride + slab * kWidth, 0.f);
  }
}

// Where a vector of channels begins, and the distance between images.
struct Channels {
  const float* first;
  std::int64_t image;

  Channels(const float* data, const WinogradShape& shape, std::int64_t channels,
           std::int64_t channel, const std::array<std::int64_t, 3>& size)
      : first(data + channel / shape.block * block_size_of(size, shape.block) +
              channel % shape.block),
        image(ceil_div(channels, shape.block) * block_size_of(size, shape.block)) {}
};

[[gnu::flatten]] void slab_of_src(const WinogradShape& shape, WinogradTiles tiles,
                                  std::int64_t slab, const float* src, float* v) {
  const std::int64_t stride = slab_stride(shape.ic, slab);
  for (std::int64_t channel = 0; channel < shape.ic; channel += kWidth) {
    float* to = v + channel * slab;  // [slab, kWidth]
    const Channels from(src, shape, shape.ic, channel, shape.in);
    const auto put_of = [&](std::int64_t tile, int) {
      return Positions<T, kWidth, float>{to + tile * kWidth, stride};
    };
    transform_tiles<T, kWidth>(shape, tiles, from.first, from.image, Corner{}, put_of);
    clear_rest(tiles.count, slab, stride, to);
  }
}

// A diff_dst A^T for one vector of channels of one tile.
inline void diff_dst_tile(const float* diff, std::int64_t row_stride, std::int64_t pixel_stride,
                          float* d, std::int64_t stride) {
  Vec t[Plane::kTile][Plane::kM];
  unrolled<Plane::kM>([&]<int column>() {
    const auto element = [&](int i) {
      return Vec::loadu(diff + i * row_stride + column * pixel_stride);
    };
    unrolled<Plane::kTile>(
        [&]<int row>() { t[row][column] = Plane::template diff_dst<row>(element); });
  });
  unrolled<Plane::kTile>([&]<int row>() {
    unrolled<Plane::kTile>([&]<int column>() {
      Plane::template diff_dst<column>([&](int j) {
        return t[row][j];
      }).store(d + (row * Plane::kTile + column) * stride);
    });
  });
}

[[gnu::flatten]] void slab_of_diff_dst(const WinogradShape& shape, WinogradTiles tiles,
                                       std::int64_t slab, const float* diff_dst, float* d) {
  alignas(64) float padded[Plane::kM * Plane::kM * kWidth];
  const std::int64_t stride = slab_stride(shape.oc, slab);
  const std::int64_t pixel = shape.block, row = shape.out[2] * pixel;
  for (std::int64_t channel = 0; channel < shape.oc; channel += kWidth) {
    float* to = d + channel * slab;  // [slab, kWidth]
    const Channels from(diff_dst, shape, shape.oc, channel, shape.out);
    Walk<T> at(shape, tiles.first);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
      const float* tile = from.first + at.image * from.image +
                          (at.d() * shape.out[1] + at.h()) * row + at.w() * pixel;
      const std::int64_t rows = std::min<std::int64_t>(shape.out[1] - at.h(), Plane::kM),
                         columns = std::min<std::int64_t>(shape.out[2] - at.w(), Plane::kM);
      if (rows == Plane::kM && columns == Plane::kM) {
        diff_dst_tile(tile, row, pixel, to + i * kWidth, stride);
        continue;
      }
      std::memset(padded, 0, sizeof padded);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < columns; ++c) {
          Vec::loadu(tile + r * row + c * pixel).store(padded + (r * Plane::kM + c) * kWidth);
        }
      }
      diff_dst_tile(padded, Plane::kM * kWidth, kWidth, to + i * kWidth, stride);
    }
    clear_rest(tiles.count, slab, stride, to);
  }
}

// G^T sums G
[[gnu::flatten]] void diff_weights(const float* sums, std::int64_t position_stride, float* to,
                                   std::int64_t tap_stride) {
  Vec t[3][Plane::kTile];
  unrolled<Plane::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return Vec::loadu(sums + (i * Plane::kTile + column) * position_stride);
    };
    unrolled<3>([&]<int row>() { t[row][column] = Plane::template diff_weights<row>(element); });
  });
  unrolled<3>([&]<int row>() {
    unrolled<3>([&]<int column>() {
      Plane::template diff_weights<column>([&](int j) {
        return t[row][j];
      }).store(to + (row * 3 + column) * tap_stride);
    });
  });
}

}  // namespace
}  // namespace winograd

extern const WinogradGradient winograd_gradient;
constinit const WinogradGradient winograd_gradient{.m = winograd::Plane::kM,
                                                   .positions = winograd::T::kPositions,
                                                   .src = winograd::slab_of_src,
                                                   .diff_dst = winograd::slab_of_diff_dst,
                                                   .stride = winograd::slab_stride,
                                                   .weights = winograd::diff_weights};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
