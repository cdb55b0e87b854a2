// Where a plan's values lie: one arena, in which values that are never alive together overlap.
#pragma once

#include <optional>

#include "graph/plan.h"

namespace torch_blocked::graph {

struct Placement {
  bool in_arena = false;
  std::int64_t offset = 0, bytes = 0;
  std::size_t last = 0;              // the step after which nobody reads it
  std::optional<Dims> strides = {};  // of a view in the arena that is in no order of a format
};

struct MemoryPlan {
  std::vector<Placement> slots;
  std::vector<bool> copies;  // by step: whether a concat, reorder or view has to move anything
  std::int64_t bytes = 0;    // of the arena
};

MemoryPlan plan_memory(const Plan& plan);

}  // namespace torch_blocked::graph
