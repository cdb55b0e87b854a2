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
  std::int64_t block;  // of src and dst; or kChannelsLast
};

// Runs it on src and dst; null where oneDNN has but its `ref` kernel. By one thread at a time.
std::function<void(const void* src, void* dst)> plan_pooling(const PoolingProblem& problem);

}  // namespace torch_blocked
