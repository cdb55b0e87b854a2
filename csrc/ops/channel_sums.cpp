#include "ops/channel_sums.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "kernels/kernels.h"
#include "kernels/normalization.h"
#include "ops/chunks.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

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
  ImageNorms run(src.dims(), src.block());
  on_all_threads(
      [&] { run(src.physical.const_data_ptr<float>(), norms.mutable_data_ptr<float>()); });
  return norms;
}

ImageNorms::ImageNorms(const Dims& dims, std::int64_t block)
    : chunks_(dims, block), sums_(static_cast<std::size_t>(chunks_.count() * block)) {}

void ImageNorms::operator()(const float* src, float* dst) {
  const std::int64_t block = chunks_.block;
  const kernels::Kernels& table = kernels::kernels_for(block);
  for_chunks(chunks_, [&](std::int64_t chunk) {
    table.sum_squares({.src = src + chunks_.offset(chunk),
                       .block = block,
                       .pixels = chunks_.size(chunk),
                       .sum = sums_.data() + chunk * block});
  });
  const std::int64_t rows = chunks_.batch * chunks_.blocks;
  parallel_units(rows, chunks_.per_row * block, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * block; i < end * block; ++i) {
      double sum = 0;
      for (std::int64_t chunk = 0; chunk < chunks_.per_row; ++chunk) {
        sum += sums_[static_cast<std::size_t>((i / block * chunks_.per_row + chunk) * block +
                                              i % block)];
      }
      dst[i] = static_cast<float>(std::sqrt(sum));
    }
  });
}

}  // namespace torch_blocked
