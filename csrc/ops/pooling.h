// Pooling by oneDNN, float32, in blocked formats and in channels-last.
#pragma once

#include <cstdint>
#include <functional>

#include "ops/blocked.h"

namespace torch_blocked {

enum class Pooling : std::uint8_t { kMax, kAverageOfWindow, kAverageOfInput };

struct PoolingProblem {
  Pooling kind;  // averages divide by the window's size, or by what of it lies in src
  Dims src_dims, dst_dims, kernel, stride, padding, dilation;
  Format format;  // of src and dst: channels-last or blocked
};

// A problem made ready to run, by one thread at a time.
using PoolingPlan = std::function<void(const void* src, void* dst)>;

// Null where no implementation takes the problem: oneDNN's `ref` kernel does not count.
PoolingPlan plan_pooling(const PoolingProblem& problem);

}  // namespace torch_blocked
