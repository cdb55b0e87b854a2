// What the graph knows of a value. A new property, such as the scale and zero point of integers,
// belongs into Meta: rules make the Meta of a result from those of its arguments, and slots, inputs
// and the keys of plans contain a whole Meta.
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

// A value in memory. kStrided is never chosen: only constants and results of ATen have it. A step
// that reads raw memory asks for kPlain, and the planner inserts a step that copies.
struct SlotPlan : Meta {
  Format format = kPlain;

  bool is_blocked() const { return format.is_blocked(); }
};

}  // namespace torch_blocked::graph
