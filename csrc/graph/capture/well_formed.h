// Checks that a graph from a file has the value numbers and arguments that the passes rely on.
#pragma once

#include "graph/graph.h"

namespace torch_blocked::graph {

// Sets how many values there are. Raises ValueError unless
// - each value has a number of its own, within bounds, and is made before it is read;
// - each node calls an op of this PyTorch with arguments and results that fit its schema;
// - all sizes are possible.
void check_and_count(Graph& graph);

// Raises ValueError for sizes that no tensor has.
void check_dims(const Dims& dims);

// infer.cpp: some ops do not tell the sizes of their results without data, and the graph says what
// they were. Runs each of these ops, and raises its error if it does not take such arguments.
// Whether the sizes are those of the graph is checked when the graph runs.
void check_unknown(const Graph& graph);

}  // namespace torch_blocked::graph
