// Sums of each channel in chunks: kernels sum a chunk in float32, and the chunks are added in
// float64. A chunk whose sums are not finite is summed again exactly.
#include "ops/normalization/channel_sums.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "kernels/rows/normalization.h"
#include "ops/normalization/chunks.h"
#include "ops/normalization/exact_sums.h"
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

// A kernel's results for a chunk: two rows of `block` values.
using Written = std::array<float, 2 * static_cast<std::size_t>(Format::kBlocks.back())>;

// Partial sums: two rows of `block` values for every chunk.
class Partials {
 public:
  explicit Partials(const Chunks& chunks)
      : block_(chunks.block),
        values_(static_cast<std::size_t>(chunks.count() * 2 * chunks.block)) {}
  double* first(std::int64_t chunk) { return values_.data() + chunk * 2 * block_; }
  double* second(std::int64_t chunk) { return first(chunk) + block_; }
  // Stores `rows` rows that a kernel wrote; false if a value is not finite.
  bool take(std::int64_t chunk, const Written& written, std::int64_t rows) {
    std::copy_n(written.begin(), rows * block_, first(chunk));
    return exact::all_finite(written.data(), rows * block_);
  }

 private:
  std::int64_t block_;
  std::vector<double> values_;
};

// Calls f(chunk, channel) for the chunks of each channel block, in order. Threads share the blocks.
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

void add(const double* values, std::int64_t count, double* sums) {
  for (std::int64_t lane = 0; lane < count; ++lane) sums[lane] += values[lane];
}

}  // namespace

PerLane channel_sums(const Blocked& src) {
  const Chunks chunks(src, all_blocks(src));
  Partials partials(chunks);
  const Rows in(src);
  const kernels::Kernels& table = kernels::kernels_for(chunks.block);
  const auto kernel = is_bfloat16(src) ? table.sum_pixels_bfloats : table.sum_pixels;
  const at::ScalarType dtype = src.physical.scalar_type();
  for_chunks(chunks, [&](std::int64_t chunk) {
    Written written;
    const kernels::PixelSums of_chunk{.src = in.at(chunks.offset(chunk)),
                                      .block = chunks.block,
                                      .pixels = chunks.size(chunk),
                                      .sum = written.data()};
    kernel(of_chunk);
    if (!partials.take(chunk, written, 1)) exact::sums(of_chunk, dtype, partials.first(chunk));
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
  const at::ScalarType dtype = src.physical.scalar_type();
  for_chunks(chunks, [&](std::int64_t chunk) {
    Written written;
    const kernels::PixelMoments of_chunk{.src = in.at(chunks.offset(chunk)),
                                         .block = chunks.block,
                                         .pixels = chunks.size(chunk),
                                         .mean = written.data(),
                                         .squares = written.data() + chunks.block};
    kernel(of_chunk);
    if (partials.take(chunk, written, 2)) return;
    exact::moments(of_chunk, dtype, partials.first(chunk), partials.second(chunk));
  });
  Moments moments{zeros(chunks), zeros(chunks)};
  add_chunks(chunks, [&](std::int64_t chunk, std::int64_t channel) {
    const double pixels = static_cast<double>(chunks.size(chunk));
    const double* mean = partials.first(chunk);
    double* sums = moments.mean.data() + channel;
    for (std::int64_t lane = 0; lane < chunks.block; ++lane) sums[lane] += pixels * mean[lane];
  });
  const double count = static_cast<double>(chunks.batch * chunks.pixels);
  for (double& mean : moments.mean) mean /= count;
  // Converts squared deviations from the chunk's mean to those from the mean of all pixels.
  // Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
  add_chunks(chunks, [&](std::int64_t chunk, std::int64_t channel) {
    const double pixels = static_cast<double>(chunks.size(chunk));
    const double *mean = partials.first(chunk), *squares = partials.second(chunk);
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
  const at::ScalarType dtype = src.physical.scalar_type();
  for_chunks(chunks, [&](std::int64_t chunk) {
    const std::int64_t offset = chunks.offset(chunk);
    Written written;
    const kernels::PixelGradientSums of_chunk{.diff_dst = diff.at(offset),
                                              .src = in.at(offset),
                                              .mean = mean + chunks.channel(chunk),
                                              .block = chunks.block,
                                              .pixels = chunks.size(chunk),
                                              .sum = written.data(),
                                              .dot = written.data() + chunks.block};
    kernel(of_chunk);
    if (partials.take(chunk, written, 2)) return;
    exact::gradient_sums(of_chunk, dtype, partials.first(chunk), partials.second(chunk));
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
    float* const sums = sums_.data() + chunk * block;
    const kernels::PixelSums of_chunk{.src = src + chunks_.offset(chunk),
                                      .block = block,
                                      .pixels = chunks_.size(chunk),
                                      .sum = sums};
    table.sum_squares(of_chunk);
    if (exact::all_finite(sums, block)) return;
    std::array<double, static_cast<std::size_t>(Format::kBlocks.back())> exactly;
    exact::squares(of_chunk, exactly.data());
    std::copy_n(exactly.begin(), block, sums);
  });
  constexpr double kMost = std::numeric_limits<float>::max();
  const std::int64_t rows = chunks_.batch * chunks_.blocks;
  parallel_units(rows, chunks_.per_row * block, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * block; i < end * block; ++i) {
      double sum = 0;
      for (std::int64_t chunk = 0; chunk < chunks_.per_row; ++chunk) {
        sum += sums_[static_cast<std::size_t>((i / block * chunks_.per_row + chunk) * block +
                                              i % block)];
      }
      // Infinite if the sum of squares overflows float32, as in ATen.
      dst[i] =
          sum > kMost ? std::numeric_limits<float>::infinity() : static_cast<float>(std::sqrt(sum));
    }
  });
}

}  // namespace torch_blocked
