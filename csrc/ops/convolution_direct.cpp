// A direct convolution of ours for what oneDNN's blocked kernels refuse: fewer input channels than
// a block (the first layer), kernels wider and dilations larger than theirs. float32, groups = 1.
//
// Each output row first gathers the input rows under the kernel, padding included, as
// [KD * KH, IW + padding, IC] without the block's unused lanes, so that the kernel has no borders.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <vector>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution.h"
#include "runtime/packed_weights.h"
#include "runtime/threads.h"
#include "runtime/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// A problem seen as 3-D, missing spatial dims of size 1 in front.
struct Direct {
  std::int64_t n, ic, oc, block, groups;        // groups of `width` output channels
  std::int64_t width;                           // direct_channels()
  std::array<std::int64_t, 3> in, out, kernel;  // d, h, w
  std::array<std::int64_t, 3> stride, padding, dilation;
  std::int64_t row_pixels;  // input pixels under one output row, padding included

  std::int64_t taps() const { return kernel[0] * kernel[1]; }
  std::int64_t group_weights() const { return taps() * kernel[2] * ic * width; }
};

Direct direct_of(const Problem& p) {
  const auto spatial = [](const Dims& dims) { return at::IntArrayRef(dims).slice(2); };
  Direct d{.n = p.src_dims[0],
           .ic = p.src_dims[1],
           .oc = p.dst_dims[1],
           .block = p.dst_block,
           .groups = 0,
           .width = kernels::kernels().direct_channels(),
           .in = as_3d(spatial(p.src_dims), 1),
           .out = as_3d(spatial(p.dst_dims), 1),
           .kernel = as_3d(spatial(p.weight_dims), 1),
           .stride = as_3d(p.stride, 1),
           .padding = as_3d(p.padding, 0),
           .dilation = as_3d(p.dilation, 1),
           .row_pixels = 0};
  d.groups = ceil_div(d.oc, d.width);
  d.row_pixels = (d.out[2] - 1) * d.stride[2] + (d.kernel[2] - 1) * d.dilation[2] + 1;
  return d;
}

// weight [OC, IC, *kernel] -> [groups, KD * KH, KW, IC, width], zeros beyond OC.
at::Tensor pack(const Direct& d, const at::Tensor& weight) {
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     2 * static_cast<std::int64_t>(weight.nbytes()));
  at::Tensor padded =
      at::zeros({d.groups * d.width, d.ic, d.taps(), d.kernel[2]}, weight.options());
  padded.narrow(0, 0, d.oc).copy_(weight.reshape({d.oc, d.ic, d.taps(), d.kernel[2]}));
  return padded.view({d.groups, d.width, d.ic, d.taps(), d.kernel[2]})
      .permute({0, 3, 4, 2, 1})
      .contiguous();
}

// One input row's pixels [first, first + count), blocked, to [count, ic].
void gather_row(const Direct& d, const float* row, std::int64_t block_stride, std::int64_t first,
                std::int64_t count, float* to) {
  for (std::int64_t c = 0; c < d.ic; c += d.block) {
    const std::int64_t lanes = std::min(d.block, d.ic - c);
    const float* from = row + c / d.block * block_stride + first * d.block;
    for (std::int64_t pixel = 0; pixel < count; ++pixel) {
      std::copy_n(from + pixel * d.block, lanes, to + pixel * d.ic + c);
    }
  }
}

// The input under output row (image, od, oh) -> rows [taps, row_pixels, ic].
void gather(const Direct& d, const float* src, std::int64_t image, std::int64_t od, std::int64_t oh,
            float* rows) {
  const std::int64_t block_stride = d.in[0] * d.in[1] * d.in[2] * d.block;
  const float* first_block = src + image * ceil_div(d.ic, d.block) * block_stride;
  // Along w: zeros, then the pixels the row has, then zeros.
  const std::int64_t left = std::min(d.padding[2], d.row_pixels);
  const std::int64_t count = std::clamp<std::int64_t>(d.row_pixels - left, 0, d.in[2]);
  for (std::int64_t kd = 0; kd < d.kernel[0]; ++kd) {
    for (std::int64_t kh = 0; kh < d.kernel[1]; ++kh, rows += d.row_pixels * d.ic) {
      const std::int64_t id = od * d.stride[0] - d.padding[0] + kd * d.dilation[0];
      const std::int64_t ih = oh * d.stride[1] - d.padding[1] + kh * d.dilation[1];
      float* end = rows + d.row_pixels * d.ic;
      if (id < 0 || id >= d.in[0] || ih < 0 || ih >= d.in[1]) {
        std::fill(rows, end, 0.f);
        continue;
      }
      const float* row = first_block + (id * d.in[1] + ih) * d.in[2] * d.block;
      std::fill(rows, rows + left * d.ic, 0.f);
      gather_row(d, row, block_stride, 0, count, rows + left * d.ic);
      std::fill(rows + (left + count) * d.ic, end, 0.f);
    }
  }
}

void run_rows(const Direct& d, const float* src, const float* weights, const float* bias,
              float* dst, std::int64_t begin, std::int64_t end) {
  std::vector<float> rows(static_cast<std::size_t>(d.taps() * d.row_pixels * d.ic));
  const std::int64_t dst_block_stride = d.out[0] * d.out[1] * d.out[2] * d.block;
  const std::int64_t blocks = ceil_div(d.oc, d.block), dst_rows = d.out[0] * d.out[1];
  const auto kernel = kernels::kernels().direct_row;
  for (std::int64_t at = begin; at < end; ++at) {
    const std::int64_t image = at / dst_rows, row = at % dst_rows;
    gather(d, src, image, row / d.out[1], row % d.out[1], rows.data());
    for (std::int64_t group = 0; group < d.groups; ++group) {
      const std::int64_t first_block = group * d.width / d.block;
      kernel({.rows = rows.data(),
              .weights = weights + group * d.group_weights(),
              .bias = bias + group * d.width,
              .dst = dst + (image * blocks + first_block) * dst_block_stride +
                     row * d.out[2] * d.block,
              .taps = d.taps(),
              .kw = d.kernel[2],
              .ic = d.ic,
              .row_pixels = d.row_pixels,
              .stride = d.stride[2],
              .dilation = d.dilation[2],
              .pixels = d.out[2],
              .block = d.block,
              .channels = std::min(d.width, (blocks - first_block) * d.block),
              .dst_block_stride = dst_block_stride});
    }
  }
}

}  // namespace

std::optional<ConvolutionPlan> plan_direct(const Problem& p) {
  if (p.dtype != at::kFloat || p.groups != 1 || p.transposed || !p.blocked()) return std::nullopt;
  const Direct d = direct_of(p);
  // A group is whole blocks, or a block whole vectors of the group.
  if (d.width % p.dst_block != 0 || !p.epilogue.empty()) return std::nullopt;
  const auto run = [d](const ConvolutionBuffers& buffers) {
    std::vector<float> bias(static_cast<std::size_t>(d.groups * d.width));
    if (buffers.bias) std::copy_n(static_cast<const float*>(buffers.bias), d.oc, bias.begin());
    // Work is output rows of all images.
    const std::int64_t row_work = d.out[2] * d.groups * d.group_weights();
    parallel_units(d.n * d.out[0] * d.out[1], row_work, [&](std::int64_t begin, std::int64_t end) {
      run_rows(d, static_cast<const float*>(buffers.src),
               static_cast<const float*>(buffers.weights), bias.data(),
               static_cast<float*>(buffers.dst), begin, end);
    });
  };
  return ConvolutionPlan{.weights_format = text("direct", d.width),
                         .pack = [d](const at::Tensor& weight) { return pack(d, weight); },
                         .run = run};
}

}  // namespace torch_blocked
