// Where a plan's values lie: one arena, in which values that are never alive together overlap, and
// one tensor for each result.
#pragma once

#include <optional>

#include "graph/planning/plan.h"

namespace torch_blocked::graph {

struct Placement {
  bool is_given = false;  // in memory that is there before the step runs; else the step makes it
  std::int64_t offset = 0, bytes = 0;
  std::size_t last = 0;              // the step after which nobody reads it
  std::optional<Dims> strides = {};  // of a view in the arena that is in no order of a format
};

// A value that the caller gets, in memory made for each run, where others may lie before it does.
struct Leaving {
  Slot slot;
  std::vector<Slot> others;  // their offsets are in it
};

struct MemoryPlan {
  std::vector<Placement> slots;
  std::vector<Leaving> leaving;
  std::vector<bool> copies;  // by step: whether a concat, reorder or view has to move anything
  std::int64_t bytes = 0;    // of the arena
};

MemoryPlan plan_memory(const Plan& plan);

}  // namespace torch_blocked::graph
