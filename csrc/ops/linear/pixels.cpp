// Runs linear layers by implementations of convolution: rows are the pixels of an image in
// channels-last.
#include <algorithm>

#include "kernels/kernels.h"
#include "ops/convolution/convolution.h"
#include "ops/linear/linear.h"
#include "ops/products/amx.h"
#include "ops/products/strassen.h"

namespace torch_blocked {

ConvolutionProblem pixels_of(const LinearProblem& p) {
  return {.src_dims = {1, p.inputs, p.rows},
          .dst_dims = {1, p.outputs, p.rows},
          .weight_dims = {p.outputs, p.inputs, 1},
          .stride = {1},
          .padding = {0},
          .dilation = {1},
          .output_padding = {0},
          .groups = 1,
          .src_format = kChannelsLast,
          .dst_format = kChannelsLast,
          .transposed = false,
          .has_bias = p.has_bias,
          .dtype = p.dtype,
          .epilogue = p.epilogue};
}

namespace {

template <const ConvolutionImplementation& row>
const char* refuses_pixels(const LinearProblem& p) {
  if (p.rows == 0 || p.inputs == 0) return "takes no empty tensors";
  return row.refuses(pixels_of(p));
}

template <const ConvolutionImplementation& row>
std::optional<LayerPlan> plan_pixels(const LinearProblem& p) {
  auto plan = row.plan(pixels_of(p));
  if (!plan) return std::nullopt;
  plan->weights_format = "linear, " + plan->weights_format;
  plan->pack = [pack = std::move(plan->pack)](const at::Tensor& weight) {
    return pack(weight.unsqueeze(-1));
  };
  return plan;
}

// Linear layers do not have the handicap of convolutions.
std::optional<LayerPlan> plan_amx(const LinearProblem& p) {
  auto plan = plan_pixels<convolutions::amx>(p);
  plan->handicap = 1;
  return plan;
}

double estimate_amx(const LinearProblem& p) {
  return convolutions::amx.estimate(pixels_of(p)) / kAmxHandicap;
}

const char* refuses_strassen(const LinearProblem& p) {
  const std::int64_t width = kernels::kernels().width;
  if (p.dtype == at::kFloat && (p.inputs % width != 0 || p.outputs % width != 0)) {
    return "takes whole vectors of inputs and outputs";
  }
  return refuses_pixels<convolutions::strassen>(p);
}

double estimate_strassen(const LinearProblem& p) {
  return linears::direct.estimate(p) *
         Strassen::share(kernels::kernels().width, p.inputs, p.outputs);
}

}  // namespace

constinit const LinearImplementation linears::amx = {
    .name = "amx",
    .refuses = refuses_pixels<convolutions::amx>,
    .plan = plan_amx,
    .estimate = estimate_amx,
    .traits = {.sums_in_place = true},
};

constinit const LinearImplementation linears::strassen = {
    .name = "strassen",
    .refuses = refuses_strassen,
    .plan = plan_pixels<convolutions::strassen>,
    .estimate = estimate_strassen,
    .traits = {.sums_in_place = true, .only_measured = true},
};

}  // namespace torch_blocked
