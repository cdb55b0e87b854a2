// View ops, and what a write into a view does to its source.
#pragma once

#include <optional>
#include <vector>

#include "graph/graph.h"

namespace torch_blocked::graph {

struct ViewStep {
  Node node;
  std::size_t argument;       // the index of the source
  std::size_t output;         // the index of the result that is the view
  std::vector<Meta> results;  // of the run
};

// Whether the op returns a view at some sizes and strides, and a copy at others.
bool may_copy(const Node& node);

// Whether written_back() holds for these sizes only.
bool depends_on_sizes(const ViewStep& step);

// The step's view again, of `source`.
Node shown(const ViewStep& step, Value source);

// A node that makes the source with the view replaced by `written`: one of ATen's scatter ops, or
// the inverse of a view that shows all elements. Nothing for ops without a rule, among them those
// whose result shows an element twice.
std::optional<Node> written_back(const ViewStep& step, Value source, Value written);

}  // namespace torch_blocked::graph
