// Places a plan's values in memory: one arena, where values that are never alive together may
// overlap, and one tensor for each result.
#pragma once

#include <optional>

#include "graph/planning/plan.h"

namespace torch_blocked::graph {

struct Placement {
  bool is_given = false;  // in memory that exists before the step runs; else the step makes it
  std::int64_t offset = 0, bytes = 0;
  std::size_t last = 0;              // the step after which nobody reads it
  std::optional<Dims> strides = {};  // of a view in the arena whose order is that of no format
};

// A value that the caller gets, in memory that is made for each run. Other values may use that
// memory earlier in the run.
struct Leaving {
  Slot slot;
  std::vector<Slot> others;  // their offsets are in it
};

// Memory in the arena that one or several slots share. Behind its `bytes` are borders (borders.h).
struct ArenaPart {
  std::int64_t offset, bytes, held;
};

struct MemoryPlan {
  std::vector<Placement> slots;
  std::vector<Leaving> leaving;
  std::vector<bool> copies;  // by step: whether a concat, reorder or view has to move anything
  std::int64_t bytes = 0;    // of the arena
  std::vector<ArenaPart> parts;
};

MemoryPlan plan_memory(const Plan& plan);

}  // namespace torch_blocked::graph
