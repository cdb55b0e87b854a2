// What a value of a graph is. What is to be known of it besides, as the scale and the zero point of
// integers, belongs into Meta: rules for results make one from another, and slots, inputs and what
// plans are found by have one whole.
#pragma once

#include <c10/core/ScalarType.h>

#include "format/activation.h"

namespace torch_blocked::graph {

// Sizes and element type.
struct Meta {
  Dims dims;
  at::ScalarType dtype = at::kFloat;

  bool operator==(const Meta&) const = default;
};

// A value in memory. kStrided is no format to choose, but that of what ATen makes, and of
// constants: who reads raw memory wants kPlain instead, and the planner puts a step in between.
struct SlotPlan : Meta {
  Format format = kPlain;

  bool is_blocked() const { return format.is_blocked(); }
};

}  // namespace torch_blocked::graph
