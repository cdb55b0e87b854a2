// Batch norms in inference: folded into the weights of what makes or reads their operand, else a
// scale and a shift per channel.
#include <ranges>

#include "format/errors.h"
#include "graph/nodes/layers.h"

namespace torch_blocked::graph {
namespace {

// A batch norm in inference: scale and shift in float64, and what they come from.
struct BatchNorm {
  Value src;
  Affine affine;
  std::vector<at::Tensor> sources;
  double eps;
};

// Nothing if the node is none.
std::optional<BatchNorm> find_batch_norm(const Graph& graph, const Node& node,
                                         const std::vector<Meta>& metas) {
  const bool full = node.name == "aten::batch_norm";
  if (!full && node.name != "aten::_native_batch_norm_legit_no_training") return std::nullopt;
  if (full && node.arguments[5].constant().toBool()) return std::nullopt;  // training
  const auto tensor = [&](std::size_t i) { return constant_of(graph, node.arguments[i]); };
  const Value src = node.arguments[0].value();
  if (src == kNone || !tensor(3) || !tensor(4)) return std::nullopt;
  const Meta& meta = metas[Uses::at(src)];
  std::vector<at::Tensor> sources;
  for (const std::size_t i : {1, 2, 3, 4}) {
    if (!tensor(i) && !is_none(node.arguments[i])) return std::nullopt;
    sources.push_back(tensor(i) ? *tensor(i) : at::Tensor());
    const bool fits = !tensor(i) || (meta.dims.size() >= 2 && tensor(i)->dim() == 1 &&
                                     tensor(i)->size(0) == meta.dims[1]);
    if (!fits) return std::nullopt;
  }
  const double eps = number(node.arguments[full ? 7 : 6], 1e-5);
  at::Tensor scale = tensor(4)->to(at::kDouble).add(eps).rsqrt();
  if (tensor(1)) scale = scale.mul(tensor(1)->to(at::kDouble));
  at::Tensor shift = tensor(3)->to(at::kDouble).neg().mul(scale);
  if (tensor(2)) shift = shift.add(tensor(2)->to(at::kDouble));
  return BatchNorm{src, {scale, shift}, std::move(sources), eps};
}

// Source: (W x + b) scale + shift = (scale W) x + (scale b + shift), by output channel.
Folded fold_after(const Convolution& convolution, const Affine& affine) {
  const at::ScalarType dtype = convolution.weight.scalar_type();
  Dims shape(static_cast<std::size_t>(convolution.weight.dim()), 1);
  at::Tensor weight = convolution.weight.to(at::kDouble);
  if (convolution.transposed) {  // [IC, OC / groups, ...]: the channels of group g with its rows
    shape[0] = convolution.groups;
    shape.insert(shape.begin() + 1, 1);
    shape[2] = weight.size(1);
    weight = weight.unflatten(0, {convolution.groups, -1}).mul(affine.scale.view(shape));
    weight = weight.flatten(0, 1);
  } else {
    shape[0] = weight.size(0);
    weight = weight.mul(affine.scale.view(shape));
  }
  at::Tensor bias = affine.shift;
  if (convolution.bias.defined()) {
    bias = bias.add(convolution.bias.to(at::kDouble).mul(affine.scale));
  }
  return {weight.to(dtype), bias.to(dtype)};
}

// The same where the channels are the last dim: of rows [N, I].
Folded fold_after(const Linear& linear, const Affine& affine) {
  const at::ScalarType dtype = linear.weight.scalar_type();
  at::Tensor bias = affine.shift;
  if (linear.bias.defined()) bias = bias.add(linear.bias.to(at::kDouble).mul(affine.scale));
  return {linear.weight.to(at::kDouble).mul(affine.scale.unsqueeze(1)).to(dtype), bias.to(dtype)};
}

// Source: W (scale x + shift) + b = (W scale) x + (W shift + b), by input channel; the bias then
// has a share of every weight, so nothing may be padded.
Folded fold_before(const at::Tensor& weight, const at::Tensor& bias, const Affine& affine) {
  const at::ScalarType dtype = weight.scalar_type();
  Dims shape(static_cast<std::size_t>(weight.dim()), 1);
  shape[1] = weight.size(1);
  const at::Tensor wide = weight.to(at::kDouble);
  at::Tensor shift = wide.mul(affine.shift.view(shape)).flatten(1).sum(1);
  if (bias.defined()) shift = shift.add(bias.to(at::kDouble));
  return {wide.mul(affine.scale.view(shape)).to(dtype), shift.to(dtype)};
}

// The weights of a convolution or linear layer take a batch norm in, once for all plans.
template <typename Layer, typename Fold>
void fold_into(Layer& layer, const BatchNorm& norm, const std::string& how, Weights& weights,
               const Fold& fold) {
  std::vector<at::Tensor> sources{layer.weight, layer.bias};
  sources.insert(sources.end(), norm.sources.begin(), norm.sources.end());
  const Folded folded = weights.folded(sources, text(how, " ", norm.eps), fold);
  layer.weight = folded.weight;
  layer.bias = folded.bias;
}

// Folds a batch norm into the weights of its only reader; false if it cannot.
bool fold_into_reader(const Node& node, const BatchNorm& norm, const Uses& uses, bool rows,
                      Weights& weights) {
  Node* reader = uses.only_reader(node.output());
  const auto take = [&](auto& layer) {
    fold_into(layer, norm, "before", weights,
              [&] { return fold_before(layer.weight, layer.bias, norm.affine); });
    reader->arguments[0] = {ValueRef{norm.src}};
    return true;
  };
  if (reader && reader->as<Linear>() && rows) return take(*reader->as<Linear>());
  if (!reader || !reader->as<Convolution>()) return false;
  Convolution& c = *reader->as<Convolution>();
  const bool pads = std::ranges::any_of(c.padding, [](std::int64_t pad) { return pad != 0; });
  if (c.transposed || c.groups != 1 || pads) return false;
  return take(c);
}

// A layer whose outputs are channels [first, first + count) of what a batch norm reads.
struct Part {
  Node* layer;
  std::int64_t first, count;
};

// Finds the layers that make all channels of `src` and nothing else, also through concats and
// through views that leave rows as they are; false if there are others.
bool find_layers(const Rewrite& rewrite, const Uses& uses, Value src, std::int64_t first,
                 std::vector<Part>& parts) {
  Node* maker = uses.maker[Uses::at(src)];
  if (!maker || !uses.only_reader(src)) return false;
  const Dims& dims = rewrite.meta(src).dims;
  const bool rows = dims.size() == 2;
  const std::int64_t channels = dims[1];
  if ((!rows && maker->as<Convolution>()) || (rows && maker->as<Linear>())) {
    parts.push_back({maker, first, channels});
    return true;
  }
  if (is_concat(*maker, 1, dims.size())) {
    bool all = true;
    for_values(maker->arguments, [&](Value value) {
      const Dims& own = rewrite.meta(value).dims;  // [0] joins tensors of any rank
      all = all && own.size() == dims.size() && find_layers(rewrite, uses, value, first, parts);
      if (all) first += own[1];
    });
    return all;
  }
  const Value whole = rows && is_reshape(*maker) ? maker->read(0) : kNone;
  if (whole == kNone || rewrite.meta(whole).dims.back() != channels || !uses.only_reader(whole)) {
    return false;
  }
  Node* layer = uses.maker[Uses::at(whole)];
  if (!layer || !layer->as<Linear>()) return false;
  parts.push_back({layer, first, channels});
  return true;
}

// Folds a batch norm into the weights of what makes its input; false if it cannot.
bool fold_into_makers(const Rewrite& rewrite, const BatchNorm& norm, const Uses& uses,
                      Weights& weights) {
  std::vector<Part> parts;
  if (rewrite.meta(norm.src).dims.size() < 2) return false;
  if (!find_layers(rewrite, uses, norm.src, 0, parts)) return false;
  for (const Part& part : parts) {
    const auto slice = [&](const at::Tensor& all) { return all.narrow(0, part.first, part.count); };
    const Affine affine{slice(norm.affine.scale), slice(norm.affine.shift)};
    if (auto* c = part.layer->as<Convolution>()) {
      fold_into(*c, norm, text("after ", c->transposed, " ", c->groups, " ", part.first), weights,
                [&] { return fold_after(*c, affine); });
    } else {
      auto& linear = *part.layer->as<Linear>();
      fold_into(linear, norm, text("after ", part.first), weights,
                [&] { return fold_after(linear, affine); });
    }
    part.layer->name += " + batch_norm";
  }
  return true;
}

bool only_first_is_read(const Node& node, const Uses& uses) {
  return std::ranges::all_of(node.outputs | std::views::drop(1), [&](Value value) {
    return uses.readers[Uses::at(value)].empty() && !uses.is_output[Uses::at(value)];
  });
}

}  // namespace

void fold_batch_norms(Rewrite& rewrite) {
  auto& [graph, metas, weights] = rewrite;
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    auto norm = find_batch_norm(graph, node, metas);
    if (!norm || !only_first_is_read(node, uses)) continue;
    Affine& affine = norm->affine;
    const Meta& meta = metas[Uses::at(norm->src)];
    const bool rows = meta.dims.size() == 2;
    if (fold_into_makers(rewrite, *norm, uses, weights)) {
      uses.maker[Uses::at(norm->src)]->outputs = {node.output()};
      node.outputs.clear();
      continue;
    }
    if (fold_into_reader(node, *norm, uses, rows, weights)) {
      node.outputs.clear();
      continue;
    }
    if (meta.dims.size() < 3 || meta.dims.size() > 5 || meta.dtype != at::kFloat) continue;
    affine.scale = affine.scale.to(at::kFloat);
    affine.shift = affine.shift.to(at::kFloat);
    node.outputs.resize(1);  // without the statistics of training, which are empty
    node.become(nodes::affine, {{ValueRef{norm->src}}}, std::move(affine));
  }
  sweep(graph);
}

}  // namespace torch_blocked::graph
