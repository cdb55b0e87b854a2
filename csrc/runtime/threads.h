// Sharing work among torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace torch_blocked {

// Elements below which another thread costs more than it saves: ATen's own limit.
inline constexpr std::int64_t kGrainElements = 32768;

// Calls body(begin, end) on parts of [0, units), where a unit has `unit_elements` elements.
template <typename Body>
void parallel_units(std::int64_t units, std::int64_t unit_elements, Body&& body) {
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrainElements / std::max<std::int64_t>(1, unit_elements));
  at::parallel_for(0, units, grain, std::forward<Body>(body));
}

}  // namespace torch_blocked
