// Decides which graphs may be made from a file that a stranger wrote.
#pragma once

#include <set>
#include <string>

#include "graph/graph.h"

namespace torch_blocked::graph {

// Whether an op is on the list of those that any file may name (loadable_ops.inc).
bool is_loadable(const std::string& name, const std::string& overload);

// Raises ValueError unless all ops of the graph are on the list or named in `more`, and their
// arguments name no device except the CPU and no layout except the strided one.
void check_loadable(const Graph& graph, const std::set<std::string>& more);

}  // namespace torch_blocked::graph
