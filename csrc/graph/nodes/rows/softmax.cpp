// Softmax over the last dim: classes of tokens, and scores outside of attention nodes.
#include "kernels/rows/softmax.h"

#include "graph/nodes/boxed.h"
#include "graph/nodes/rows/float_rows.h"
#include "graph/passes/rules.h"
#include "graph/planning/plan.h"
#include "graph/running/run.h"
#include "kernels/kernels.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

struct Softmax {
  at::ScalarType dtype;  // of the result
};

void find(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    if (node.held.has_value() || !is_softmax_of_rows(rewrite, node)) continue;
    const Meta& meta = rewrite.meta(node.output());
    if (meta.dtype != at::kFloat || rewrite.graph.constants.contains(node.read(0))) continue;
    node.become(nodes::softmax, {{ValueRef{node.read(0)}}}, Softmax{at::kFloat});
  }
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {{metas[Uses::at(node.read(0))].dims, node.as<Softmax>()->dtype}};
}

void narrow(Rewrite&, Node& node) { node.as<Softmax>()->dtype = at::kBFloat16; }

// Numbers of bfloat16 that are converted at a time, so that they stay in L1.
constexpr std::int64_t kAtOnce = 4096;

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const Dims& dims = running.plan.slots[dst].dims;
  const std::int64_t columns = dims.back(), rows = c10::multiply_integers(dims) / columns;
  const NumbersOf from(running.plan.slots[src], {}), to(running.plan.slots[dst], {});
  const auto run = [&tensors = running.tensors, src, dst, columns, rows, from, to] {
    const FloatRows all{tensors[src].const_data_ptr(), tensors[dst].mutable_data_ptr(), from, to,
                        columns};
    parallel_units(rows, columns, [&](std::int64_t begin, std::int64_t end) {
      all.for_each(begin, end, std::max<std::int64_t>(1, kAtOnce / columns),
                   [&](const float* rows_src, float* rows_dst, std::int64_t count) {
                     kernels::kernels().softmax_rows(
                         {.src = rows_src, .dst = rows_dst, .columns = columns}, 0, count);
                   });
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
    .types = [](const Rewrite&, const Node&) { return Types::kEachItsOwn; },
    .narrow = narrow,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
