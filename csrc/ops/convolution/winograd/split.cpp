// Winograd convolution at stride 2 over the few channels of a picture, for kernels of 6 to 8 taps.
// The even and odd rows and columns become channels.
//
// A 7x7 kernel at stride 2 over 3 channels becomes a 4x4 at stride 1 over 12, for which F(3x3, 4x4)
// takes a third of the products. It interpolates at the points of F(4x4, 3x3) and shares its code.
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution/winograd/winograd.h"
#include "ops/convolution_time.h"
#include "runtime/isa.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/packed_weights.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// At stride 2 even and odd rows and columns meet different taps. `shift` zero taps in front make
// the padding even. Then tap 2 a + phase of a kernel is tap a of the phase's kernel:
//   src [IC, H, W]          -> [4 IC, H / 2, W / 2], channel (row phase, column phase, ic)
//   weight [OC, IC, KH, KW] -> [OC, 4 IC, 4, 4]
struct Phases {
  static constexpr std::int64_t kTaps = 4;
  std::int64_t padding, shift;
};

Phases phases_of(std::int64_t padding) {
  const std::int64_t half = ceil_div(padding, 2);
  return {half, 2 * half - padding};
}

// The problem at stride 1 in which the phases are channels.
Problem split(const Problem& p) {
  Problem q = p;
  q.src_dims = {p.src_dims[0], 4 * p.src_dims[1], ceil_div(p.src_dims[2], 2),
                ceil_div(p.src_dims[3], 2)};
  q.weight_dims = {p.weight_dims[0], q.src_dims[1], Phases::kTaps, Phases::kTaps};
  q.stride = {1, 1};
  q.padding = {phases_of(p.padding[0]).padding, phases_of(p.padding[1]).padding};
  q.src_format = p.dst_format;
  return q;
}

at::Tensor split_weight(const Problem& p, const at::Tensor& weight) {
  at::Tensor padded = at::zeros({weight.size(0), weight.size(1), 8, 8}, weight.options());
  padded.narrow(2, phases_of(p.padding[0]).shift, weight.size(2))
      .narrow(3, phases_of(p.padding[1]).shift, weight.size(3))
      .copy_(weight);
  return padded.view({weight.size(0), weight.size(1), 4, 2, 4, 2})
      .permute({0, 3, 5, 1, 2, 4})
      .reshape({weight.size(0), -1, 4, 4});
}

void split_src(const Problem& p, const Problem& q, const float* src, float* dst) {
  const std::int64_t ic = p.src_dims[1], h = p.src_dims[2], w = p.src_dims[3];
  const std::int64_t block = q.src_format.block, rows = q.src_dims[2], columns = q.src_dims[3];
  const bool plain = p.src_format == kPlain;
  const std::int64_t pixel = p.src_format.lanes(ic);
  const std::int64_t channel = plain ? h * w : 1, image = (plain ? ic : pixel) * h * w;
  const std::int64_t blocks = ceil_div(4 * ic, block);
  parallel_units(p.src_dims[0] * rows, 4 * ic * columns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t n = i / rows, row = i % rows;
      const auto row_of = [&](std::int64_t b) {
        return dst + ((n * blocks + b) * rows + row) * columns * block;
      };
      for (std::int64_t b = 0; b < blocks; ++b) std::fill_n(row_of(b), columns * block, 0.f);
      for (std::int64_t lane = 0; lane < 4 * ic; ++lane) {
        const std::int64_t row_phase = lane / (2 * ic), phase = lane / ic % 2;
        if (2 * row + row_phase >= h) break;
        const float* from =
            src + n * image + lane % ic * channel + ((2 * row + row_phase) * w + phase) * pixel;
        float* to = row_of(lane / block) + lane % block;
        const std::int64_t count = (w - phase + 1) / 2;
        for (std::int64_t x = 0; x < count; ++x) to[x * block] = from[2 * x * pixel];
      }
    }
  });
}

const char* refuses_winograd3(const Problem& p) {
  if (!fewer_products_allowed()) return kFewerProductsRefused;
  if (!kernels::kernels().winograd3) return "needs AVX2";
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (p.groups != 1) return "takes one group only";
  if (p.transposed || p.spatial() != 2) return "is for images, not transposed";
  if (p.src_dims[1] > 4) return "is for at most 4 input channels";
  if (!p.dst_format.is_blocked()) return "writes blocked formats only";
  if (p.dst_format.block % 8 != 0) return "takes blocks of whole vectors only";
  const auto fits = [&](std::size_t i) {
    const std::int64_t taps = phases_of(p.padding[i]).shift + p.weight_dims[2 + i];
    return p.stride[i] == 2 && p.dilation[i] == 1 && ceil_div(taps, 2) == Phases::kTaps;
  };
  return fits(0) && fits(1) ? nullptr : "is for kernels of 6 to 8 at stride 2";
}

// At most a third of the products, plus the transforms.
double estimate_winograd3(const Problem& p) { return direct_microseconds(p) / 2; }

std::optional<LayerPlan> plan_winograd3(const Problem& p) {
  const Problem q = split(p);
  LayerPlan inner = plan_winograd(q, *kernels::kernels().winograd3);
  const bool calls_on_stored = inner.calls_on_stored;
  return LayerPlan{.weights_format = text(inner.weights_format, "/split/", p.padding),
                   .pack = [p, pack = std::move(inner.pack)](
                               const at::Tensor& weight) { return pack(split_weight(p, weight)); },
                   .packed_bytes = inner.packed_bytes,
                   .run =
                       [p, q, run = std::move(inner.run)](const LayerBuffers& buffers) {
                         const at::Tensor src =
                             empty_pooled(q.src_format.physical_shape(q.src_dims), at::kFloat);
                         float* split = src.mutable_data_ptr<float>();
                         split_src(p, q, static_cast<const float*>(buffers.src), split);
                         LayerBuffers of_split = buffers;
                         of_split.src = split;
                         run(of_split);
                       },
                   .calls_on_stored = calls_on_stored};
}

}  // namespace

constinit const ConvolutionImplementation convolutions::winograd3 = {
    .name = "winograd3",
    .refuses = refuses_winograd3,
    .plan = plan_winograd3,
    .estimate = estimate_winograd3,
    .traits = {.sums_in_place = true},
};

}  // namespace torch_blocked
