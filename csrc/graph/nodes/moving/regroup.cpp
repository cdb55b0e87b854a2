// Reshapes that change only the spatial dims, over the same pixels. In any format the result is a
// view.
#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

bool takes(const Candidate& candidate) {
  if (!is_reshape(candidate.node)) return false;
  const Dims &from = candidate.meta(candidate.node.read(0)).dims, &to = candidate.result().dims;
  return from.size() >= 3 && from.size() <= 5 && to[0] == from[0] && to[1] == from[1];
}

bool is_same_memory(const Step&, const SlotPlan& src, const SlotPlan& dst) {
  return src.format == dst.format;
}

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.begin()->second, dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  if (!slot.is_blocked()) return prepare_call(step, running, {});
  return {[&tensors = running.tensors, src, dst, shape = slot.format.physical_shape(slot.dims)] {
    tensors[dst] = tensors[src].view(shape);
  }};
}

}  // namespace

constinit const NodeKind nodes::regroup = {
    .name = "regroup",
    .takes = takes,
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .may_be_view = true,
    .is_same_memory = is_same_memory,
    .prepare = prepare,
    .implementation = by_aten_unless_blocked,
};

}  // namespace torch_blocked::graph
