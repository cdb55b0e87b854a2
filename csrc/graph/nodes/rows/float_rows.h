// Rows of float32 or bfloat16 for kernels that take float32: bfloat16 is converted in the cache.
#pragma once

#include "graph/planning/plan.h"
#include "kernels/kernels.h"
#include "runtime/memory/workspace.h"

namespace torch_blocked::graph {

// Contiguous rows of `columns` numbers, read and written. They may be the same memory.
struct FloatRows {
  const void* src;
  void* dst;
  bool src_is_bfloat16, dst_is_bfloat16;
  std::int64_t columns;

  // Calls run(src, dst, count) on [begin, end), some `at_once` rows at a time. There src and dst
  // may be the same.
  template <typename F>
  void for_each(std::int64_t begin, std::int64_t end, std::int64_t at_once, F&& run) const {
    const auto* floats = static_cast<const float*>(src);
    auto* result = static_cast<float*>(dst);
    if (!src_is_bfloat16 && !dst_is_bfloat16) {
      run(floats + begin * columns, result + begin * columns, end - begin);
      return;
    }
    const auto& table = kernels::kernels();
    float* numbers = workspace(at_once * columns);
    for (std::int64_t first = begin; first < end; first += at_once) {
      const std::int64_t count = std::min(at_once, end - first), at = first * columns;
      if (src_is_bfloat16) {
        table.widen_bfloats(static_cast<const std::uint16_t*>(src) + at, numbers, count * columns);
      }
      run(src_is_bfloat16 ? numbers : floats + at, dst_is_bfloat16 ? numbers : result + at, count);
      if (dst_is_bfloat16) {
        table.narrow_floats(numbers, static_cast<std::uint16_t*>(dst) + at, count * columns);
      }
    }
  }
};

}  // namespace torch_blocked::graph
