// Plans pooling in blocked formats and channels-last: averages and maxima of float32, maxima of
// bytes and bfloat16. oneDNN computes averages where it can.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/images/pooling.h"
#include "ops/blocked.h"
#include "ops/implementations.h"

namespace torch_blocked {

enum class Pooling : std::uint8_t { kMax, kAverageOfWindow, kAverageOfInput };

struct PoolingProblem {
  Pooling kind;  // averages divide by the window's size, or by its part in src
  Dims src_dims, dst_dims, kernel, stride, padding, dilation;
  Format format;  // of src and dst: channels-last or blocked
  at::ScalarType dtype = at::kFloat;
  std::int64_t divisor = 0;  // of averages; 0: none
};

// The windows of a problem, without memory.
kernels::PoolingWindows windows_of(const PoolingProblem& problem);

// A problem made ready to run, by one thread at a time.
struct PoolingPlan {
  std::function<void(const void* src, void* dst)> run;
  bool loops_only = false;  // whether threads may go through run() together
};

// The name of the implementation that takes the problem; null if none does. oneDNN's `ref` kernel
// does not count.
const char* choose_pooling(const PoolingProblem& problem);
// The plan by an implementation that takes the problem.
PoolingPlan plan_pooling(const PoolingProblem& problem, const char* implementation);

// The implementations that do not take a problem.
std::vector<Refusal> pooling_refusals(const PoolingProblem& problem);

}  // namespace torch_blocked
