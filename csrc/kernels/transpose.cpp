#include <algorithm>

#include "kernels/entries.h"
#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Pixels walked per channel block before the next block: long enough for the hardware prefetcher on
// both sides, short enough that the rows of channels read in part stay in L1 (32 x 2 KB at C = 512).
constexpr std::int64_t kPixelTile = 32;

// Walks the tiles: f(pixel, block index) for every pixel of a tile, block by block.
template <typename F>
inline void for_tiles(std::int64_t blocks, std::int64_t begin, std::int64_t end, F&& f) {
  for (std::int64_t tile = begin; tile < end; tile += kPixelTile) {
    const std::int64_t tile_end = std::min(tile + kPixelTile, end);
    for (std::int64_t index = 0; index < blocks; ++index) {
      for (std::int64_t pixel = tile; pixel < tile_end; ++pixel) f(pixel, index);
    }
  }
}

}  // namespace

void block_channels(const float* src, float* dst, std::int64_t channels, std::int64_t block,
                    std::int64_t pixels, std::int64_t begin, std::int64_t end) {
  const std::int64_t whole = channels / block, tail = channels % block;
  for_tiles(whole + (tail > 0), begin, end, [&](std::int64_t pixel, std::int64_t index) {
    const float* from = src + pixel * channels + index * block;
    float* to = dst + (index * pixels + pixel) * block;
    if (index < whole) {
      for_lanes(block, [&](std::int64_t lane, std::int64_t count) {
        store(load(from + lane, count), to + lane, count);
      });
    } else {
      std::copy_n(from, tail, to);
      std::fill(to + tail, to + block, 0.f);
    }
  });
}

void unblock_channels(const float* src, float* dst, std::int64_t channels, std::int64_t block,
                      std::int64_t pixels, std::int64_t begin, std::int64_t end) {
  const std::int64_t whole = channels / block, tail = channels % block;
  for_tiles(whole + (tail > 0), begin, end, [&](std::int64_t pixel, std::int64_t index) {
    const float* from = src + (index * pixels + pixel) * block;
    float* to = dst + pixel * channels + index * block;
    if (index < whole) {
      for_lanes(block, [&](std::int64_t lane, std::int64_t count) {
        store(load(from + lane, count), to + lane, count);
      });
    } else {
      std::copy_n(from, tail, to);
    }
  });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
