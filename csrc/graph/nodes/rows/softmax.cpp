// Softmax over the last dim: classes of tokens, and scores outside of attention nodes.
#include "kernels/rows/softmax.h"

#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"
#include "graph/planning/plan.h"
#include "graph/running/run.h"
#include "kernels/kernels.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

struct Softmax {};

void find(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    if (node.held.has_value() || !is_softmax_of_rows(rewrite, node)) continue;
    const Meta& meta = rewrite.meta(node.output());
    if (meta.dtype != at::kFloat || rewrite.graph.constants.contains(node.read(0))) continue;
    node.become(nodes::softmax, {{ValueRef{node.read(0)}}}, Softmax{});
  }
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {metas[Uses::at(node.read(0))]};
}

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const Dims& dims = running.plan.slots[dst].dims;
  const std::int64_t columns = dims.back(), rows = c10::multiply_integers(dims) / columns;
  const auto run = [&tensors = running.tensors, src, dst, columns, rows] {
    const kernels::SoftmaxRows all{.src = tensors[src].const_data_ptr<float>(),
                                   .dst = tensors[dst].mutable_data_ptr<float>(),
                                   .columns = columns};
    parallel_units(rows, columns, [&](std::int64_t begin, std::int64_t end) {
      kernels::kernels().softmax_rows(all, begin, end);
    });
  };
  return {run, true};
}

}  // namespace

bool is_softmax_of_rows(const Rewrite& rewrite, const Node& node) {
  if (!is_any(node, {"aten::softmax", "aten::_softmax"}) || node.overload == "Dimname" ||
      node.read(0) == kNone || !node.arguments[1].is_constant()) {
    return false;
  }
  const Meta& meta = rewrite.meta(node.output());
  const std::int64_t dim = node.arguments[1].constant().toInt();
  return !meta.dims.empty() && (dim == -1 || dim + 1 == std::ssize(meta.dims)) &&
         meta == rewrite.meta(node.read(0));
}

constinit const NodeKind nodes::softmax = {
    .name = "softmax",
    .find = find,
    .results = results,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
