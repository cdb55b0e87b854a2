// Matrix products of two computed operands, except those of attention. If a product is only read
// with its dims permuted, it is stored in that order.
#include "ops/tokens/matmul.h"

#include <numeric>

#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"
#include "graph/planning/plan.h"
#include "graph/running/run.h"

namespace torch_blocked::graph {
namespace {

// What a node holds. The node reads left [..., M, K] and right [..., K, N]; its result is the
// product [..., M, N] with its dims in this order.
struct Matmul {
  Dims order;
  at::ScalarType dtype = at::kFloat;  // of the result
};

bool fits(const Rewrite& rewrite, const Node& node) {
  if (node.name != "aten::matmul" || node.held.has_value() || node.arguments.size() != 2) {
    return false;
  }
  for (const std::size_t i : {0, 1}) {
    if (node.read(i) == kNone) return false;
    const Meta& meta = rewrite.meta(node.read(i));
    if (meta.dtype != at::kFloat || meta.dims.size() < 2) return false;
    if (std::ranges::count(meta.dims, 0) > 0) return false;
  }
  return true;
}

void find(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    if (!fits(rewrite, node)) continue;
    Dims order(rewrite.meta(node.output()).dims.size());
    std::iota(order.begin(), order.end(), 0);
    node.become(nodes::matmul, {{ValueRef{node.read(0)}}, {ValueRef{node.read(1)}}},
                Matmul{std::move(order)});
  }
}

// Takes a permutation behind a product if rows or columns stay dense, so that whole vectors are
// stored.
void fuse(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    auto* product = node.as<Matmul>();
    Node* reader = product ? uses.only_reader(node.output()) : nullptr;
    if (!reader || reader->held.has_value()) continue;
    const auto rank = static_cast<std::int64_t>(product->order.size());
    const Dims order = order_of(*reader, product->order.size());
    if (order.empty() || order.back() < rank - 2) continue;
    product->order = order;
    node.outputs = reader->outputs;
    reader->outputs.clear();
  }
  sweep(rewrite.graph);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  const Dims dims =
      matmul_dims(metas[Uses::at(node.read(0))].dims, metas[Uses::at(node.read(1))].dims);
  Dims ordered;
  for (const std::int64_t dim : node.as<Matmul>()->order) ordered.push_back(dims[Uses::at(dim)]);
  return {{ordered, node.as<Matmul>()->dtype}};
}

void narrow(Rewrite&, Node& node) { node.as<Matmul>()->dtype = at::kBFloat16; }

Prepared prepare(const Step& step, const Running& running) {
  const Dims& order = step.node->as<Matmul>()->order;
  Dims back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    back[Uses::at(order[i])] = static_cast<std::int64_t>(i);
  }
  return {[&tensors = running.tensors, left = step.reads.at(step.node->read(0)),
           right = step.reads.at(step.node->read(1)), dst = step.writes[0], back] {
    torch_blocked::matmul(tensors[left], tensors[right], tensors[dst].permute(back));
  }};
}

double flops(const Plan& plan, const Step& step) {
  const Dims& left = plan.slots[step.reads.at(step.node->read(0))].dims;
  const Dims& dst = plan.slots[step.writes[0]].dims;
  return 2.0 * static_cast<double>(c10::multiply_integers(dst) * left.back());
}

}  // namespace

constinit const NodeKind nodes::matmul = {
    .name = "matmul",
    .find = find,
    .fuse = fuse,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kEachItsOwn; },
    .narrow = narrow,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kStrided, kPlain}); },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .prepare = prepare,
    .flops = flops,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
