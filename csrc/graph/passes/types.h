// The types of values where the user asks for bfloat16.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace torch_blocked::graph {

struct Rewrite;  // rules.h

// What is computed in bfloat16. The nodes are cut into stretches, each of which ends with a node
// that makes one of `cuts`. Stretches are numbered from 0.
struct Narrowing {
  std::set<Value> cuts = {};
  std::set<std::size_t> in_float32 = {};  // stretches that stay in float32
  std::vector<std::string> keep = {};     // modules that do, by their paths, with all inside
};

// Decides for each float32 value whether it becomes bfloat16, and adds conversions. Runs after all
// passes that fuse, so a graph has the same nodes in both types.
void settle_types(Rewrite& rewrite, const Narrowing& narrowing);

// A constant in bfloat16, made once for all plans.
at::Tensor narrowed(Rewrite& rewrite, const at::Tensor& constant);

// nodes/rows/program.cpp: a node that makes `dst`, the numbers of `src` in another type.
Node conversion(const Rewrite& rewrite, Value src, Value dst, const Origin& origin);

}  // namespace torch_blocked::graph
