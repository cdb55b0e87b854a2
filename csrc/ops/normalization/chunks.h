// Cuts every channel block of every image into chunks of a fixed number of pixels. One thread sums
// a chunk in float32; the sums of chunks are added in float64, in order. So the result does not
// depend on which thread sums which chunk, and its error does not grow with the number of pixels.
#pragma once

#include <c10/util/accumulate.h>

#include <algorithm>

#include "ops/blocked.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

// Consecutive channel blocks, of all images. Sums over a range have [count * block] values. The
// bits of a block's sums do not depend on the range.
struct BlockRange {
  std::int64_t first, count;
};
inline BlockRange all_blocks(const Blocked& src) { return {0, src.blocks()}; }

// 16 KB of a 16-channel block, so a second walk over the chunk finds it in L1.
inline constexpr std::int64_t kChunkPixels = 256;

// The chunks of a range of channel blocks in memory order: [N, blocks, chunks of a row].
struct Chunks {
  std::int64_t batch, block, pixels, per_row;
  std::int64_t blocks, all_blocks, first_block;  // of the range, of the tensor

  // The chunks of all blocks of a tensor of these dims.
  Chunks(const Dims& dims, std::int64_t block)
      : batch(dims[0]),
        block(block),
        pixels(c10::multiply_integers(dims.begin() + 2, dims.end())),
        per_row(ceil_div(pixels, kChunkPixels)),
        blocks(ceil_div(dims[1], block)),
        all_blocks(blocks),
        first_block(0) {}
  Chunks(const Blocked& src, BlockRange range) : Chunks(src.dims(), src.block()) {
    blocks = range.count;
    first_block = range.first;
  }

  std::int64_t count() const { return batch * blocks * per_row; }
  std::int64_t size(std::int64_t chunk) const {  // in pixels
    return std::min(kChunkPixels, pixels - chunk % per_row * kChunkPixels);
  }
  std::int64_t offset(std::int64_t chunk) const {  // of its first element in the tensor
    const std::int64_t row = chunk / per_row;
    const std::int64_t physical_row = row / blocks * all_blocks + first_block + row % blocks;
    return (physical_row * pixels + chunk % per_row * kChunkPixels) * block;
  }
  std::int64_t channel(std::int64_t chunk) const {  // within the range
    return chunk / per_row % blocks * block;
  }
};

// Calls f(chunk) for all chunks, which the threads share.
template <typename F>
void for_chunks(const Chunks& chunks, F&& f) {
  parallel_units(chunks.count(), kChunkPixels * chunks.block,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t chunk = begin; chunk < end; ++chunk) f(chunk);
                 });
}

}  // namespace torch_blocked
