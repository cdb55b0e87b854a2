// Layer norms over the last dim, of rows: tokens, or the pixels of images in channels-last; and
// those over the channels of images between two permutations, which keep the format.
#include <algorithm>
#include <array>

#include "graph/nodes/boxed.h"
#include "graph/nodes/layers.h"
#include "graph/planner.h"
#include "graph/run.h"
#include "kernels/kernels.h"
#include "kernels/normalization.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

struct LayerNorm {
  at::Tensor weight, bias;  // [C], or undefined
  double eps;
};

// Of [N, C, *spatial] over the channels.
struct ChannelNorm {
  LayerNorm norm;
};

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

// A norm between a permutation to [N, *spatial, C] and the one back, which nobody else reads.
void find_channel_norm(const Rewrite& rewrite, const Uses& uses, Node& node) {
  const auto* norm = node.as<LayerNorm>();
  Node* to_last = norm ? uses.maker[Uses::at(node.read(0))] : nullptr;
  Node* from_last = norm ? uses.only_reader(node.output()) : nullptr;
  if (!to_last || !from_last || uses.only_reader(to_last->output()) != &node) return;
  const Value src = to_last->read(0);
  const std::size_t rank = rewrite.meta(node.read(0)).dims.size();
  if (src == kNone || rank < 4 || rank > 5 || rewrite.graph.constants.contains(src)) return;
  if (order_of(*to_last, rank) != order_to_last(rank)) return;
  if (order_of(*from_last, rank) != order_from_last(rank)) return;
  node.become(nodes::channel_norm, {{ValueRef{src}}}, ChannelNorm{*norm});
  node.outputs = from_last->outputs;
  to_last->outputs.clear();
  from_last->outputs.clear();
}

void find_channel_norms(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) find_channel_norm(rewrite, uses, node);
  sweep(rewrite.graph);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {metas[Uses::at(node.read(0))]};
}

// The norm without its memory; parameters are dense, and kept by `kept`.
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

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const Dims& dims = running.plan.slots[dst].dims;
  const std::int64_t channels = dims.back(), rows = c10::multiply_integers(dims) / channels;
  std::vector<at::Tensor> kept;
  const auto norm = normalization_of(*step.node->as<LayerNorm>(), channels, kept);
  const auto run = [&tensors = running.tensors, src, dst, rows, norm, kept] {
    kernels::RowNormalization all = norm;
    all.src = tensors[src].const_data_ptr<float>();
    all.dst = tensors[dst].mutable_data_ptr<float>();
    parallel_units(rows, all.channels, [&](std::int64_t begin, std::int64_t end) {
      kernels::kernels().normalize_rows(all, begin, end);
    });
  };
  return {run, true};
}

// A unit is a pixel: of all images in channels-last, of one after the other in a blocked format.
Prepared prepare_channels(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  const std::int64_t channels = slot.dims[1], all = c10::multiply_integers(slot.dims) / channels;
  std::vector<at::Tensor> kept;
  auto norm = normalization_of(step.node->as<ChannelNorm>()->norm, channels, kept);
  std::int64_t images = 1, image = 0, block = 1;
  if (slot.is_blocked()) {
    images = std::max<std::int64_t>(slot.dims[0], 1);
    block = slot.format.block;
    norm.row_step = block;
    norm.vector_step = all / images * block;
    image = slot.format.blocks(channels) * norm.vector_step;
  }
  const kernels::Kernels& table = block > 1 ? kernels::kernels_for(block) : kernels::kernels();
  const auto kernel = block > 1 ? table.normalize_pixels : table.normalize_rows;
  const auto run = [&tensors = running.tensors, src, dst, norm, kept, kernel, image,
                    pixels = all / images, all] {
    const auto* from = tensors[src].const_data_ptr<float>();
    auto* to = tensors[dst].mutable_data_ptr<float>();
    parallel_units(all, norm.channels, [&](std::int64_t begin, std::int64_t end) {
      while (begin < end) {
        const std::int64_t i = begin / pixels, first = begin % pixels;
        const std::int64_t last = std::min(pixels, first + end - begin);
        kernels::RowNormalization of_image = norm;
        of_image.src = from + i * image;
        of_image.dst = to + i * image;
        kernel(of_image, first, last);
        begin += last - first;
      }
    });
  };
  return {run, true};
}

// Blocks must be vectors.
double cost(Planner&, const Node&, Format format) {
  const bool is_vector =
      format.is_blocked() && format.block == kernels::kernels_for(format.block).width;
  return is_vector || format == kChannelsLast ? 0 : kImpossible;
}

void own(LayerNorm& norm, Weights& weights) {
  for (at::Tensor* parameter : {&norm.weight, &norm.bias}) {
    if (parameter->defined()) *parameter = weights.own(*parameter);
  }
}

}  // namespace

constinit const NodeKind nodes::layer_norm = {
    .name = "layer_norm",
    .find = find,
    .results = results,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = by_torch_blocked,
    .own = [](Node& node, Weights& weights) { own(*node.as<LayerNorm>(), weights); },
};

constinit const NodeKind nodes::channel_norm = {
    .name = "channel_norm",
    .find = find_channel_norms,
    .results = results,
    .prefers_blocks = true,
    .cost = cost,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare_channels,
    .implementation = by_torch_blocked,
    .own = [](Node& node, Weights& weights) { own(node.as<ChannelNorm>()->norm, weights); },
};

}  // namespace torch_blocked::graph
