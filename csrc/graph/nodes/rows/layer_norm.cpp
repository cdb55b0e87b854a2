// Layer norms over the last dim. Rows are tokens, or the pixels of images in channels-last.
#include "graph/nodes/rows/layer_norm.h"

#include <array>

#include "graph/nodes/rows/float_rows.h"

namespace torch_blocked::graph {

kernels::RowNormalization normalization_of(const LayerNorm& norm, std::int64_t channels,
                                           std::vector<at::Tensor>& kept) {
  const auto data = [&](const at::Tensor& x) -> const float* {
    if (!x.defined()) return nullptr;
    kept.push_back(x.contiguous());
    return kept.back().const_data_ptr<float>();
  };
  return {.src = nullptr,
          .weight = data(norm.weight),
          .bias = data(norm.bias),
          .dst = nullptr,
          .channels = channels,
          .row_step = channels,
          .vector_step = kernels::kernels().width,
          .eps = norm.eps};
}

void own(LayerNorm& norm, Weights& weights) {
  for (at::Tensor* parameter : {&norm.weight, &norm.bias}) {
    if (parameter->defined()) *parameter = weights.own(*parameter);
  }
}

namespace {

// (input, normalized_shape, weight, bias, eps, cudnn_enable)
void find_one(const Rewrite& rewrite, Node& node) {
  if (node.name != "aten::layer_norm" || node.read(0) == kNone) return;
  const Meta& meta = rewrite.meta(node.read(0));
  if (meta.dtype != at::kFloat || meta.dims.size() < 2 || meta.dims.back() == 0) return;
  if (integers(node.arguments[1], 1) != Dims{meta.dims.back()}) return;
  if (rewrite.graph.constants.contains(node.read(0))) return;
  std::array<at::Tensor, 2> parameters;
  for (const std::size_t i : {0, 1}) {
    const Argument& argument = node.arguments[2 + i];
    const at::Tensor* parameter = constant_of(rewrite.graph, argument);
    if (!parameter && !is_none(argument)) return;
    if (!bias_fits(parameter, at::kFloat, meta.dims.back())) return;
    if (parameter) parameters[i] = *parameter;
  }
  node.become(nodes::layer_norm, {{ValueRef{node.read(0)}}},
              LayerNorm{parameters[0], parameters[1], number(node.arguments[4], 1e-5)});
}

void find(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) find_one(rewrite, node);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {node.as<LayerNorm>()->result(metas[Uses::at(node.read(0))])};
}

void combine(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    if (auto* norm = node.as<LayerNorm>()) join_bytes(uses, node, norm->bytes);
  }
  sweep(rewrite.graph);
}

void narrow(Rewrite&, Node& node) { node.as<LayerNorm>()->dtype = at::kBFloat16; }

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const Dims& dims = running.plan.slots[dst].dims;
  const std::int64_t channels = dims.back(), rows = c10::multiply_integers(dims) / channels;
  std::vector<at::Tensor> kept;
  const auto norm = normalization_of(*step.node->as<LayerNorm>(), channels, kept);
  const Bytes& bytes = step.node->as<LayerNorm>()->bytes;
  const NumbersOf from(running.plan.slots[src], bytes.src), to(running.plan.slots[dst], bytes.dst);
  const auto run = [&tensors = running.tensors, src, dst, rows, norm, kept, from, to] {
    const FloatRows all{tensors[src].const_data_ptr(), tensors[dst].mutable_data_ptr(), from, to,
                        norm.channels};
    const kernels::Kernels& table = kernels::kernels();
    const std::int64_t group = table.width;  // rows that the kernel takes at a time
    parallel_units(ceil_div(rows, group), group * norm.channels,
                   [&](std::int64_t begin, std::int64_t end) {
                     all.for_each(begin * group, std::min(end * group, rows), group,
                                  [&](const float* rows_src, float* rows_dst, std::int64_t count) {
                                    kernels::RowNormalization some = norm;
                                    some.src = rows_src;
                                    some.dst = rows_dst;
                                    table.normalize_rows(some, 0, count);
                                  });
                   });
  };
  return {run, true};
}

}  // namespace

constinit const NodeKind nodes::layer_norm = {
    .name = "layer_norm",
    .find = find,
    .combine = combine,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kEachItsOwn; },
    .narrow = narrow,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = by_torch_blocked,
    .own = [](Node& node, Weights& weights) { own(*node.as<LayerNorm>(), weights); },
};

}  // namespace torch_blocked::graph
