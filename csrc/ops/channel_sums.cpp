// Every channel block of every image is cut into chunks of a fixed number of pixels. A chunk is
// summed in float32 by one thread; the chunks are added in float64, in their order. So the result
// does not depend on who sums which chunk, and its error does not grow with the number of pixels.
#include "ops/channel_sums.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "kernels/kernels.h"
#include "kernels/normalization.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// 16 KB of a 16-channel block: a second walk over the chunk finds it in L1.
constexpr std::int64_t kChunkPixels = 256;

// The chunks of a range of channel blocks in memory order: [N, blocks, chunks of a row].
struct Chunks {
  std::int64_t batch, block, pixels, per_row;
  std::int64_t blocks, all_blocks, first_block;  // of the range, of the tensor

  Chunks(const Blocked& src, BlockRange range)
      : batch(src.batch()),
        block(src.block()),
        pixels(src.pixels()),
        per_row(ceil_div(pixels, kChunkPixels)),
        blocks(range.count),
        all_blocks(src.blocks()),
        first_block(range.first) {}

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

// The elements of a tensor of either type.
class Rows {
 public:
  explicit Rows(const Blocked& src)
      : data_(static_cast<const char*>(src.physical.const_data_ptr())),
        element_(static_cast<std::int64_t>(src.physical.element_size())) {}
  const void* at(std::int64_t offset) const { return data_ + offset * element_; }

 private:
  const char* data_;
  std::int64_t element_;
};

// Partial sums: two rows of `block` values for every chunk.
class Partials {
 public:
  explicit Partials(const Chunks& chunks)
      : block_(chunks.block),
        values_(static_cast<std::size_t>(chunks.count() * 2 * chunks.block)) {}
  float* first(std::int64_t chunk) { return values_.data() + chunk * 2 * block_; }
  float* second(std::int64_t chunk) { return first(chunk) + block_; }

 private:
  std::int64_t block_;
  std::vector<float> values_;
};

// f(chunk) on all chunks, shared among the threads.
template <typename F>
void for_chunks(const Chunks& chunks, F&& f) {
  parallel_units(chunks.count(), kChunkPixels * chunks.block,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t chunk = begin; chunk < end; ++chunk) f(chunk);
                 });
}

// f(chunk, channel) for the chunks of a channel block in their order; blocks are shared among the
// threads.
template <typename F>
void add_chunks(const Chunks& chunks, F&& f) {
  const std::int64_t work = chunks.batch * chunks.per_row * chunks.block;
  parallel_units(chunks.blocks, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t image = 0; image < chunks.batch; ++image) {
      const std::int64_t row = image * chunks.blocks;
      for (std::int64_t chunk = (row + begin) * chunks.per_row;
           chunk < (row + end) * chunks.per_row; ++chunk) {
        f(chunk, chunks.channel(chunk));
      }
    }
  });
}

PerLane zeros(const Chunks& chunks) {
  return PerLane(static_cast<std::size_t>(chunks.blocks * chunks.block));
}

void add(const float* values, std::int64_t count, double* sums) {
  for (std::int64_t lane = 0; lane < count; ++lane) sums[lane] += values[lane];
}

}  // namespace

PerLane channel_sums(const Blocked& src) {
  const Chunks chunks(src, all_blocks(src));
  Partials partials(chunks);
  const Rows in(src);
  const kernels::Kernels& table = kernels::kernels_for(chunks.block);
  const auto kernel = is_bfloat16(src) ? table.sum_pixels_bfloats : table.sum_pixels;
  for_chunks(chunks, [&](std::int64_t chunk) {
    kernel({.src = in.at(chunks.offset(chunk)),
            .block = chunks.block,
            .pixels = chunks.size(chunk),
            .sum = partials.first(chunk)});
  });
  PerLane sums = zeros(chunks);
  add_chunks(chunks, [&](std::int64_t chunk, std::int64_t channel) {
    add(partials.first(chunk), chunks.block, sums.data() + channel);
  });
  return sums;
}

Moments channel_moments(const Blocked& src, BlockRange range) {
  const Chunks chunks(src, range);
  Partials partials(chunks);
  const Rows in(src);
  const kernels::Kernels& table = kernels::kernels_for(chunks.block);
  const auto kernel = is_bfloat16(src) ? table.moments_bfloats : table.moments;
  for_chunks(chunks, [&](std::int64_t chunk) {
    kernel({.src = in.at(chunks.offset(chunk)),
            .block = chunks.block,
            .pixels = chunks.size(chunk),
            .mean = partials.first(chunk),
            .squares = partials.second(chunk)});
  });
  Moments moments{zeros(chunks), zeros(chunks)};
  add_chunks(chunks, [&](std::int64_t chunk, std::int64_t channel) {
    const double pixels = static_cast<double>(chunks.size(chunk));
    const float* mean = partials.first(chunk);
    double* sums = moments.mean.data() + channel;
    for (std::int64_t lane = 0; lane < chunks.block; ++lane) sums[lane] += pixels * mean[lane];
  });
  const double count = static_cast<double>(chunks.batch * chunks.pixels);
  for (double& mean : moments.mean) mean /= count;
  // Squares about the chunk's own mean become squares about the mean of all.
  // Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
  add_chunks(chunks, [&](std::int64_t chunk, std::int64_t channel) {
    const double pixels = static_cast<double>(chunks.size(chunk));
    const float *mean = partials.first(chunk), *squares = partials.second(chunk);
    for (std::int64_t lane = 0; lane < chunks.block; ++lane) {
      const auto index = static_cast<std::size_t>(channel + lane);
      const double shift = mean[lane] - moments.mean[index];
      moments.squares[index] += squares[lane] + pixels * shift * shift;
    }
  });
  return moments;
}

GradientSums gradient_sums(const Blocked& diff_dst, const Blocked& src, BlockRange range,
                           const float* mean) {
  const Chunks chunks(src, range);
  mean += range.first * chunks.block;
  Partials partials(chunks);
  const Rows diff(diff_dst), in(src);
  const kernels::Kernels& table = kernels::kernels_for(chunks.block);
  const auto kernel = is_bfloat16(src) ? table.gradient_sums_bfloats : table.gradient_sums;
  for_chunks(chunks, [&](std::int64_t chunk) {
    const std::int64_t offset = chunks.offset(chunk);
    kernel({.diff_dst = diff.at(offset),
            .src = in.at(offset),
            .mean = mean + chunks.channel(chunk),
            .block = chunks.block,
            .pixels = chunks.size(chunk),
            .sum = partials.first(chunk),
            .dot = partials.second(chunk)});
  });
  GradientSums sums{zeros(chunks), zeros(chunks)};
  add_chunks(chunks, [&](std::int64_t chunk, std::int64_t channel) {
    add(partials.first(chunk), chunks.block, sums.sum.data() + channel);
    add(partials.second(chunk), chunks.block, sums.dot.data() + channel);
  });
  return sums;
}

at::Tensor image_norms(const Blocked& src) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(src.physical.dim()), 1);
  shape[0] = src.batch();
  shape[1] = src.blocks();
  shape.back() = src.block();
  const at::Tensor norms = at::empty(shape, at::kFloat);
  float* dst = norms.mutable_data_ptr<float>();
  const auto pixels = static_cast<double>(src.pixels());
  for (std::int64_t n = 0; n < src.batch(); ++n) {
    const Blocked image{src.physical.narrow(0, n, 1), src.channels};
    const Moments moments = channel_moments(image, all_blocks(image));
    for (std::size_t i = 0; i < moments.mean.size(); ++i) {
      const double mean = moments.mean[i];
      *dst++ = static_cast<float>(std::sqrt(moments.squares[i] + pixels * mean * mean));
    }
  }
  return norms;
}

}  // namespace torch_blocked
