// x * scale + shift per channel, with the activation that follows: batch norms that fold into no
// layer, and products with constants.
#include <set>

#include "graph/nodes/layers.h"
#include "graph/passes/arithmetic.h"
#include "graph/running/run.h"
#include "kernels/kernels.h"
#include "kernels/rows/normalization.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

// Whether a program should take the node: its neighbour before or after it is pointwise, too. An
// activation right after it is skipped, since affine applies it itself.
bool is_among_pointwise(const Uses& uses, const Node& node) {
  const Node* maker = uses.maker[Uses::at(node.read(0))];
  if (maker && has_arithmetic(*maker) && uses.only_reader(node.read(0))) return true;
  const Node* reader = uses.only_reader(node.output());
  if (reader && find_activation(*reader)) reader = uses.only_reader(reader->output());
  return reader && has_arithmetic(*reader) && !find_activation(*reader);
}

// A node (x, constant per channel) -> result.
Node with_channels(Rewrite& rewrite, const Node& like, const char* name, Value x,
                   const at::Tensor& channels, Value result) {
  Dims shape(rewrite.meta(x).dims.size() - 1, 1);  // [C, 1, ...]
  shape[0] = channels.numel();
  const Value constant = add_constant(rewrite, channels.view(shape));
  return {.name = name,
          .overload = "Tensor",
          .arguments = {{ValueRef{x}}, {ValueRef{constant}}},
          .outputs = {result},
          .origin = like.origin};
}

// Turns affine nodes between pointwise ops back into a product and a sum, so that one program reads
// and writes the image once. (pool(x) - x) times a scale per channel, plus x, was three passes.
void return_to_ops(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  std::set<const Node*> among;
  for (const Node& node : rewrite.graph.nodes) {
    const bool is_float = node.is(nodes::affine) && rewrite.meta(node.output()).dtype == at::kFloat;
    if (is_float && is_among_pointwise(uses, node)) among.insert(&node);
  }
  std::vector<Node> nodes;
  for (Node& node : rewrite.graph.nodes) {
    if (!among.contains(&node)) {
      nodes.push_back(std::move(node));
      continue;
    }
    const auto* affine = node.as<Affine>();
    const bool shifts = affine->shift.ne(0).any().item<bool>();
    const Value product = shifts ? add_value(rewrite, rewrite.meta(node.output())) : node.output();
    nodes.push_back(
        with_channels(rewrite, node, "aten::mul", node.read(0), affine->scale, product));
    if (!shifts) continue;
    Node sum = with_channels(rewrite, node, "aten::add", product, affine->shift, node.output());
    sum.arguments.push_back({c10::IValue(1)});  // alpha
    nodes.push_back(std::move(sum));
  }
  rewrite.graph.nodes = std::move(nodes);
}

void fuse(Rewrite& rewrite) {
  return_to_ops(rewrite);
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    auto* affine = node.as<Affine>();
    Node* reader = affine ? uses.only_reader(node.output()) : nullptr;
    const auto activation = reader ? find_activation(*reader) : std::nullopt;
    if (!activation) continue;
    affine->activation = *activation;
    node.name = joined_name(node.name, *reader);
    node.outputs = reader->outputs;
    reader->outputs.clear();
  }
  sweep(rewrite.graph);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {metas[Uses::at(node.read(0))]};
}

Prepared prepare(const Step& step, const Running& running) {
  const Affine& affine = *step.node->as<Affine>();
  const SlotPlan& slot = running.plan.slots[step.writes[0]];
  const std::int64_t blocks = slot.format.blocks(slot.dims[1]);
  const std::int64_t lanes = slot.format.lanes(slot.dims[1]);
  std::vector<float> scale(static_cast<std::size_t>(blocks * lanes)), shift(scale);
  std::copy_n(affine.scale.contiguous().const_data_ptr<float>(), slot.dims[1], scale.begin());
  std::copy_n(affine.shift.contiguous().const_data_ptr<float>(), slot.dims[1], shift.begin());
  const std::int64_t rows = slot.dims[0] * blocks;
  const std::int64_t row = lanes * c10::multiply_integers(at::IntArrayRef(slot.dims).slice(2));
  const Epilogue epilogue{.before = affine.activation, .after = {}};
  const auto run = [&tensors = running.tensors, from = step.reads.at(step.node->read(0)),
                    to = step.writes[0], scale = std::move(scale), shift = std::move(shift),
                    epilogue, blocks, lanes, rows, row, is_float32 = slot.dtype == at::kFloat] {
    void* dst = tensors[to].mutable_data_ptr();
    const kernels::Affine rows_of{.src = tensors[from].const_data_ptr(),
                                  .scale = scale.data(),
                                  .shift = shift.data(),
                                  .dst = dst,
                                  .block = lanes,
                                  .pixels = row / lanes,
                                  .periods = blocks};
    const auto& table = lanes % 8 == 0 ? kernels::kernels_for(lanes) : kernels::kernels();
    const auto affine = is_float32 ? table.affine : table.affine_bfloats;
    parallel_units(rows, row, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        affine(rows_of, i, i + 1);
        if (epilogue.empty()) continue;
        if (is_float32) {  // in cache
          table.finish(epilogue, nullptr, static_cast<float*>(dst) + i * row, row);
        } else {
          table.finish_bfloats(epilogue, nullptr, static_cast<std::uint16_t*>(dst) + i * row, row);
        }
      }
    });
  };
  return {run, true};
}

}  // namespace

constinit const NodeKind nodes::affine = {
    .name = "affine",
    .find = fold_scalings,
    .fuse = fuse,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .prefers_blocks = true,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
