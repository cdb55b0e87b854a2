// Permutations between [N, C, *spatial] and [N, *spatial, C]. With the image in channels-last, both
// have the same memory.
#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

bool permutes(const Candidate& candidate, Dims (*order)(std::size_t rank)) {
  const Value src = candidate.node.read(0);
  const std::size_t rank = src == kNone ? 0 : candidate.meta(src).dims.size();
  return rank >= 3 && rank <= 5 && order_of(candidate.node, rank) == order(rank);
}

// [N, C, L] and [N, L, C] look alike, and so do images and heads of attention [N, tokens, heads,
// lanes]. For values that are no images, a view by ATen is as good. So src counts as an image if a
// node that makes images makes it, or if it is an input with more than three dims.
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
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
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
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kChannelsLast}); },
    .may_be_view = true,
    .views = views_of,
    .prepare = prepare_from_last,
    .implementation = by_aten,
    .why = why,
};

}  // namespace torch_blocked::graph
