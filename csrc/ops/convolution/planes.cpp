// Runs 1x1 convolutions of plain src and dst. It is for few channels (mixed attention heads), where
// blocks would be mostly padding, and for layers whose neighbours are plain.
#include "kernels/direct/planes.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "ops/convolution/convolution.h"
#include "ops/convolution_time.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// The pixels of a unit, in whole cache lines.
constexpr std::int64_t kPixels = 256;

const char* refuses_planes(const Problem& p) {
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (p.src_format != kPlain || p.dst_format != kPlain) return "reads and writes planes";
  if (p.groups != 1) return "takes one group only";
  if (p.transposed) return "is for convolutions that are not transposed";
  const Dims taps(p.weight_dims.begin() + 2, p.weight_dims.end());
  const bool alone = are_all(taps, 1) && are_all(p.stride, 1) && are_all(p.padding, 0);
  return alone && p.src_dims[0] == p.dst_dims[0] && p.src_dims.size() == p.dst_dims.size() &&
                 std::equal(p.src_dims.begin() + 2, p.src_dims.end(), p.dst_dims.begin() + 2)
             ? nullptr
             : "is for 1x1 at stride 1 without padding";
}

// The products, plus reading each src plane and writing each dst plane once.
double estimate_planes(const Problem& p) {
  return direct_microseconds(p) +
         (moving_microseconds(p.src_dims, p.dtype) + moving_microseconds(p.dst_dims, p.dtype)) / 2;
}

std::optional<LayerPlan> plan_planes(const Problem& p) {
  const std::int64_t images = p.src_dims[0], ic = p.src_dims[1], oc = p.dst_dims[1];
  const std::int64_t pixels = c10::multiply_integers(at::IntArrayRef(p.dst_dims).slice(2));
  LayerPlan plan{.weights_format = "dense",
                 .pack = [](const at::Tensor& weight) { return weight.contiguous(); },
                 .run = {},
                 .loops_only = true};
  plan.run = [images, ic, oc, pixels, epilogue = p.epilogue](const LayerBuffers& b) {
    const auto float_of = [](const void* data) { return static_cast<const float*>(data); };
    const std::int64_t parts = ceil_div(pixels, kPixels);
    parallel_units(images * parts, kPixels * oc * ic / 8,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       const std::int64_t image = i / parts, first = i % parts * kPixels;
                       const std::int64_t at = image * oc * pixels;
                       kernels::kernels().mix_planes(
                           {.src = float_of(b.src) + image * ic * pixels,
                            .weights = float_of(b.weights),
                            .bias = float_of(b.bias),
                            .residual = b.residual ? float_of(b.residual) + at : nullptr,
                            .dst = static_cast<float*>(b.dst) + at,
                            .ic = ic,
                            .oc = oc,
                            .pixels = pixels,
                            .epilogue = epilogue},
                           first, std::min(first + kPixels, pixels));
                     }
                   });
  };
  return plan;
}

}  // namespace

constinit const ConvolutionImplementation convolutions::planes = {
    .name = "planes",
    .refuses = refuses_planes,
    .plan = plan_planes,
    .estimate = estimate_planes,
    .traits = {.sums_in_place = true},
};

}  // namespace torch_blocked
