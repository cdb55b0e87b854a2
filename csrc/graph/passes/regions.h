// Regions of a graph: pointwise nodes that are computed together.
#pragma once

#include <optional>
#include <vector>

#include "graph/passes/rules.h"

namespace torch_blocked::graph {

// Nodes of which each but the last is read by later ones of them only.
struct Region {
  std::vector<const Node*> nodes;  // in order of execution
  std::vector<Value> operands;     // what they read from outside, constants too
};

// Finds regions of nodes with known arithmetic (arithmetic.h), whose results all have the dims of
// the last one's and its type, float32 or bfloat16; results of comparisons, inside of it, are bool.
class Regions {
 public:
  // `takes` says which more of these may be in a region; null: all.
  using Takes = bool (*)(const Rewrite& rewrite, const Node& node);
  Regions(const Rewrite& rewrite, const Uses& uses, Takes takes = nullptr)
      : rewrite_(rewrite), uses_(uses), takes_(takes) {}

  // The region of a node alone; nothing if it is no such node.
  std::optional<Region> begin(const Node& last) const;
  // Adds a node of whose result only the region has use; false if there is none.
  bool grow(Region& region) const;

 private:
  bool fits(const Node& node, const Meta& like, bool inside) const;
  bool may_join(const Region& region, const Node& node) const;

  const Rewrite& rewrite_;
  const Uses& uses_;
  Takes takes_;
};

}  // namespace torch_blocked::graph
