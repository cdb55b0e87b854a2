// src [rows, inputs] times weight [outputs, inputs] transposed, plus bias, with an epilogue:
// float32 or bfloat16, plain. In bfloat16 nothing is added.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/vector/epilogue.h"
#include "ops/implementations.h"
#include "torch_blocked/descriptor.h"

namespace torch_blocked {

struct LinearProblem {
  std::int64_t rows, inputs, outputs;
  bool has_bias;
  kernels::Epilogue epilogue;  // a sum has its activation after it only
  at::ScalarType dtype = at::kFloat;

  const kernels::Activation& activation() const {
    return epilogue.residual ? epilogue.after : epilogue.before;
  }
};

// The data of one run; bias has `outputs` numbers of the problem's dtype, or is null. The residual
// is laid out as dst.
struct LinearBuffers {
  const void *src, *weights, *bias, *residual;
  void* dst;
};

// A problem made ready to run, by one thread at a time.
struct LinearPlan {
  std::string weights_format;  // the name of what pack() makes
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  std::function<void(const LinearBuffers& buffers)> run;
  bool loops_only = false;  // of run(): threads may go through it together
  // What pack() makes of [outputs, inputs]; nothing where no descriptor can say it.
  std::optional<Descriptor> weights_desc = {};
  // By so much it must be faster than others, where all are timed, to be taken.
  double handicap = 1;
};

// For few rows, at the pace at which weights are read.
std::optional<LinearPlan> plan_linear_few_rows(const LinearProblem& problem);
double estimate_linear_few_rows(const LinearProblem& problem);
const char* refuses_linear_few_rows(const LinearProblem& problem);
// By the tiles of direct convolution.
std::optional<LinearPlan> plan_linear_direct(const LinearProblem& problem);
double estimate_linear_direct(const LinearProblem& problem);
const char* refuses_linear_direct(const LinearProblem& problem);
// linear_bfloat16.cpp: bfloat16 by dot products, of few rows at the pace of the memory.
std::optional<LinearPlan> plan_linear_few_bfloats(const LinearProblem& problem);
std::optional<LinearPlan> plan_linear_bfloats(const LinearProblem& problem);
double estimate_linear_few_bfloats(const LinearProblem& problem);
double estimate_linear_bfloats(const LinearProblem& problem);
const char* refuses_linear_few_bfloats(const LinearProblem& problem);
const char* refuses_linear_bfloats(const LinearProblem& problem);
// linear_amx.cpp: by tiles of bfloat16 products.
std::optional<LinearPlan> plan_linear_amx(const LinearProblem& problem);
const char* refuses_linear_amx(const LinearProblem& problem);
double estimate_linear_amx(const LinearProblem& problem);
// linear_strassen.cpp: by seven eighths of the products.
std::optional<LinearPlan> plan_linear_strassen(const LinearProblem& problem);
const char* refuses_linear_strassen(const LinearProblem& problem);
double estimate_linear_strassen(const LinearProblem& problem);

// Whether any implementation takes a problem.
bool takes_linear(const LinearProblem& problem);
// The implementations that take a problem: the one that should be fastest, then the others; only
// one if it is forced.
std::vector<const char*> linear_implementations_for(const LinearProblem& problem);
// Whether the residual may be dst.
bool linear_sums_in_place(const char* implementation);
// Whether its estimate leaves it a chance.
bool linear_may_be_fastest(const LinearProblem& problem, const char* implementation);
// The plan by one of these.
LinearPlan plan_linear(const LinearProblem& problem, const char* implementation);

// The implementations that do not take a problem.
std::vector<Refusal> linear_refusals(const LinearProblem& problem);

}  // namespace torch_blocked
