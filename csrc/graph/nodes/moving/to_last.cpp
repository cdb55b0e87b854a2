// Permutations between [N, C, *spatial] in channels-last and [N, *spatial, C]: the same memory.
#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

bool permutes(const Candidate& candidate, Dims (*order)(std::size_t rank)) {
  const Value src = candidate.node.read(0);
  const std::size_t rank = src == kNone ? 0 : candidate.meta(src).dims.size();
  return rank >= 3 && rank <= 5 && order_of(candidate.node, rank) == order(rank);
}

// [N, C, L] and [N, L, C] look alike, as do images and heads of attention [N, tokens, heads,
// lanes], of which a view by ATen is as good: src counts if it comes from a node that makes images,
// or, with more dims than three, from outside.
bool takes_to_last(const Candidate& candidate) {
  if (!permutes(candidate, order_to_last)) return false;
  const Value src = candidate.node.read(0);
  const bool is_input = !candidate.uses.maker[Uses::at(src)];
  return candidate.is_from_image(src) || (is_input && candidate.result().dims.size() > 3);
}

bool takes_from_last(const Candidate& candidate) { return permutes(candidate, order_from_last); }

Prepared prepare_to_last(const Step& step, const Running& running) {
  return prepare_call(step, running,
                      {.result = [](const at::Tensor& result, const SlotPlan&) { return result; }});
}

Prepared prepare_from_last(const Step& step, const Running& running) {
  return prepare_call(step, running, {});
}

std::string why(const Step&) { return "channels-last with other dims"; }

}  // namespace

constinit const NodeKind nodes::to_last = {
    .name = "to_last",
    .takes = takes_to_last,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kChannelsLast, kPlain}); },
    .may_be_view = true,
    .views = views_of,
    .prepare = prepare_to_last,
    .implementation = by_aten,
    .why = why,
};

constinit const NodeKind nodes::from_last = {
    .name = "from_last",
    .takes = takes_from_last,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kChannelsLast}); },
    .may_be_view = true,
    .views = views_of,
    .prepare = prepare_from_last,
    .implementation = by_aten,
    .why = why,
};

}  // namespace torch_blocked::graph
