// The gradient of a weight as sums of outer products: for each tap, src channels times diff_dst
// channels, over all pixels that see the tap.
//
// Threads share tiles of the weight. A tile is summed chunk by chunk of pixels, in order. If there
// are few tiles, the chunks are split into a fixed number of parts that are added in order. So the
// result does not depend on the number of threads.

#include <algorithm>
#include <array>

#include "kernels/direct/outer_products.h"
#include "kernels/kernels.h"
#include "ops/gradient/convolution_backward.h"
#include "ops/gradient/tiles.h"
#include "runtime/memory/memory_pool.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// Pixels summed in registers before they are added to the sums in memory; half as many if a chunk
// spans images. 128 are 5 % slower; 512 have 3 times the error of oneDNN's kernel.
constexpr std::int64_t kChunkPixels = 256;
// Larger tiles read src and diff_dst fewer times, but their sums of all taps must stay in L2.
constexpr GradientTileSize kTile{.channels = 32, .vectors = 6},
    kTileOf1x1{.channels = 64, .vectors = 8};
// Up to this many input channels, the columns under a kernel's row count as channels of one pixel.
constexpr std::int64_t kFewChannels = 8;
// Tiles times parts should reach this number, which is enough for the threads that we expect.
constexpr std::int64_t kUnits = 32;

struct Shape : SpatialSizes {
  std::int64_t batch, ic, oc;
  std::int64_t block, src_block, src_pixel;  // channels of a block; floats from pixel to pixel

  std::int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

Shape shape_of(const Problem& p) {
  const std::int64_t block = p.src_format.block;
  return {spatial_sizes(p), p.src_dims[0], p.src_dims[1], p.dst_dims[1], block, block, block};
}

struct Span {
  std::int64_t begin, end;
  std::int64_t size() const { return std::max<std::int64_t>(0, end - begin); }
};

bool is_strided_1x1(const Shape& s) {
  const std::array<std::int64_t, 3> ones{1, 1, 1}, zeros{};
  return s.taps() == 1 && s.padding == zeros && s.stride != ones;
}

// The output positions along `dim` within `of` for which the input under `tap` is not padding.
Span seen(const Shape& s, std::size_t dim, std::int64_t tap, Span of) {
  const std::int64_t shift = tap * s.dilation[dim] - s.padding[dim];  // in = out * stride + shift
  const std::int64_t first = shift >= 0 ? 0 : ceil_div(-shift, s.stride[dim]);
  const std::int64_t last = s.in[dim] - 1 - shift;
  const std::int64_t end = last < 0 ? 0 : last / s.stride[dim] + 1;
  return {std::max(of.begin, first), std::min(of.end, end)};
}

// The images and output rows of one chunk, and the first ones of the next chunk.
struct Chunk {
  Span images, rows;
  std::int64_t next_image, next_row;
};

struct Chunks {
  std::int64_t count, images_each, rows_each, per_image;
  const Shape* shape;

  explicit Chunks(const Shape& s) : shape(&s) {
    const std::int64_t row = s.out[0] * s.out[2], image = row * s.out[1];
    images_each = std::max<std::int64_t>(1, kChunkPixels / 2 / image);
    rows_each = std::clamp<std::int64_t>(kChunkPixels / row, 1, s.out[1]);
    if (images_each > 1) rows_each = s.out[1];
    per_image = ceil_div(s.out[1], rows_each);
    count = ceil_div(s.batch, images_each) * per_image;
  }
  Chunk operator[](std::int64_t i) const {
    const auto first_image = [&](std::int64_t i) { return i / per_image * images_each; };
    const auto first_row = [&](std::int64_t i) { return i % per_image * rows_each; };
    return {{first_image(i), std::min(shape->batch, first_image(i) + images_each)},
            {first_row(i), std::min(shape->out[1], first_row(i) + rows_each)},
            first_image(i + 1),
            first_row(i + 1)};
  }
};

struct Sums {
  const Shape& s;
  const float *src, *diff;
  const kernels::Kernels& table;
  PackedGradient packed;

  // Adds the products of a chunk at one tap. The first chunk of a part begins its sums.
  void add_tap(const GradientTile& tile, const Chunk& chunk, std::array<std::int64_t, 3> tap,
               bool add, float* sums) const {
    const Span depth = seen(s, 0, tap[0], {0, s.out[0]}), rows = seen(s, 1, tap[1], chunk.rows),
               columns = seen(s, 2, tap[2], {0, s.out[2]});
    const auto in = [&](std::size_t dim, std::int64_t out) {
      return out * s.stride[dim] + tap[dim] * s.dilation[dim] - s.padding[dim];
    };
    const std::int64_t blocks_in = ceil_div(s.ic, s.src_block),
                       blocks_out = ceil_div(s.oc, s.block);
    const std::int64_t row_in = s.in[2] * s.src_pixel, row_out = s.out[2] * s.block;
    const std::int64_t plane_in = s.in[1] * row_in, plane_out = s.out[1] * row_out;
    const std::int64_t block_in = s.in[0] * plane_in, block_out = s.out[0] * plane_out;
    const std::int64_t image_in = blocks_in * block_in, image_out = blocks_out * block_out;
    const std::int64_t images_on = chunk.next_image - chunk.images.begin,
                       rows_on = chunk.next_row - chunk.rows.begin;
    kernels::OuterProducts p{
        .a = src + tile.ic / s.src_block * block_in + tile.ic % s.src_block +
             in(0, depth.begin) * plane_in + in(1, rows.begin) * row_in +
             in(2, columns.begin) * s.src_pixel,
        .b = diff + depth.begin * plane_out + rows.begin * row_out + columns.begin * s.block,
        .sums = sums,
        .images = depth.size(),
        .rows = rows.size(),
        .pixels = columns.size(),
        .a_image = s.stride[0] * plane_in,
        .a_row = s.stride[1] * row_in,
        .a_pixel = s.stride[2] * s.src_pixel,
        .b_image = plane_out,
        .b_row = row_out,
        .b_pixel = s.block,
        .a_ahead = images_on * image_in + rows_on * s.stride[1] * row_in,
        .b_ahead = images_on * image_out + rows_on * row_out,
        .a_count = tile.ic_count,
        .a_block = s.src_block,
        .a_block_stride = block_in,
        .b_first = tile.vector,
        .b_vectors = tile.vectors,
        .b_block = s.block,
        .b_block_stride = block_out,
        .sums_row = packed.ic_stride,
        .sums_vector = packed.vector_stride,
        .add = add};
    if (p.images * p.rows * p.pixels == 0) p.rows = 0;  // only padding: the sums may start from 0
    if (p.a_row == p.pixels * p.a_pixel && p.b_row == p.pixels * p.b_pixel) {
      p.pixels *= p.rows;  // 1x1: rows follow each other
      p.rows = 1;
    }
    p.a += chunk.images.begin * image_in;
    p.b += chunk.images.begin * image_out;
    if (s.out[0] == 1 && p.images == 1) {
      p.images = chunk.images.size();
      p.a_image = image_in;
      p.b_image = image_out;
      return table.outer_products(p);
    }
    for (std::int64_t image = 0; image < chunk.images.size(); ++image) {
      table.outer_products(p);
      p.a += image_in;
      p.b += image_out;
      p.add = true;
    }
  }

  void add_tile(const GradientTile& tile, const Chunk& chunk, bool add, float* sums) const {
    sums += tile.ic * packed.ic_stride + tile.vector * packed.vector_stride;
    for (std::int64_t kd = 0; kd < s.kernel[0]; ++kd) {
      for (std::int64_t kh = 0; kh < s.kernel[1]; ++kh) {
        for (std::int64_t kw = 0; kw < s.kernel[2]; ++kw, sums += packed.tap_stride) {
          add_tap(tile, chunk, {kd, kh, kw}, add, sums);
        }
      }
    }
  }
};

void run_direct(const Shape& s, const Blocked& src, const Blocked& diff_dst,
                const PackedGradient& packed, const at::Tensor& diff_weight) {
  const kernels::Kernels& table = kernels::kernels_for(s.block);
  const GradientTiles tiles(s.ic, ceil_div(s.oc, table.width), s.taps() == 1 ? kTileOf1x1 : kTile);
  const Chunks chunks(s);
  const std::int64_t parts = std::clamp<std::int64_t>(kUnits / tiles.count(), 1, chunks.count);
  const std::int64_t size = packed.sums.numel();
  const at::Tensor partial =
      parts > 1 ? empty_pooled({parts * size}, packed.sums.options()) : packed.sums;
  const Sums sums{s, src.physical.const_data_ptr<float>(),
                  diff_dst.physical.const_data_ptr<float>(), table, packed};
  auto *to = partial.mutable_data_ptr<float>(), *total = packed.sums.mutable_data_ptr<float>();
  parallel_units(tiles.count() * parts, kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t part = unit / tiles.count();
      const GradientTile tile = tiles[unit % tiles.count()];
      const std::int64_t first = part * chunks.count / parts;
      for (std::int64_t chunk = first; chunk < (part + 1) * chunks.count / parts; ++chunk) {
        sums.add_tile(tile, chunks[chunk], chunk > first, to + part * size);
      }
      if (parts == 1) unpack_gradient(packed, tile, diff_weight);
    }
  });
  if (parts == 1) return;
  parallel_units(size, parts, [&](std::int64_t begin, std::int64_t end) {
    std::copy(to + begin, to + end, total + begin);
    for (std::int64_t part = 1; part < parts; ++part) {
      for (std::int64_t i = begin; i < end; ++i) total[i] += to[part * size + i];
    }
  });
  for (std::int64_t i = 0; i < tiles.count(); ++i) unpack_gradient(packed, tiles[i], diff_weight);
}

// src [N, few channels, D, H, W] -> [N, D, H, W + padding, IC]: with the padding of W filled in,
// the pixels under a row of the kernel follow each other like KW * IC channels of one pixel.
at::Tensor with_padded_rows(const Shape& s, const Blocked& src, std::int64_t width) {
  const std::int64_t rows = s.batch * s.in[0] * s.in[1];
  const at::Tensor padded = empty_pooled({rows, width, s.ic}, src.physical.options());
  const auto* from = src.physical.const_data_ptr<float>();
  auto* to = padded.mutable_data_ptr<float>();
  parallel_units(rows, width * s.ic, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      float* pixel = std::fill_n(to + row * width * s.ic, s.padding[2] * s.ic, 0.f);
      const std::int64_t columns = std::min(s.in[2], width - s.padding[2]);
      for (std::int64_t column = 0; column < columns; ++column, pixel += s.ic) {
        std::copy_n(from + (row * s.in[2] + column) * s.block, s.ic, pixel);
      }
      std::fill(pixel, to + (row + 1) * width * s.ic, 0.f);
    }
  });
  return padded;
}

// Copies the pixels of src that a strided 1x1 sees: [N, blocks, *out, b]. Read in place, every
// other cache line would be fetched in vain (the copy is 1.2 times as fast at 28@56).
at::Tensor seen_pixels(const Shape& s, const Blocked& src) {
  const std::int64_t rows = s.batch * src.blocks() * s.out[0] * s.out[1];
  const at::Tensor seen = empty_pooled({rows, s.out[2], s.block}, src.physical.options());
  const auto* from = src.physical.const_data_ptr<float>();
  auto* to = seen.mutable_data_ptr<float>();
  parallel_units(rows, s.out[2] * s.block, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t plane = row / s.out[1], volume = plane / s.out[0];
      const std::int64_t in_plane = volume * s.in[0] + plane % s.out[0] * s.stride[0];
      const std::int64_t in_row = in_plane * s.in[1] + row % s.out[1] * s.stride[1];
      for (std::int64_t column = 0; column < s.out[2]; ++column) {
        std::copy_n(from + (in_row * s.in[2] + column * s.stride[2]) * s.block, s.block,
                    to + (row * s.out[2] + column) * s.block);
      }
    }
  });
  return seen;
}

void run_strided_1x1(const Shape& s, const Blocked& src, const Blocked& diff_dst,
                     const PackedGradient& packed, const at::Tensor& diff_weight) {
  Shape dense = s;
  dense.in = s.out;
  dense.stride = {1, 1, 1};
  run_direct(dense, {seen_pixels(s, src), src.channels}, diff_dst, packed, diff_weight);
}

// Runs the kernel as one with a single column and KW * IC channels, which are enough to fill the
// registers at each tap.
void run_few_channels(const Problem& p, const Blocked& src, const Blocked& diff_dst,
                      const at::Tensor& diff_weight) {
  const Shape s = shape_of(p);
  const std::int64_t width = (s.out[2] - 1) * s.stride[2] + s.kernel[2];
  Shape rows = s;
  rows.ic = rows.src_block = s.kernel[2] * s.ic;
  rows.src_pixel = s.ic;
  rows.in[2] = width;
  rows.kernel[2] = 1;
  rows.padding[2] = 0;
  const at::Tensor gradient = empty_dense(p.weight_dims, true, diff_weight.options());
  PackedGradient packed = empty_packed_gradient(p, gradient, kernels::kernels_for(s.block).width);
  packed.ic_stride = packed.width;
  packed.tap_stride = rows.ic * packed.width;
  run_direct(rows, {with_padded_rows(s, src, width), s.ic}, diff_dst, packed, gradient);
  diff_weight.copy_(gradient);
}

const char* refuses_direct(const WeightGradientProblem& problem) {
  const auto& [p, diff_weight] = problem;
  const bool in_order = diff_weight.is_contiguous() || is_channels_last(diff_weight);
  if (!in_order) return "writes weights in order, or with channels last";
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (p.groups != 1) return "takes one group only";
  if (!p.blocked()) return "reads one blocked format only";
  return p.src_format.block % 8 == 0 ? nullptr : "takes blocks of whole vectors only";
}

std::optional<RunWeightGradient> plan_direct(const WeightGradientProblem& problem) {
  const Problem& p = problem.convolution;
  const Shape shape = shape_of(p);
  if (shape.ic <= kFewChannels && shape.kernel[2] > 1 && shape.dilation[2] == 1 &&
      shape.padding[2] < shape.kernel[2]) {
    return [p](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
      run_few_channels(p, src, diff_dst, diff_weight);
    };
  }
  return [p, shape](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    const auto packed =
        empty_packed_gradient(p, diff_weight, kernels::kernels_for(shape.block).width);
    (is_strided_1x1(shape) ? run_strided_1x1 : run_direct)(shape, src, diff_dst, packed,
                                                           diff_weight);
  };
}

}  // namespace

constinit const WeightGradient weight_gradients::direct = {
    .name = "direct",
    .refuses = refuses_direct,
    .plan = plan_direct,
    .estimate = direct_gradient_microseconds,
};

}  // namespace torch_blocked
