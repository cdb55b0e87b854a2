// Whether the numbers and arguments of a graph are what the passes take them for.
#pragma once

#include "graph/graph.h"

namespace torch_blocked::graph {

// Sets how many values there are. Raises ValueError unless each value has a number of its own,
// within bounds, and is there before it is read; each node calls an op of this PyTorch with
// arguments that its schema takes, and has results as it declares them; and all sizes are possible.
void check_and_count(Graph& graph);

// Raises ValueError for sizes that no tensor has.
void check_dims(const Dims& dims);

// infer.cpp: where an op does not tell the sizes of its results without data, and the graph says
// what they were, lets the op itself say whether it takes such arguments: raises its error. What it
// returns is compared with the graph's word when it runs.
void check_unknown(const Graph& graph);

}  // namespace torch_blocked::graph
