// Finds regions of pointwise nodes, growing each from its last node.
#include "graph/passes/regions.h"

#include <algorithm>

#include "graph/passes/arithmetic.h"
#include "runtime/isa.h"

namespace torch_blocked::graph {
namespace {

bool has(const auto& all, const auto& one) { return std::ranges::find(all, one) != all.end(); }

void find_operands(Region& region) {
  region.operands.clear();
  for (const Node* node : region.nodes) {
    for_values(node->arguments, [&](Value value) {
      const bool own = std::ranges::any_of(
          region.nodes, [&](const Node* each) { return each->output() == value; });
      if (!own && !has(region.operands, value)) region.operands.push_back(value);
    });
  }
}

}  // namespace

bool Regions::fits(const Node& node, const Meta& like, bool inside) const {
  if (!has_arithmetic(node) || node.outputs.size() != 1) return false;
  const Meta& meta = rewrite_.meta(node.output());
  const bool numbers =
      like.dtype == at::kFloat || (like.dtype == at::kBFloat16 && multiplies_bfloats());
  const bool known =
      meta.dtype == like.dtype || (inside && meta.dtype == at::kBool && is_comparison(node));
  return numbers && known && meta.dims == like.dims && (!takes_ || takes_(rewrite_, node));
}

std::optional<Region> Regions::begin(const Node& last) const {
  if (last.outputs.size() != 1) return std::nullopt;
  if (!fits(last, rewrite_.meta(last.output()), false)) return std::nullopt;
  Region region{{&last}, {}};
  find_operands(region);
  return region;
}

bool Regions::may_join(const Region& region, const Node& node) const {
  if (!fits(node, rewrite_.meta(region.nodes.back()->output()), true)) return false;
  return !uses_.is_output[Uses::at(node.output())] &&
         std::ranges::all_of(uses_.readers[Uses::at(node.output())],
                             [&](const Node* reader) { return has(region.nodes, reader); });
}

bool Regions::grow(Region& region) const {
  for (const Value value : region.operands) {
    const Node* maker = uses_.maker[Uses::at(value)];
    if (!maker || !may_join(region, *maker)) continue;
    region.nodes.insert(std::ranges::upper_bound(region.nodes, maker), maker);
    find_operands(region);
    return true;
  }
  return false;
}

}  // namespace torch_blocked::graph
