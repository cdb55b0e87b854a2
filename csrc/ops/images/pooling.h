// Pooling, float32, and maxima of bytes and bfloat16, in blocked formats and in channels-last;
// averages by oneDNN where it can.
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
  Pooling kind;  // averages divide by the window's size, or by what of it lies in src
  Dims src_dims, dst_dims, kernel, stride, padding, dilation;
  Format format;  // of src and dst: channels-last or blocked
  at::ScalarType dtype = at::kFloat;
  std::int64_t divisor = 0;  // of averages, if not 0
};

// The windows of a problem, without memory.
kernels::PoolingWindows windows_of(const PoolingProblem& problem);

// A problem made ready to run, by one thread at a time.
struct PoolingPlan {
  std::function<void(const void* src, void* dst)> run;
  bool loops_only = false;  // of run(): threads may go through it together
};

// The name of the implementation that takes the problem; null where none does: oneDNN's `ref`
// kernel does not count.
const char* choose_pooling(const PoolingProblem& problem);
// The plan by that implementation, which takes the problem.
PoolingPlan plan_pooling(const PoolingProblem& problem, const char* implementation);

// The implementations that do not take a problem.
std::vector<Refusal> pooling_refusals(const PoolingProblem& problem);

}  // namespace torch_blocked
