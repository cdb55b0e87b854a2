// One op that shows memory of its source, and what a write into its result does to the source.
#pragma once

#include <optional>
#include <vector>

#include "graph/graph.h"

namespace torch_blocked::graph {

struct ViewStep {
  Node node;
  std::size_t argument;       // which one is the source
  std::size_t output;         // which result is the view
  std::vector<Meta> results;  // of the run
};

// Whether the op shows memory at some sizes and strides, and copies it at others.
bool may_copy(const Node& node);

// Whether written_back() holds for these sizes only.
bool depends_on_sizes(const ViewStep& step);

// The step again, on `source`.
Node shown(const ViewStep& step, Value source);

// A node that makes the source as it is after `written` took the view's place in it: ATen's scatter
// ops, or the inverse of a view that shows all elements. Nothing for ops that no rule knows, among
// them those whose result shows an element twice.
std::optional<Node> written_back(const ViewStep& step, Value source, Value written);

}  // namespace torch_blocked::graph
