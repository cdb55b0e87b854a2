// Nodes as poolings, for kinds other than pooling.
#pragma once

#include "graph/passes/rules.h"
#include "ops/images/pooling.h"

namespace torch_blocked::graph {

// Whether a node is an average over windows, or an adaptive one.
bool is_average(const Node& node);

// A node as a pooling in this format; nothing if our kernels do not take it.
std::optional<PoolingProblem> pooling_problem(const Node& node, const std::vector<Meta>& metas,
                                              Format format);

}  // namespace torch_blocked::graph
