// Pointwise ops: ATen's run on physical tensors in any format, as long as all operands have the
// same. Where f(0) is not 0, the tail is cleared afterwards.
#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"
#include "ops/registered.h"

namespace torch_blocked::graph {
namespace {

// Operands may broadcast, but not along N and C.
bool takes(const Candidate& candidate) {
  constexpr std::string_view kAten = "aten::";
  const Node& node = candidate.node;
  const bool is_unary = node.name.starts_with(kAten) &&
                        is_pointwise(std::string_view(node.name).substr(kAten.size()));
  if (!is_unary && !is_any(node, {"aten::add", "aten::sub", "aten::mul"})) return false;
  bool fits = candidate.reads_images();
  if (!fits) return false;
  const Dims& result = candidate.result().dims;
  for_values(node.arguments, [&](Value value) {
    const Dims& dims = candidate.meta(value).dims;
    fits &= dims[0] == result[0] && dims[1] == result[1];
  });
  return fits;
}

at::Tensor contiguous(const at::Tensor& result, const SlotPlan&) { return result.contiguous(); }

Prepared prepare(const Step& step, const Running& running) {
  const Slot dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  if (!slot.is_blocked()) return prepare_call(step, running, {});
  Prepared prepared = prepare_call(step, running, {.result = contiguous});
  const std::int64_t channels = slot.dims[1];
  if (slot.format.tail(channels) == 0) return prepared;  // no tail
  return {[run = std::move(prepared.run), &tensors = running.tensors, dst, channels] {
    run();
    clear_tail_(tensors[dst], channels);
  }};
}

}  // namespace

constinit const NodeKind nodes::pointwise = {
    .name = "pointwise",
    .takes = takes,
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .prepare = prepare,
    .implementation = by_aten,
};

}  // namespace torch_blocked::graph
