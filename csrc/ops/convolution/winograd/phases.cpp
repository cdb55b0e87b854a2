// Winograd convolution of transposed problems with strides. The outputs whose indices have the same
// remainders by the strides form an ordinary convolution at stride 1 with some of the taps. A 4x4
// kernel at stride 2 splits into four of 2x2 taps. F(4, 2) runs each with 25 products for 4x4
// outputs instead of 64.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution/winograd/winograd.h"
#include "ops/convolution_time.h"
#include "ops/products/transposed_phases.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;
using kernels::Winograd;
using kernels::WinogradShape;

std::int64_t most_taps(const ConvolutionPhases& phases) {
  std::int64_t most = 1;
  for (const ConvolutionPhase& phase : phases.phases()) {
    most = std::max(most, *std::ranges::max_element(phase.sizes.kernel));
  }
  return most;
}

// The kernel with `taps` taps along each dim; null if there is none.
const Winograd* kernel_of(const Problem& p, std::int64_t taps) {
  const kernels::Kernels& table = kernels::kernels();
  const bool is_line = p.spatial() == 1;
  switch (taps) {
    case 2:
      return is_line ? table.winograd4_2taps_1d : table.winograd4_2taps;
    case 3:
      return is_line ? table.winograd4_1d : table.winograd4;
    case 4:
      return is_line ? table.winograd3_1d : table.winograd3;
    default:
      return nullptr;
  }
}

// A phase as a problem of `taps` taps along each dim. Some taps may be 0.
Problem problem_of(const Problem& p, const ConvolutionPhase& phase, std::int64_t taps) {
  Problem q = p;
  q.transposed = false;
  q.weight_dims = {p.dst_dims[1], p.src_dims[1]};
  const std::size_t first = 3 - p.spatial();
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    q.dst_dims[2 + i] = phase.sizes.out[first + i];
    q.padding[i] = phase.sizes.padding[first + i];
    q.weight_dims.push_back(taps);
    q.stride[i] = q.dilation[i] = 1;
    q.output_padding[i] = 0;
  }
  return q;
}

// The state of a phase that does not change from run to run.
struct Part {
  WinogradShape shape;
  std::int64_t tiles, dst, u;  // dst, u: where it begins in them
};

std::vector<Part> parts_of(const Problem& p, const ConvolutionPhases& phases,
                           const Winograd& kernel, std::int64_t taps) {
  const std::int64_t block = p.dst_format.block;
  std::vector<Part> parts;
  std::int64_t u = 0;
  for (const ConvolutionPhase& phase : phases.phases()) {
    const Problem q = problem_of(p, phase, taps);
    const auto& [dims, first, step] = phase.grid;
    WinogradShape shape = winograd_shape(q, kernel.taps);
    shape.stream = false;  // its pixels are not whole cache lines
    shape.out_block = c10::multiply_integers(dims) * block;
    shape.out_steps = {step[0] * dims[1] * dims[2] * block, step[1] * dims[2] * block,
                       step[2] * block};
    const std::int64_t dst = ((first[0] * dims[1] + first[1]) * dims[2] + first[2]) * block;
    parts.push_back({shape, winograd_tiles(q, kernel.tile), dst, u});
    u += winograd_u_size(kernel, shape);
  }
  return parts;
}

at::Tensor pack(const Problem& p, const ConvolutionPhases& phases, const Winograd& kernel,
                std::int64_t taps, const at::Tensor& weight) {
  const std::vector<at::Tensor> weights = phases.weights(weight);
  std::vector<at::Tensor> packed;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Problem q = problem_of(p, phases.phases()[i], taps);
    const at::Tensor whole = at::zeros(q.weight_dims, weight.options());
    at::Tensor inside = whole, own = weights[i];
    while (own.dim() > inside.dim()) own = own.squeeze(2);
    for (std::int64_t dim = 2; dim < inside.dim(); ++dim) {
      inside = inside.narrow(dim, 0, own.size(dim));
    }
    inside.copy_(own);
    packed.push_back(pack_winograd(kernel, q, whole));
  }
  return at::cat(packed);
}

void run(const Winograd& kernel, const std::vector<Part>& parts, const Epilogue& epilogue,
         const LayerBuffers& buffers) {
  for (const Part& part : parts) {
    const auto* residual = static_cast<const float*>(buffers.residual);
    run_winograd(kernel, part.shape, part.tiles, buffers.src,
                 static_cast<const float*>(buffers.weights) + part.u,
                 {.bias = static_cast<const float*>(buffers.bias),
                  .residual = residual ? residual + part.dst : nullptr,
                  .dst = static_cast<float*>(buffers.dst) + part.dst,
                  .epilogue = epilogue});
  }
}

const char* refuses_winograd_phases(const Problem& p) {
  if (!fewer_products_allowed()) return kFewerProductsRefused;
  if (!kernels::kernels().winograd4_2taps) return "needs AVX2";
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (p.groups != 1) return "takes one group only";
  if (!p.transposed || are_all(p.stride, 1)) return "is for transposed kernels with strides";
  if (p.spatial() > 2) return "is for images and signals";
  if (!p.blocked()) return "reads and writes one blocked format only";
  if (p.dst_format.block % 8 != 0) return "takes blocks of whole vectors only";
  for (std::size_t i = 0; i < p.spatial(); ++i) {  // no more phases than taps
    if (p.weight_dims[2 + i] < p.stride[i]) return "takes no kernels smaller than their stride";
  }
  const ConvolutionPhases phases(p);
  if (!kernel_of(p, most_taps(phases))) return "takes 2 to 4 taps for each output and dim";
  const auto fits = [](const ConvolutionPhase& phase) {
    return phase.has_taps && std::ranges::min(phase.sizes.padding) >= 0 &&
           std::ranges::max(phase.sizes.dilation) == 1 && std::ranges::min(phase.sizes.out) > 0;
  };
  return std::ranges::all_of(phases.phases(), fits) ? nullptr
                                                    : "takes no phases that begin inside src";
}

double estimate_winograd_phases(const Problem& p) {
  const ConvolutionPhases phases(p);
  const std::int64_t taps = most_taps(phases);
  double all = 0;
  for (const ConvolutionPhase& phase : phases.phases()) {
    all += winograd_microseconds(problem_of(p, phase, taps), *kernel_of(p, taps));
  }
  return all;
}

std::optional<LayerPlan> plan_winograd_phases(const Problem& p) {
  const auto phases = std::make_shared<const ConvolutionPhases>(p);
  const std::int64_t taps = most_taps(*phases);
  const Winograd& kernel = *kernel_of(p, taps);
  return LayerPlan{
      .weights_format = text("winograd", kernel.tile[2], "/", kernel.channels, "/",
                             p.dst_format.block, phases->name(), p.weight_dims),
      .pack = [p, phases, &kernel,
               taps](const at::Tensor& weight) { return pack(p, *phases, kernel, taps, weight); },
      .run = [parts = parts_of(p, *phases, kernel, taps), epilogue = p.epilogue,
              &kernel](const LayerBuffers& b) { run(kernel, parts, epilogue, b); },
      .loops_only = true};
}

}  // namespace

constinit const ConvolutionImplementation convolutions::winograd_phases = {
    .name = "winograd_phases",
    .refuses = refuses_winograd_phases,
    .plan = plan_winograd_phases,
    .estimate = estimate_winograd_phases,
    .traits = {.sums_in_place = true},
};

}  // namespace torch_blocked
