// Depthwise convolutions of bytes. A block of channels of some rows is copied, with zero points
// around it, to memory that stays in L1. There each vector of pixels serves several output rows.
#include <algorithm>

#include "format/errors.h"
#include "format/sizes.h"
#include "kernels/kernels.h"
#include "ops/products/byte_rows.h"
#include "ops/quantized/convolution.h"
#include "runtime/isa.h"
#include "runtime/memory/packed_place.h"
#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = QuantizedConvolutionProblem;

constexpr std::int64_t kDepthwiseBandBytes = 24 << 10;  // L1 holds it beside dst

struct Depthwise {
  Problem problem;
  SpatialSizes s;
  std::int64_t n, channels, width, blocks;
  bool words;
  std::optional<kernels::DotEnd> end;

  std::int64_t pixels() const { return words ? 2 : 4; }
  // Bytes of a pixel in a band, where words are paired with those of the next pixel.
  std::int64_t pixel_bytes() const { return words ? 4 * width : width; }
  std::int64_t parts() const { return ceil_div(s.kernel[2], pixels()); }
  std::int64_t reach(std::size_t i, std::int64_t outputs) const {
    return (outputs - 1) * s.stride[i] + s.kernel[i];
  }
  // The columns that kernels read, including those under zero weights.
  ByteRows band() const {
    return {.columns = (s.out[2] - 1) * s.stride[2] + parts() * pixels(),
            .before = s.padding[2],
            .src_columns = s.in[2],
            .pixel_bytes = width,
            .zero = static_cast<std::uint8_t>(problem.src.zero),
            .words = false};
  }
};

Depthwise depthwise_of(const Problem& p) {
  const std::int64_t width = kernels::kernels().width;
  return {.problem = p,
          .s = spatial_sizes(p.sizes),
          .n = p.sizes.src_dims[0],
          .channels = p.sizes.src_dims[1],
          .width = width,
          .blocks = ceil_div(p.sizes.src_dims[1], width),
          .words = !permutes_bytes(),
          .end = dot_end(p)};
}

// [C, 1, *kernel] -> [blocks, kernel h, parts of kernel w, lanes, pixels of a part]
template <typename Number>
void pack_as(const Depthwise& d, const std::int8_t* weight, void* packed) {
  auto* to = static_cast<Number*>(packed);
  for (std::int64_t block = 0; block < d.blocks; ++block) {
    for (std::int64_t kh = 0; kh < d.s.kernel[1]; ++kh) {
      for (std::int64_t part = 0; part < d.parts(); ++part) {
        for (std::int64_t lane = 0; lane < d.width; ++lane) {
          for (std::int64_t i = 0; i < d.pixels(); ++i) {
            const std::int64_t c = block * d.width + lane, kw = part * d.pixels() + i;
            const bool inside = c < d.channels && kw < d.s.kernel[2];
            *to++ = inside ? weight[(c * d.s.kernel[1] + kh) * d.s.kernel[2] + kw] : Number{0};
          }
        }
      }
    }
  }
}

std::int64_t block_bytes(const Depthwise& d) { return d.s.kernel[1] * d.parts() * d.width * 4; }

at::Tensor pack(const Depthwise& d, const at::Tensor& weight) {
  const at::Tensor packed = empty_packed(d.blocks * block_bytes(d), at::kByte);
  const auto pack = d.words ? pack_as<std::int16_t> : pack_as<std::int8_t>;
  pack(d, weight.contiguous().const_data_ptr<std::int8_t>(), packed.mutable_data_ptr());
  return packed;
}

// `rows` rows of dst of one block of channels. src begins with the first tap of the first row.
struct Block {
  const std::uint8_t* src;
  std::int64_t src_row, block;  // bytes from row to row; which block
  void* dst;
  std::int64_t dst_row, rows;  // elements from row to row
};

using Kernel = void (*)(const kernels::DotDepthwise&);

void run_block(const Depthwise& d, const QuantizedWeights& weights, const Block& b, Kernel kernel) {
  const auto* channels =
      static_cast<const kernels::DotChannels*>(weights.channels.const_data_ptr());
  kernel({.src = b.src,
          .src_row = b.src_row,
          .kernel = {d.s.kernel[1], d.s.kernel[2]},
          .stride = {d.s.stride[1], d.s.stride[2]},
          .weights = weights.packed.const_data_ptr<std::uint8_t>() + b.block * block_bytes(d),
          .channels = channels + b.block,
          .end = d.end ? &*d.end : nullptr,
          .dst = b.dst,
          .rows = b.rows,
          .columns = d.s.out[2],
          .dst_row = b.dst_row,
          .is_float32 = !d.problem.dst});
}

void run(const Depthwise& d, const QuantizedWeights& weights, const std::uint8_t* src, void* dst) {
  const kernels::Kernels& table = kernels::kernels();
  const auto kernel = d.words ? table.dot_paired_depthwise : table.dot_byte_depthwise;
  const ByteRows band = d.band();
  const std::int64_t src_row = band.columns * d.pixel_bytes(), row_bytes = src_row * d.s.stride[1];
  const std::int64_t most =
      std::clamp<std::int64_t>(kDepthwiseBandBytes / row_bytes, 4, d.s.out[1] + 4);
  const std::int64_t bands = ceil_div(d.s.out[1], most), rows = ceil_div(d.s.out[1], bands);
  const std::int64_t src_plane = d.s.in[1] * d.s.in[2] * d.width, dst_row = d.s.out[2] * d.width,
                     dst_plane = d.s.out[1] * dst_row;
  parallel_units(
      d.n * d.blocks * bands, rows * dst_row * 4, [&](std::int64_t begin, std::int64_t last) {
        // One vector beyond the last row, because its last quad may reach beyond it.
        const std::int64_t bytes = d.reach(1, rows) * src_row + 64;
        auto* copy = reinterpret_cast<std::uint8_t*>(workspace(ceil_div(bytes, 4)));
        const auto fill = [&](const std::uint8_t* from, std::uint8_t* to) {
          if (!d.words) return band.fill(from, to);
          table.pair_pixels({from, to, band.columns, band.before, band.src_columns, band.zero});
        };
        for (std::int64_t unit = begin; unit < last; ++unit) {
          const std::int64_t plane = unit / bands, row = unit % bands * rows;
          const std::int64_t count = std::min(rows, d.s.out[1] - row);
          if (count <= 0) continue;
          for (std::int64_t r = 0; r < d.reach(1, count); ++r) {
            const std::int64_t y = row * d.s.stride[1] - d.s.padding[1] + r;
            const bool inside = y >= 0 && y < d.s.in[1];
            fill(inside ? src + plane * src_plane + y * d.s.in[2] * d.width : nullptr,
                 copy + r * src_row);
          }
          const std::int64_t at = plane * dst_plane + row * dst_row;
          run_block(d, weights,
                    {.src = copy,
                     .src_row = src_row,
                     .block = plane % d.blocks,
                     .dst = static_cast<char*>(dst) + at * (d.problem.dst ? 1 : 4),
                     .dst_row = dst_row,
                     .rows = count},
                    kernel);
        }
      });
}

void run_rows(const Depthwise& d, const QuantizedWeights& weights, const BlockedRows& src,
              const BlockedRows& dst, Range rows) {
  const kernels::Kernels& table = kernels::kernels();
  const auto kernel = d.words ? table.dot_word_depthwise : table.dot_byte_depthwise;
  for (std::int64_t block = 0; block < d.blocks; ++block) {
    run_block(d, weights,
              {.src = src.at(block, rows.begin * d.s.stride[1] - d.s.padding[1]),
               .src_row = src.row,
               .block = block,
               .dst = dst.at(block, rows.begin),
               .dst_row = dst.row,
               .rows = rows.end - rows.begin},
              kernel);
  }
}

RowStage row_stage(const Depthwise& d) {
  return {.window = {d.s.kernel[1], d.s.stride[1], d.s.padding[1], 1},
          .src = d.band(),
          .n = d.n,
          .src_rows = d.s.in[1],
          .src_blocks = d.blocks,
          .dst_rows = d.s.out[1],
          .dst_columns = d.s.out[2],
          .dst_blocks = d.blocks,
          .dst_pixel_bytes = d.width,
          .weight_bytes = d.blocks * block_bytes(d)};
}

const char* refuses_dots_depthwise(const Problem& p) {
  const ConvolutionProblem& s = p.sizes;
  const SpatialSizes sizes = spatial_sizes(s);
  if (s.transposed || s.groups != s.src_dims[1] || s.groups != s.dst_dims[1]) {
    return "is for groups of one channel";
  }
  if (s.src_format != s.dst_format || s.dst_format.block != kernels::kernels().width) {
    return "takes the CPU's own blocks";
  }
  if (sizes.in[0] != 1 || sizes.kernel[0] != 1) return "is for images of one plane";
  if (sizes.dilation != std::array<std::int64_t, 3>{1, 1, 1}) return "is for kernels side by side";
  return s.epilogue.residual ? "adds no residual" : nullptr;
}

// Always preferred: `dots` multiplies by a zero for each other channel of a block.
double estimate_dots_depthwise(const Problem&) { return 0; }

std::optional<QuantizedConvolutionPlan> plan_dots_depthwise(const Problem& p) {
  const auto depthwise = std::make_shared<const Depthwise>(depthwise_of(p));
  return QuantizedConvolutionPlan{
      .weights_format =
          text(depthwise->words ? "words" : "bytes", " of depthwise ", depthwise->width),
      .channels_format = dot_channels_format(p),
      .pack = [depthwise](const at::Tensor& weight) { return pack(*depthwise, weight); },
      .channels = [p](const at::Tensor& weight, const at::Tensor& scales,
                      const at::Tensor& bias) { return dot_channels(p, weight, scales, bias); },
      .run = [depthwise](const std::uint8_t* src, const QuantizedWeights& weights,
                         const std::uint8_t*, void* dst) { run(*depthwise, weights, src, dst); },
      .row_stage = p.dst ? std::optional(row_stage(*depthwise)) : std::nullopt,
      .run_rows = [depthwise](const QuantizedWeights& weights) -> RunRows {
        return [depthwise, weights](const BlockedRows& src, const std::uint8_t*,
                                    const BlockedRows& dst,
                                    Range rows) { run_rows(*depthwise, weights, src, dst, rows); };
      }};
}

}  // namespace

constinit const QuantizedConvolution quantized_convolutions::dots_depthwise = {
    .name = "dots_depthwise",
    .refuses = refuses_dots_depthwise,
    .plan = plan_dots_depthwise,
    .estimate = estimate_dots_depthwise,
};

}  // namespace torch_blocked
