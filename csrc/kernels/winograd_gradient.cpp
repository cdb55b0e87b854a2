// The gradient of 3x3 weights by Winograd's F(4x4, 3x3): transforms of src, diff_dst and the sums
// of their products.
#include "kernels/winograd_src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace winograd {
namespace {

// Kernels of one tap along depth.
using T = Tile<F1, F4, F4>;
using Plane = F4;

std::int64_t slab_stride(std::int64_t channels, std::int64_t slab) {
  return slab * round_up(channels, kWidth) + kLine<float>;
}

// Calls f(channel, at, to, stride) for every vector of channels and tile of the slab; clears the
// rest.
template <typename F>
inline void for_slab(const WinogradShape& shape, WinogradTiles tiles, std::int64_t slab,
                     std::int64_t channels, float* values, F&& f) {
  const std::int64_t stride = slab_stride(channels, slab);
  for (std::int64_t channel = 0; channel < channels; channel += kWidth) {
    float* to = values + channel * slab;  // [slab, kWidth]
    Walk<T> at(shape, tiles.first);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
      f(channel, at, to + i * kWidth, stride);
    }
    for (std::int64_t position = 0; position < T::kPositions; ++position) {
      std::fill(to + position * stride + tiles.count * kWidth,
                to + position * stride + slab * kWidth, 0.f);
    }
  }
}

// The first float of a vector of channels of an image.
inline const float* channel_of(const float* data, const WinogradShape& shape, std::int64_t image,
                               std::int64_t channels, std::int64_t channel,
                               const std::array<std::int64_t, 3>& size) {
  const std::int64_t blocks = (channels + shape.block - 1) / shape.block;
  return data +
         (image * blocks + channel / shape.block) * size[0] * size[1] * size[2] * shape.block +
         channel % shape.block;
}

[[gnu::flatten]] void slab_of_src(const WinogradShape& shape, WinogradTiles tiles,
                                  std::int64_t slab, const float* src, float* v) {
  for_slab(shape, tiles, slab, shape.ic, v,
           [&](std::int64_t channel, const Walk<T>& at, float* to, std::int64_t stride) {
             const float* image = channel_of(src, shape, at.image, shape.ic, channel, shape.in);
             src_tile<T, kWidth>(shape, image, corner_of(shape, at), to, stride);
           });
}

// A diff_dst A^T of one vector of channels of one tile.
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
  const std::int64_t pixel = shape.block, row = shape.out[2] * pixel;
  for_slab(
      shape, tiles, slab, shape.oc, d,
      [&](std::int64_t channel, const Walk<T>& at, float* to, std::int64_t stride) {
        const float* image = channel_of(diff_dst, shape, at.image, shape.oc, channel, shape.out);
        const float* tile = image + (at.d() * shape.out[1] + at.h()) * row + at.w() * pixel;
        const std::int64_t rows = std::min<std::int64_t>(shape.out[1] - at.h(), Plane::kM),
                           columns = std::min<std::int64_t>(shape.out[2] - at.w(), Plane::kM);
        if (rows == Plane::kM && columns == Plane::kM) {
          return diff_dst_tile(tile, row, pixel, to, stride);
        }
        std::memset(padded, 0, sizeof padded);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < columns; ++j) {
            Vec::loadu(tile + i * row + j * pixel).store(padded + (i * Plane::kM + j) * kWidth);
          }
        }
        diff_dst_tile(padded, Plane::kM * kWidth, kWidth, to, stride);
      });
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
