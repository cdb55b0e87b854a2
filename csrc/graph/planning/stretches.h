// Decides by measured times which stretches of a graph compute in bfloat16.
#pragma once

#include "graph/passes/types.h"
#include "graph/planning/plan.h"

namespace torch_blocked::graph {

// A plan, and the microseconds that each of its steps took.
struct TimedPlan {
  const Plan& plan;
  std::vector<double> microseconds;
};

// A stretch of a graph in microseconds: in bfloat16, in float32, and of a conversion before it.
struct Stretch {
  double narrow, wide, change;
};

// The stretches that are in float32 where all together take the least time.
std::set<std::size_t> faster_in_float32(const std::vector<Stretch>& stretches);

// The stretches of one graph that should stay in float32, where these plans of it have been timed.
// `values`: how many values the graph had before passes, which may add others.
Narrowing faster_types(const TimedPlan& in_bfloat16, const TimedPlan& in_float32, Value values);

}  // namespace torch_blocked::graph
