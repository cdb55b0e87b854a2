// From the ops of the capture to what the library has kernels for. One function a rule, in the
// order of simplify() at the end.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <ranges>
#include <set>
#include <string_view>
#include <unordered_map>

#include "format/errors.h"
#include "graph/rules.h"

namespace torch_blocked::graph {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void replace(std::vector<Argument>& arguments, Value from, Value to) {
  for (Argument& argument : arguments) {
    if (argument.value() == from) argument.held = ValueRef{to};
    if (auto* list = std::get_if<std::vector<Argument>>(&argument.held)) replace(*list, from, to);
  }
}

// All reads of `from` become reads of `to`.
void replace(Graph& graph, Value from, Value to) {
  for (Node& node : graph.nodes) {
    replace(node.arguments, from, to);
    if (node.affine && node.affine->src == from) node.affine->src = to;
    if (node.linear && node.linear->src == from) node.linear->src = to;
    if (!node.convolution) continue;
    if (node.convolution->src == from) node.convolution->src = to;
    if (node.convolution->residual == from) node.convolution->residual = to;
  }
  replace(graph.outputs, from, to);
}

// A dropout (input, p, train) that is on draws in inference, too, as its model means it to.
bool is_dropout_off(const Node& node) {
  if (!is_any(node, {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout",
                     "aten::feature_alpha_dropout"})) {
    return false;
  }
  const Argument& train = node.arguments[2];
  return train.is_constant() && train.constant() == c10::IValue(false);
}

void drop_identities(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (!is_dropout_off(node) &&
        !is_any(node, {"aten::detach", "aten::alias", "aten::lift_fresh"})) {
      continue;
    }
    const Value from = node.output(), to = node.arguments[0].value();
    node.outputs.clear();
    replace(graph, from, to);
  }
  sweep(graph);
}

// Where each kind of convolution op has its arguments; -1: has none.
struct ConvolutionRow {
  std::string_view name;
  std::int64_t stride, padding, dilation, output_padding, groups;
  bool transposed;
};
constexpr std::array kConvolutions{
    ConvolutionRow{"aten::conv1d", 3, 4, 5, -1, 6, false},
    ConvolutionRow{"aten::conv2d", 3, 4, 5, -1, 6, false},
    ConvolutionRow{"aten::conv3d", 3, 4, 5, -1, 6, false},
    ConvolutionRow{"aten::conv_transpose1d", 3, 4, 7, 5, 6, true},
    ConvolutionRow{"aten::conv_transpose2d", 3, 4, 7, 5, 6, true},
    ConvolutionRow{"aten::conv_transpose3d", 3, 4, 7, 5, 6, true},
};

// Whether a bias, if there is one, is a vector of a weight's type and outputs.
bool bias_fits(const at::Tensor* bias, at::ScalarType dtype, std::int64_t outputs) {
  return !bias || (bias->scalar_type() == dtype && bias->dim() == 1 && bias->size(0) == outputs);
}

// Of a type that we have kernels for, and that ATen takes, too; what it refuses, it words best.
bool convolution_fits(const Meta& src, const at::Tensor& weight, const at::Tensor* bias,
                      std::int64_t groups, bool transposed) {
  const bool known = src.dtype == at::kFloat || src.dtype == at::kBFloat16;
  const bool ranks = std::ssize(src.dims) == weight.dim();  // not without a batch
  if (!known || !ranks || weight.scalar_type() != src.dtype || groups < 1) return false;
  const std::int64_t inputs = transposed ? weight.size(0) : weight.size(1) * groups;
  const std::int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  return inputs == src.dims[1] && inputs % groups == 0 && outputs % groups == 0 &&
         bias_fits(bias, src.dtype, outputs);
}

void find_convolution(const Graph& graph, Node& node, const std::vector<Meta>& metas) {
  const auto* row = std::ranges::find(kConvolutions, node.name, &ConvolutionRow::name);
  if (row == kConvolutions.end() || node.overload == "padding") return;
  const at::Tensor* weight = constant_of(graph, node.arguments[1]);
  const at::Tensor* bias = constant_of(graph, node.arguments[2]);
  const Value src = node.arguments[0].value();
  const Argument& groups = node.arguments[static_cast<std::size_t>(row->groups)];
  if (!weight || src == kNone || !groups.is_constant()) return;  // computed weights are ATen's
  if (!bias && !is_none(node.arguments[2])) return;
  const Meta& meta = metas[Uses::at(src)];
  if (!convolution_fits(meta, *weight, bias, groups.constant().toInt(), row->transposed)) return;
  const std::size_t ndims = meta.dims.size();
  const auto list = [&](std::int64_t index) -> std::optional<Dims> {
    if (index < 0) return Dims(ndims - 2, 0);
    return integers(node.arguments[static_cast<std::size_t>(index)], ndims - 2);
  };
  const auto stride = list(row->stride), padding = list(row->padding),
             dilation = list(row->dilation), output_padding = list(row->output_padding);
  if (!stride || !padding || !dilation || !output_padding) return;
  node.kind = Kind::kConvolution;
  node.convolution = Convolution{.src = src,
                                 .weight = *weight,
                                 .bias = bias ? *bias : at::Tensor(),
                                 .stride = *stride,
                                 .padding = *padding,
                                 .dilation = *dilation,
                                 .output_padding = *output_padding,
                                 .padding_end = {},
                                 .transposed = row->transposed,
                                 .groups = groups.constant().toInt()};
  node.arguments.clear();
}

// x * scale where scale is a constant per channel.
void find_scalings(Graph& graph, const std::vector<Meta>& metas) {
  for (Node& node : graph.nodes) {
    if (node.name != "aten::mul" || node.overload != "Tensor") continue;
    for (const std::size_t i : {0, 1}) {
      const at::Tensor* scale = constant_of(graph, node.arguments[i]);
      const Value src = node.arguments[1 - i].value();
      if (!scale || src == kNone || graph.constants.contains(src)) continue;
      const Meta& meta = metas[Uses::at(src)];
      const auto rank = static_cast<std::int64_t>(meta.dims.size());
      const bool images = rank >= 3 && rank <= 5 && meta.dtype == at::kFloat;
      const std::int64_t own = scale->dim();  // [C, 1, 1] or [1, C, 1, 1]
      if (!images || scale->scalar_type() != at::kFloat || own < rank - 1 || own > rank) continue;
      if (scale->size(own - rank + 1) != meta.dims[1] || scale->numel() != meta.dims[1]) continue;
      const at::Tensor flat = scale->flatten().clone();
      node.kind = Kind::kAffine;
      node.affine = Affine{src, flat, at::zeros_like(flat)};
      node.arguments.clear();
      break;
    }
  }
}

void find_linear(const Graph& graph, Node& node, const std::vector<Meta>& metas) {
  if (node.name != "aten::linear") return;
  const at::Tensor* weight = constant_of(graph, node.arguments[1]);
  const at::Tensor* bias = constant_of(graph, node.arguments[2]);
  const Value src = node.arguments[0].value();
  if (!weight || weight->dim() != 2 || src == kNone || graph.constants.contains(src)) return;
  if (!bias && !is_none(node.arguments[2])) return;
  const Meta& meta = metas[Uses::at(src)];
  if (meta.dims.size() < 2 || meta.dtype != at::kFloat || weight->scalar_type() != at::kFloat)
    return;
  if (meta.dims.back() != weight->size(1) || !bias_fits(bias, at::kFloat, weight->size(0))) return;
  node.kind = Kind::kLinear;
  node.linear = Linear{src, *weight, bias ? *bias : at::Tensor()};
  node.arguments.clear();
}

LinearActivation find_linear_activation(const Node& node) {
  if (node.name == "aten::relu") return LinearActivation::kRelu;
  if (node.name == "aten::silu") return LinearActivation::kSilu;
  if (node.name != "aten::gelu") return LinearActivation::kNone;
  const bool tanh = node.arguments.size() > 1 && node.arguments[1].is_constant() &&
                    node.arguments[1].constant().toStringView() == "tanh";
  return tanh ? LinearActivation::kGeluTanh : LinearActivation::kGelu;
}

void fuse_into_linear(Graph& graph) {
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (!node.linear) continue;
    Node* reader = uses.only_reader(node.output());
    if (!reader) continue;
    node.linear->activation = find_linear_activation(*reader);
    if (node.linear->activation == LinearActivation::kNone) continue;
    node.name = joined_name(node.name, *reader);
    node.outputs = reader->outputs;
    reader->outputs.clear();
  }
  sweep(graph);
}

// Zero padding in front of a convolution joins the convolution's own. More at the near end than at
// the far one counts as a smaller image, of which something must be left.
void fuse_padding(Graph& graph, const std::vector<Meta>& metas) {
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (!is_any(node, {"aten::pad", "aten::constant_pad_nd"})) continue;
    const bool named = node.name == "aten::pad";
    if (named && node.arguments[2].constant().toStringView() != "constant") continue;
    if (number(node.arguments[named ? 3 : 2], 0) != 0) continue;
    Node* reader = uses.only_reader(node.output());
    if (!reader || !reader->convolution || reader->convolution->transposed) continue;
    Convolution& convolution = *reader->convolution;
    const std::size_t spatial = convolution.stride.size();
    const auto pads = integers(node.arguments[1], 2 * spatial);  // last dim first, begin and end
    if (!pads || pads->size() > 2 * spatial || convolution.residual == node.output()) continue;
    if (std::ranges::any_of(*pads, [](std::int64_t pad) { return pad < 0; })) continue;
    const Dims& dims = metas[static_cast<std::size_t>(node.arguments[0].value())].dims;
    bool is_left = true;
    for (std::size_t i = 0; i < pads->size() / 2; ++i) {
      is_left &= dims[dims.size() - 1 - i] + (*pads)[2 * i + 1] > (*pads)[2 * i];
    }
    if (!is_left) continue;
    if (convolution.padding_end.empty()) convolution.padding_end.resize(spatial, 0);
    for (std::size_t i = 0; i < pads->size() / 2; ++i) {
      convolution.padding[spatial - 1 - i] += (*pads)[2 * i];
      convolution.padding_end[spatial - 1 - i] += (*pads)[2 * i + 1] - (*pads)[2 * i];
    }
    convolution.src = node.arguments[0].value();
    node.outputs.clear();
  }
  sweep(graph);
}

// Adds what reads `node` to its epilogue; true if something did. The reader takes the
// convolution's place, where the residual is known too.
bool fuse_reader(Graph& graph, Node& node, const Uses& uses, const std::vector<Meta>& metas) {
  Node* reader = uses.only_reader(node.output());
  if (!reader || reader->convolution || reader->affine) return false;
  Convolution fused = *node.convolution;
  if (!join_epilogue(graph, *reader, node.output(), metas, fused.epilogue, fused.residual)) {
    return false;
  }
  reader->kind = Kind::kConvolution;
  reader->name = joined_name(node.name, *reader);
  reader->convolution = std::move(fused);
  reader->arguments.clear();
  node.outputs.clear();
  return true;
}

void fuse_epilogues(Graph& graph, const std::vector<Meta>& metas) {
  // From the end, so that of two summed convolutions the later takes the sum, and the earlier's
  // result, which is there by then, is its residual.
  for (bool changed = true; changed;) {
    changed = false;
    const Uses uses(graph);
    for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend() && !changed; ++node) {
      if (node->convolution && !node->outputs.empty()) {
        changed = fuse_reader(graph, *node, uses, metas);
      }
    }
    sweep(graph);
  }
}

void fuse_into_affine(Graph& graph) {
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (!node.affine) continue;
    Node* reader = uses.only_reader(node.output());
    const auto activation = reader ? find_activation(*reader) : std::nullopt;
    if (!activation) continue;
    node.affine->activation = *activation;
    node.name = joined_name(node.name, *reader);
    node.outputs = reader->outputs;
    reader->outputs.clear();
  }
  sweep(graph);
}

// Ops on physical tensors: f(0) = 0, or the tail is cleared after them.
constexpr std::array<std::string_view, 22> kPointwise{
    "aten::relu",      "aten::relu6", "aten::hardtanh", "aten::leaky_relu", "aten::hardswish",
    "aten::silu",      "aten::gelu",  "aten::tanh",     "aten::sigmoid",    "aten::hardsigmoid",
    "aten::elu",       "aten::mish",  "aten::abs",      "aten::neg",        "aten::clamp",
    "aten::clamp_min", "aten::exp",   "aten::sqrt",     "aten::softplus",   "aten::add",
    "aten::sub",       "aten::mul"};
constexpr std::array<std::string_view, 12> kImages{
    "aten::max_pool1d",          "aten::avg_pool1d",          "aten::max_pool2d",
    "aten::avg_pool2d",          "aten::adaptive_avg_pool2d", "aten::max_pool3d",
    "aten::avg_pool3d",          "aten::adaptive_avg_pool3d", "aten::upsample_nearest2d",
    "aten::upsample_bilinear2d", "aten::upsample_nearest3d",  "aten::upsample_trilinear3d"};

// Operands may differ where they have size 1, but not in N and C.
bool same_kind_of_image(const Dims& a, const Dims& b) {
  return a.size() == b.size() && a[0] == b[0] && a[1] == b[1];
}

// A permutation or a reshape that a format makes free; kBoxed if it is none.
Kind view_kind(const Node& node, const Uses& uses, const std::vector<Meta>& metas) {
  if (node.arguments.empty() || node.arguments[0].value() == kNone) return Kind::kBoxed;
  const Value src = node.arguments[0].value();
  const Dims &from = metas[Uses::at(src)].dims, &to = metas[Uses::at(node.output())].dims;
  const std::size_t rank = from.size();
  if (rank < 3 || rank > 5) return Kind::kBoxed;
  if (is_reshape(node)) {
    const bool same = to.size() >= 3 && to.size() <= 5 && to[0] == from[0] && to[1] == from[1];
    return same ? Kind::kRegroup : Kind::kBoxed;
  }
  Dims to_last(rank), from_last(rank);
  for (std::size_t i = 1; i < rank; ++i) {
    to_last[i] = static_cast<std::int64_t>(i % (rank - 1) + 1);
    from_last[to_last[i]] = static_cast<std::int64_t>(i);
  }
  const Dims order = order_of(node, rank);
  // [N, C, L] and [N, L, C] look alike: images come from where formats are.
  const Node* maker = uses.maker[Uses::at(src)];
  const bool image = maker && maker->kind != Kind::kBoxed && maker->kind != Kind::kLinear &&
                     maker->kind != Kind::kToLast;
  if (order == to_last && (rank > 3 || image)) return Kind::kToLast;
  return order == from_last ? Kind::kFromLast : Kind::kBoxed;
}

Kind kind_of(const Graph& graph, const Node& node, const Uses& uses,
             const std::vector<Meta>& metas) {
  if (node.kind != Kind::kBoxed || node.outputs.size() != 1) return node.kind;
  const Meta& result = metas[Uses::at(node.output())];
  const bool image = result.dims.size() >= 3 && result.dims.size() <= 5 &&
                     (result.dtype == at::kFloat || result.dtype == at::kBFloat16);
  if (!image) return Kind::kBoxed;
  if (const Kind kind = view_kind(node, uses, metas); kind != Kind::kBoxed) {
    return kind;
  }
  bool fits = true;
  for_reads(node, [&](Value value) {
    const Meta& meta = metas[Uses::at(value)];
    fits &= !graph.constants.contains(value) && meta.dtype == result.dtype &&
            meta.dims.size() == result.dims.size();
  });
  if (!fits) return Kind::kBoxed;
  const auto listed = [&](const auto& names) {
    return std::ranges::find(names, std::string_view(node.name)) != names.end();
  };
  if (listed(kPointwise)) {
    for_reads(node, [&](Value value) {
      fits &= same_kind_of_image(metas[Uses::at(value)].dims, result.dims);
    });
    return fits ? Kind::kPointwise : Kind::kBoxed;
  }
  // "aten::max_pool2d" of three dims is that of one image without a batch.
  if (listed(kImages)) {
    const std::size_t spatial = static_cast<std::size_t>(node.name[node.name.size() - 2] - '0');
    return result.dims.size() == spatial + 2 ? Kind::kImages : Kind::kBoxed;
  }
  const bool channels =
      node.name == "aten::cat" && node.arguments[1].is_constant() &&
      (node.arguments[1].constant().toInt() == 1 ||
       node.arguments[1].constant().toInt() == 1 - static_cast<std::int64_t>(result.dims.size()));
  // Lanes are moved four bytes at a time.
  return channels && result.dtype == at::kFloat ? Kind::kConcat : Kind::kBoxed;
}

// Whether the op draws numbers.
bool is_random(const Node& node) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  return !op || op->hasTag(at::Tag::nondeterministic_seeded);
}

void drop_dead(Graph& graph) {
  for (bool changed = true; changed;) {
    const Uses uses(graph);
    const std::size_t before = graph.nodes.size();
    std::erase_if(graph.nodes, [&](const Node& node) {
      return std::ranges::all_of(node.outputs, [&](Value value) {
        return uses.readers[Uses::at(value)].empty() && !uses.is_output[Uses::at(value)];
      });
    });
    changed = graph.nodes.size() != before;
  }
  std::set<Value> read;
  for (const Node& node : graph.nodes) for_reads(node, [&](Value value) { read.insert(value); });
  for_arguments(graph.outputs, [&](Value value) { read.insert(value); });
  std::erase_if(graph.constants, [&](const auto& each) { return !read.contains(each.first); });
}

}  // namespace

std::optional<Dims> integers(const Argument& argument, std::size_t spatial) {
  Dims dims;
  if (argument.is_constant()) {
    if (!argument.constant().isInt()) return std::nullopt;
    dims = {argument.constant().toInt()};
  } else if (const auto* list = std::get_if<std::vector<Argument>>(&argument.held)) {
    for (const Argument& item : *list) {
      if (!item.is_constant() || !item.constant().isInt()) return std::nullopt;
      dims.push_back(item.constant().toInt());
    }
  }
  if (dims.size() == 1) dims.resize(spatial, dims[0]);
  return dims;
}

bool is_reshape(const Node& node) {
  return is_any(node, {"aten::flatten", "aten::view", "aten::reshape", "aten::unflatten"}) &&
         node.overload != "dtype" && !node.arguments.empty() && node.arguments[0].value() != kNone;
}

Dims order_of(const Node& node, std::size_t rank) {
  const auto size = static_cast<std::int64_t>(rank);
  Dims order(rank);
  if (node.name == "aten::permute") {
    const auto dims = integers(node.arguments[1], rank);
    if (!dims || dims->size() != rank) return {};
    for (std::size_t i = 0; i < rank; ++i) order[i] = ((*dims)[i] + size) % size;
    return order;
  }
  if (node.name != "aten::transpose" || node.overload != "int") return {};
  std::iota(order.begin(), order.end(), 0);
  const auto dim = [&](std::size_t i) {
    return static_cast<std::size_t>((node.arguments[i].constant().toInt() + size) % size);
  };
  std::swap(order[dim(1)], order[dim(2)]);
  return order;
}

std::optional<Activation> find_activation(const Node& node) {
  const auto& a = node.arguments;
  const auto clamp = [](double low, double high) -> std::optional<Activation> {
    if (low > 0 || high < 0) return std::nullopt;  // the tail would not stay zero
    return Activation{Activated::kClamp, static_cast<float>(low), static_cast<float>(high)};
  };
  if (node.name == "aten::relu") return clamp(0, kInfinity);
  if (node.name == "aten::relu6") return clamp(0, 6);
  if (node.name == "aten::hardtanh") return clamp(number(a[1], -1), number(a[2], 1));
  if (node.name == "aten::clamp" && node.overload.empty()) {
    return clamp(number(a[1], -kInfinity), number(a[2], kInfinity));
  }
  if (node.name == "aten::clamp_min" && node.overload.empty()) {
    return clamp(number(a[1], 0), kInfinity);
  }
  if (node.name == "aten::leaky_relu") {
    return Activation{Activated::kLeakyRelu, static_cast<float>(number(a[1], 0.01)), 0};
  }
  if (node.name == "aten::hardswish") return Activation{Activated::kHardswish};
  if (node.name == "aten::silu") return Activation{Activated::kSilu};
  return std::nullopt;
}

bool join_epilogue(const Graph& graph, const Node& reader, Value value,
                   const std::vector<Meta>& metas, Epilogue& epilogue, Value& residual) {
  if (const auto activation = find_activation(reader)) {
    Activation& place = epilogue.residual ? epilogue.after : epilogue.before;
    if (place.kind != Activated::kNone) return false;
    place = *activation;
    return true;
  }
  if (reader.name != "aten::add" || reader.overload != "Tensor" || epilogue.residual ||
      number(reader.arguments[2], 1) != 1) {
    return false;
  }
  const Value a = reader.arguments[0].value(), b = reader.arguments[1].value();
  const Value other = a == value ? b : a;
  if (a == b || other == kNone || graph.constants.contains(other)) return false;
  if (metas[Uses::at(other)] != metas[Uses::at(value)]) return false;
  epilogue.residual = true;
  residual = other;
  return true;
}

void fold_constants(Graph& graph) {
  for (Node& node : graph.nodes) {
    bool constant = !is_random(node), reads = false;
    for_reads(node, [&](Value value) {
      reads = true;
      constant &= graph.constants.contains(value) && !graph.constants.at(value).is_meta();
    });
    if (!constant || !reads) continue;
    const auto results =
        call(node, [&](Value value) -> c10::IValue { return graph.constants.at(value); });
    const bool tensors =
        results.size() == node.outputs.size() && std::ranges::all_of(results, [](const auto& each) {
          return each.isTensor() && each.toTensor().defined();
        });
    if (!tensors) continue;
    for (std::size_t i = 0; i < results.size(); ++i) {
      graph.constants[node.outputs[i]] = results[i].toTensor();
    }
    node.outputs.clear();
  }
  sweep(graph);
}

void simplify(Graph& graph, std::vector<Meta> metas, Weights& weights) {
  drop_identities(graph);
  find_means(graph, metas);
  for (Node& node : graph.nodes) find_convolution(graph, node, metas);
  for (Node& node : graph.nodes) find_linear(graph, node, metas);
  fold_batch_norms(graph, metas, weights);
  find_scalings(graph, metas);
  fuse_padding(graph, metas);
  fuse_epilogues(graph, metas);
  fuse_into_affine(graph);
  fuse_into_linear(graph);
  const Uses uses(graph);
  for (Node& node : graph.nodes) node.kind = kind_of(graph, node, uses, metas);
  find_squeeze_excites(graph, metas);
  find_gathers(graph, metas);
  drop_dead(graph);
}

}  // namespace torch_blocked::graph
