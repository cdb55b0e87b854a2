// Reorders between dense and blocked, one image at a time. A large dst is written past the cache
// (`stream`), because an ordinary store reads the line first, which is a third more traffic.
#include <algorithm>
#include <cstring>

#include "kernels/rows/reorder.h"
#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

constexpr std::int64_t kMaxBlock = 32;
constexpr std::int64_t kTile = 16;  // pixels transposed together: a cache line of one channel

inline void write(const float* src, float* dst, std::int64_t count, bool past_cache) {
  if (past_cache && is_aligned(dst) && count % kWidth == 0) {
    for (std::int64_t i = 0; i < count; i += kWidth) stream(Vec::loadu(src + i), dst + i);
  } else {
    for_lanes(count, [&](std::int64_t i, std::int64_t n) { store(load(src + i, n), dst + i, n); });
  }
}

// With constant strides and pointers that no store can change, GCC vectorizes the loop.
template <int kChannels, bool kIsPlanes>
void block_picture_of(const PictureReorder& r, std::int64_t begin, std::int64_t end) {
  const std::uint8_t* __restrict src = r.src;
  auto* __restrict dst = reinterpret_cast<std::uint32_t*>(r.dst);
  const std::int64_t plane = r.channel_stride;
  for (std::int64_t pixel = begin; pixel < end; ++pixel) {
    std::uint32_t channels = 0;
    for (int i = 0; i < kChannels; ++i) {
      const std::int64_t at = kIsPlanes ? i * plane + pixel : i + kChannels * pixel;
      channels |= std::uint32_t{src[at]} << (8 * i);
    }
    dst[pixel] = channels;
  }
}

}  // namespace

void transpose(const Transposition& t) {
  const auto [src, src_stride, dst, dst_stride, rows, columns] = t;
#if defined(CPU_CAPABILITY_AVX512)
  at::vec::transpose_mxn<float>(src, src_stride, dst, dst_stride, static_cast<int>(rows),
                                static_cast<int>(columns));
#else
  std::int64_t row = 0;
#if defined(CPU_CAPABILITY_AVX2)
  for (; row + 8 <= rows && columns % 8 == 0; row += 8) {
    for (std::int64_t column = 0; column < columns; column += 8) {
      at::vec::transpose_mxn<float, 8, 8>(src + row * src_stride + column, src_stride,
                                          dst + column * dst_stride + row, dst_stride);
    }
  }
#endif
  for (; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      dst[column * dst_stride + row] = src[row * src_stride + column];
    }
  }
#endif
}

void block_channels(const ImageReorder& r, std::int64_t begin, std::int64_t end) {
  const std::int64_t whole = r.channels / r.block, tail = r.channels % r.block;
  // A pixel of 16c is a cache line and is streamed at once, so it is best to read src in order
  // (1.3 of memcpy's pace, 0.7 with 4 pixels a turn). A pixel of 8c is half a line, and its
  // neighbour should follow soon (0.7 of memcpy's pace with 8 pixels a turn, 0.4 with 2).
  const std::int64_t turn = r.block >= 16 ? 1 : 64 / r.block;
  for (std::int64_t first = begin; first < end; first += turn) {
    const std::int64_t last = std::min(first + turn, end);
    for (std::int64_t index = 0; index < whole + (tail > 0); ++index) {
      float* to = r.dst + index * r.pixels * r.block;  // [pixels, block]
      const float* from = r.src + index * r.block;     // [pixels, channels]
      for (std::int64_t pixel = first; pixel < last; ++pixel) {
        if (index < whole) {
          write(from + pixel * r.channels, to + pixel * r.block, r.block, r.stream);
        } else {
          float lanes[kMaxBlock] = {};
          std::copy_n(from + pixel * r.channels, tail, lanes);
          write(lanes, to + pixel * r.block, r.block, r.stream);
        }
      }
    }
  }
  if (r.stream) stream_fence();
}

void unblock_channels(const ImageReorder& r, std::int64_t begin, std::int64_t end) {
  const std::int64_t whole = r.channels / r.block, tail = r.channels % r.block;
  for (std::int64_t pixel = begin; pixel < end; ++pixel) {
    const float* from = r.src + pixel * r.block;
    float* to = r.dst + pixel * r.channels;
    for (std::int64_t index = 0; index < whole; ++index) {
      write(from + index * r.pixels * r.block, to + index * r.block, r.block, r.stream);
    }
    std::copy_n(from + whole * r.pixels * r.block, tail, to + whole * r.block);
  }
  if (r.stream) stream_fence();
}

void block_planes(const ImageReorder& r, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = 0; index * r.block < r.channels; ++index) {
    const std::int64_t rows = std::min(r.block, r.channels - index * r.block);
    const float* from = r.src + index * r.block * r.pixels;  // [rows, pixels]
    float* to = r.dst + index * r.block * r.pixels;          // [pixels, block]
    alignas(64) float tile[kTile * kMaxBlock] = {};          // lanes beyond `rows` stay 0
    for (std::int64_t pixel = begin; pixel < end; pixel += kTile) {
      const std::int64_t pixels = std::min(kTile, end - pixel);
      transpose({from + pixel, r.pixels, tile, r.block, rows, pixels});
      write(tile, to + pixel * r.block, pixels * r.block, r.stream);
    }
  }
  if (r.stream) stream_fence();
}

void block_picture(const PictureReorder& r, std::int64_t begin, std::int64_t end) {
  using Run = void (*)(const PictureReorder&, std::int64_t, std::int64_t);
  static constexpr Run kRuns[2][4] = {{block_picture_of<1, false>, block_picture_of<2, false>,
                                       block_picture_of<3, false>, block_picture_of<4, false>},
                                      {block_picture_of<1, true>, block_picture_of<2, true>,
                                       block_picture_of<3, true>, block_picture_of<4, true>}};
  kRuns[r.pixel_stride == 1][r.channels - 1](r, begin, end);
}

void unblock_planes(const ImageReorder& r, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = 0; index * r.block < r.channels; ++index) {
    const std::int64_t rows = std::min(r.block, r.channels - index * r.block);
    const float* from = r.src + index * r.block * r.pixels;
    float* to = r.dst + index * r.block * r.pixels;
    alignas(64) float tile[kMaxBlock * kTile];
    for (std::int64_t pixel = begin; pixel < end; pixel += kTile) {
      const std::int64_t pixels = std::min(kTile, end - pixel);
      transpose({from + pixel * r.block, r.block, tile, kTile, pixels, rows});
      for (std::int64_t row = 0; row < rows; ++row) {
        write(tile + row * kTile, to + row * r.pixels + pixel, pixels, r.stream);
      }
    }
  }
  if (r.stream) stream_fence();
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
