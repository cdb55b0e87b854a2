// Regions of a graph: pointwise nodes that are computed together.
#pragma once

#include <optional>
#include <vector>

#include "graph/passes/rules.h"

namespace torch_blocked::graph {

// A set of nodes. Every one except the last is read only by later nodes of the set.
struct Region {
  std::vector<const Node*> nodes;  // in order of execution
  std::vector<Value> operands;     // what they read from outside, including constants
};

// Finds regions of nodes with known arithmetic (arithmetic.h). All results have the dims and the
// type of the last one's, float32 or bfloat16; only comparisons inside the region may give bool.
class Regions {
 public:
  // `takes` further limits which nodes may be in a region; null: no limit.
  using Takes = bool (*)(const Rewrite& rewrite, const Node& node);
  Regions(const Rewrite& rewrite, const Uses& uses, Takes takes = nullptr)
      : rewrite_(rewrite), uses_(uses), takes_(takes) {}

  // A region of this node alone; nothing if the node cannot be in one.
  std::optional<Region> begin(const Node& last) const;
  // Adds a node whose result only the region reads; false if there is none.
  bool grow(Region& region) const;

 private:
  bool fits(const Node& node, const Meta& like, bool inside) const;
  bool may_join(const Region& region, const Node& node) const;

  const Rewrite& rewrite_;
  const Uses& uses_;
  Takes takes_;
};

}  // namespace torch_blocked::graph
