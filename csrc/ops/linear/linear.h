// Plans linear layers: src [rows, inputs] times weight [outputs, inputs] transposed, plus bias,
// with an epilogue. All tensors are plain, float32 or bfloat16. bfloat16 takes no residual.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/vector/epilogue.h"
#include "ops/implementations.h"
#include "ops/layer_plan.h"

namespace torch_blocked {

struct LinearProblem {
  std::int64_t rows, inputs, outputs;
  bool has_bias;
  kernels::Epilogue epilogue;  // with a residual, only `after` is used
  at::ScalarType dtype = at::kFloat;
  bool has_bytes = false;  // its weights are signed bytes times a scale for each output

  const kernels::Activation& activation() const {
    return epilogue.residual ? epilogue.after : epilogue.before;
  }
};

using LinearImplementation = Implementation<LinearProblem, LayerPlan>;

// The rows of the list; each is defined in the file of its kernel's name.
namespace linears {
#define IMPLEMENTATION(name) extern const LinearImplementation name;
#include "ops/linear/list.inc"
#undef IMPLEMENTATION
}  // namespace linears

// pixels.cpp: the rows as pixels of an image in channels-last, and the layer as a 1x1 convolution.
ConvolutionProblem pixels_of(const LinearProblem& problem);

// Whether any implementation takes a problem.
bool takes_linear(const LinearProblem& problem);
// The implementations that take a problem, the one that should be fastest first; only the forced
// one if there is one.
std::vector<const char*> linear_implementations_for(const LinearProblem& problem);
// Whether the residual may share dst's memory.
bool linear_sums_in_place(const char* implementation);
// Whether its estimate is low enough that it may be the fastest.
bool linear_may_be_fastest(const LinearProblem& problem, const char* implementation);
// The plan by one of the implementations that take the problem.
LayerPlan plan_linear(const LinearProblem& problem, const char* implementation);

// The implementations that do not take a problem.
std::vector<Refusal> linear_refusals(const LinearProblem& problem);

}  // namespace torch_blocked
