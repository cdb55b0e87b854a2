// Folds scalings of channels by constants, above all batch norms in inference, into the weights of
// the layers that make or read their operand. Batch norms and products of images that fold into no
// layer become affine nodes: a scale and a shift per channel.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <ranges>
#include <set>
#include <span>

#include "format/errors.h"
#include "graph/nodes/layers.h"
#include "ops/normalization/normalization.h"

namespace torch_blocked::graph {
namespace {

constexpr std::int64_t kAnyDim = -1;  // of a single number, which fits the channels of any dim

// src * scale + shift along a dim, in float64, and the constants that it is computed from.
struct Scaling {
  Value src;
  std::int64_t dim;
  Affine affine;
  std::vector<at::Tensor> sources;
  std::string how, word;  // what else decides it; its name in the report

  // The part for channels [first, first + count).
  Affine part(std::int64_t first, std::int64_t count) const {
    if (dim == kAnyDim) return {affine.scale.expand({count}), affine.shift.expand({count})};
    return {affine.scale.narrow(0, first, count), affine.shift.narrow(0, first, count)};
  }
};

// Nothing if the node is no batch norm of constants.
std::optional<Scaling> find_batch_norm(const Graph& graph, const Node& node,
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
  return Scaling{src, 1, {scale, shift}, std::move(sources), text("norm ", eps), "batch_norm"};
}

}  // namespace

std::optional<Affine> batch_norm_of(const Rewrite& rewrite, const Node& node) {
  const auto found = find_batch_norm(rewrite.graph, node, rewrite.metas);
  return found ? std::optional(found->affine) : std::nullopt;
}

namespace {

// A number, or one number per channel of a dim, in float64, and that dim.
struct Numbers {
  at::Tensor values;
  std::int64_t dim;
};

std::optional<Numbers> numbers_of(const Graph& graph, const Argument& argument, const Meta& meta) {
  if (is_real(argument)) {
    return Numbers{at::full({1}, number(argument, 0), at::kDouble), kAnyDim};
  }
  const at::Tensor* constant = constant_of(graph, argument);
  if (!constant || constant->scalar_type() != meta.dtype) return std::nullopt;
  const at::Tensor values = constant->flatten().to(at::kDouble);
  if (values.numel() == 1) return Numbers{values, kAnyDim};
  for (std::int64_t i = 1; i <= std::min(constant->dim(), std::ssize(meta.dims)); ++i) {
    const std::int64_t dim = std::ssize(meta.dims) - i;
    const bool all = constant->size(-i) == values.numel();
    if (all && meta.dims[static_cast<std::size_t>(dim)] == values.numel()) {
      return Numbers{values, dim};
    }
  }
  return std::nullopt;
}

// The factors of the first and the second argument of a sum or a difference; nothing for other ops.
std::optional<std::array<double, 2>> factors_of(const Node& node) {
  const double alpha = node.arguments.size() > 2 ? number(node.arguments[2], 1) : 1;
  if (node.name == "aten::add") return {{1, alpha}};
  if (node.name == "aten::sub") return {{1, -alpha}};
  if (node.name == "aten::rsub") return {{-alpha, 1}};
  return std::nullopt;
}

// x * k, x / k, x + k, x - k or k - x.
std::optional<Scaling> find_scaling(const Graph& graph, const Node& node,
                                    const std::vector<Meta>& metas) {
  const auto factors = factors_of(node);
  const bool divides = node.name == "aten::div";
  if (node.overload != "Tensor" && node.overload != "Scalar") return std::nullopt;
  if (!factors && !divides && node.name != "aten::mul") return std::nullopt;
  for (const std::size_t i : {0, 1}) {
    const Value src = node.read(i);
    if (src == kNone || graph.constants.contains(src) || (divides && i == 1)) continue;
    const Meta& meta = metas[Uses::at(src)];
    const auto k = numbers_of(graph, node.arguments[1 - i], meta);
    if (!k || meta != metas[Uses::at(node.output())]) continue;
    const at::Tensor zeros = at::zeros_like(k->values);
    Affine affine{divides ? k->values.reciprocal() : k->values, zeros};
    if (factors) affine = {zeros.add((*factors)[i]), k->values.mul((*factors)[1 - i])};
    // A model that adds 2^23 to x does so to round it.
    constexpr double kCommon = 1e3;
    if (!affine.scale.isfinite().all().item<bool>()) return std::nullopt;
    if (!affine.shift.abs().le(kCommon).all().item<bool>()) return std::nullopt;
    Scaling found{src, k->dim, std::move(affine), {}, "", ""};
    found.word = node.name.substr(std::string_view("aten::").size());
    found.how = text(found.word, " ", i, " ", factors ? (*factors)[i] : 0.,
                     factors ? (*factors)[1 - i] : 0.);
    if (const at::Tensor* constant = constant_of(graph, node.arguments[1 - i])) {
      found.sources.push_back(*constant);
    } else {
      found.how += text(" by ", number(node.arguments[1 - i], 0));
    }
    return found;
  }
  return std::nullopt;
}

// The factors of a weight after more are folded into it.
at::Tensor joined_factors(const Weight& weight, const at::Tensor& more) {
  return weight.factors.defined() ? weight.factors.mul(more) : more;
}

// (W x + b) scale + shift = (scale W) x + (scale b + shift), by output channel.
Folded fold_after(const Convolution& convolution, const Affine& affine) {
  const at::IntArrayRef sizes = convolution.weight.sizes();
  Dims shape(sizes.size(), 1);
  shape[0] = sizes[0];
  at::Tensor scale = affine.scale;
  if (convolution.transposed) {  // [IC, OC / groups, ...]: the rows of group g get its channels
    shape[1] = sizes[1];
    scale = scale.view({convolution.groups, 1, shape[1]});
    scale = scale.expand({-1, shape[0] / convolution.groups, -1}).reshape({shape[0], shape[1]});
  }
  at::Tensor bias = affine.shift;
  if (convolution.bias.defined()) {
    bias = bias.add(convolution.bias.to(at::kDouble).mul(affine.scale));
  }
  const at::Tensor factors = joined_factors(convolution.weight, scale.reshape(shape));
  return {convolution.weight.with(factors), bias.to(convolution.weight.dtype())};
}

// The same for rows [N, I], whose channels are the last dim.
Folded fold_after(const Linear& linear, const Affine& affine) {
  at::Tensor bias = affine.shift;
  if (linear.bias.defined()) bias = bias.add(linear.bias.to(at::kDouble).mul(affine.scale));
  const at::Tensor factors = joined_factors(linear.weight, affine.scale.unsqueeze(1));
  return {linear.weight.with(factors), bias.to(linear.weight.dtype())};
}

// W (scale x + shift) + b = (W scale) x + (W shift + b), by input channel. Every weight contributes
// to the bias, so nothing may be padded.
Folded fold_before(const Weight& weight, const at::Tensor& bias, const Affine& affine) {
  Dims shape(weight.sizes().size(), 1);
  shape[1] = weight.sizes()[1];
  const at::Tensor factors = joined_factors(weight, affine.shift.view(shape));
  at::Tensor shift = weight.source.to(at::kDouble).mul_(factors).flatten(1).sum(1);
  if (bias.defined()) shift = shift.add(bias.to(at::kDouble));
  return {weight.with(joined_factors(weight, affine.scale.view(shape))), shift.to(weight.dtype())};
}

// Folds a scaling into the weights of a convolution or linear layer, once for all plans.
template <typename Layer, typename Fold>
void fold_into(Layer& layer, const Scaling& scaling, const std::string& how, Weights& weights,
               const Fold& fold) {
  std::vector<at::Tensor> sources = layer.weight.parts();
  sources.push_back(layer.bias);
  sources.insert(sources.end(), scaling.sources.begin(), scaling.sources.end());
  const Folded folded = weights.folded(sources, text(how, " ", scaling.how), fold);
  layer.weight = folded.weight;
  layer.bias = folded.bias;
}

// Folds a scaling into the weights of its only reader; false if it cannot. A shift cannot be folded
// into a layer with padding, because padding has no shift.
bool fold_into_reader(const Rewrite& rewrite, const Node& node, const Scaling& scaling,
                      const Uses& uses, Weights& weights) {
  Node* reader = uses.only_reader(node.output());
  const Dims& dims = rewrite.meta(scaling.src).dims;
  const auto take = [&](auto& layer, std::int64_t dim) {
    if (scaling.dim != dim && scaling.dim != kAnyDim) return false;
    if (layer.weight.dtype() != rewrite.meta(scaling.src).dtype) return false;
    const Affine affine = scaling.part(0, dims[static_cast<std::size_t>(dim)]);
    fold_into(layer, scaling, "before", weights,
              [&] { return fold_before(layer.weight, layer.bias, affine); });
    reader->arguments[0] = {ValueRef{scaling.src}};
    return true;
  };
  if (!reader || reader->arguments[0].value() != node.output()) return false;
  if (auto* linear = reader->as<Linear>()) return take(*linear, std::ssize(dims) - 1);
  auto* c = reader->as<Convolution>();
  if (!c || c->transposed || c->groups != 1) return false;
  const bool pads = std::ranges::any_of(c->padding, [](std::int64_t pad) { return pad != 0; });
  return (!pads || scaling.affine.shift.eq(0).all().item<bool>()) && take(*c, 1);
}

// A layer whose outputs are channels [first, first + count) of the scaled value.
struct Part {
  Node* layer;
  std::int64_t first, count;
};

// Finds the layers that together make exactly the channels of `src` along `dim`. Looks through
// concats of channels, permutes, and reshapes that leave channels together.
class Makers {
 public:
  Makers(const Rewrite& rewrite, const Uses& uses) : rewrite_(rewrite), uses_(uses) {}

  // False if anything else makes some of the channels.
  bool find(Value src, std::int64_t dim, std::int64_t first = 0) {
    Node* maker = uses_.maker[Uses::at(src)];
    if (!maker || !uses_.only_reader(src)) return false;
    passed_.push_back(src);
    const Dims& dims = rewrite_.meta(src).dims;
    const std::int64_t last = std::ssize(dims) - 1;
    if (maker->as<Convolution>()) return add(maker, first, dims, dim, 1);
    if (maker->as<Linear>()) return add(maker, first, dims, dim, last);
    const std::int64_t joined = dim == kAnyDim ? 1 : dim;
    if (is_concat(*maker, joined, dims.size())) return find_all(*maker, dims, dim, first);
    const Value from = maker->outputs.size() == 1 ? maker->read(0) : kNone;
    if (from == kNone || maker->held.has_value()) return false;
    const Dims& before = rewrite_.meta(from).dims;
    if (const Dims order = order_of(*maker, before.size()); !order.empty()) {
      return find(from, dim == kAnyDim ? dim : order[static_cast<std::size_t>(dim)], first);
    }
    if (!is_reshape(*maker) || before.empty()) return false;
    if (dim == kAnyDim) return find(from, dim, first);
    if (dim == last && before.back() == dims.back()) {
      return find(from, std::ssize(before) - 1, first);
    }
    const bool keeps_channels =
        dim == 1 && before.size() > 2 && before[0] == dims[0] && before[1] == dims[1];
    return keeps_channels && find(from, 1, first);
  }

  const std::vector<Part>& parts() const { return parts_; }
  // The values between the scaling and these layers.
  std::span<const Value> between() const { return std::span(passed_).subspan(1); }

 private:
  bool add(Node* layer, std::int64_t first, const Dims& dims, std::int64_t dim,
           std::int64_t channel_dim) {
    if (dim != channel_dim && dim != kAnyDim) return false;
    parts_.push_back({layer, first, dims[static_cast<std::size_t>(channel_dim)]});
    return true;
  }

  bool find_all(const Node& concat, const Dims& dims, std::int64_t dim, std::int64_t first) {
    const auto joined = static_cast<std::size_t>(dim == kAnyDim ? 1 : dim);
    bool all = true;
    for_values(concat.arguments, [&](Value value) {
      const Dims& own = rewrite_.meta(value).dims;  // [0] joins tensors of any rank
      all = all && own.size() == dims.size() && find(value, dim, first);
      if (all) first += own[joined];
    });
    return all;
  }

  const Rewrite& rewrite_;
  const Uses& uses_;
  std::vector<Part> parts_;
  std::vector<Value> passed_;
};

// Folds a scaling into the weights of the layers that make its input; false if it cannot. Adds the
// values between them, which are scaled from now on, to `changed`.
bool fold_into_makers(const Rewrite& rewrite, const Scaling& scaling, const Uses& uses,
                      Weights& weights, std::set<Value>& changed) {
  Makers makers(rewrite, uses);
  const Meta& meta = rewrite.meta(scaling.src);
  if (meta.dims.size() < 2 || !makers.find(scaling.src, scaling.dim)) return false;
  for (const Part& part : makers.parts()) {
    const Affine affine = scaling.part(part.first, part.count);
    if (auto* c = part.layer->as<Convolution>()) {
      fold_into(*c, scaling, text("after ", c->transposed, " ", c->groups, " ", part.first),
                weights, [&] { return fold_after(*c, affine); });
    } else {
      auto& linear = *part.layer->as<Linear>();
      fold_into(linear, scaling, text("after ", part.first), weights,
                [&] { return fold_after(linear, affine); });
    }
    part.layer->name += " + " + scaling.word;
  }
  changed.insert(makers.between().begin(), makers.between().end());
  return true;
}

bool only_first_is_read(const Node& node, const Uses& uses) {
  return std::ranges::all_of(node.outputs | std::views::drop(1), [&](Value value) {
    return uses.readers[Uses::at(value)].empty() && !uses.is_output[Uses::at(value)];
  });
}

// Joins a scaling of images with the affine node that makes its input; false if there is none.
bool join_affine(const Scaling& scaling, const Uses& uses) {
  Node* maker = uses.maker[Uses::at(scaling.src)];
  auto* affine = maker ? maker->as<Affine>() : nullptr;
  if (!affine || !uses.only_reader(scaling.src)) return false;
  if (scaling.dim != 1 && scaling.dim != kAnyDim) return false;
  const Affine added = scaling.part(0, affine->scale.size(0));
  affine->scale = affine->scale.mul(added.scale);
  affine->shift = affine->shift.mul(added.scale).add(added.shift);
  return true;
}

// Whether a node may become an affine node: a scale and a shift of an image's channels.
bool is_affine(const Scaling& scaling, bool is_norm, const Meta& meta) {
  const bool scales = is_norm || scaling.word == "mul" || scaling.word == "div";
  return scales && scaling.dim == 1 && meta.dims.size() >= 3 && meta.dims.size() <= 5 &&
         norms_take(meta.dtype);
}

// Rounds the parameters of affine nodes, which were float64 so far.
void round_affines(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (auto* affine = node.as<Affine>()) {
      affine->scale = affine->scale.to(at::kFloat);
      affine->shift = affine->shift.to(at::kFloat);
    }
  }
}

// Folds scalings one after the other. Nodes are not removed until all is done.
class Folding {
 public:
  explicit Folding(Rewrite& rewrite) : rewrite_(rewrite), uses_(rewrite.graph) {}

  // First folds into the layers before, from the front, so that chains of scalings follow each
  // other. Then folds into the layers behind, from the back. The rest becomes affine nodes.
  void run() {
    auto& nodes = rewrite_.graph.nodes;
    for (Node& node : nodes) fold(node, &Folding::into_makers);
    for (Node& node : nodes | std::views::reverse) fold(node, &Folding::into_reader);
    for (Node& node : nodes) fold(node, &Folding::into_affine);
    round_affines(rewrite_.graph);
    sweep(rewrite_.graph);
    rename_changed();
  }

 private:
  void fold(Node& node, void (Folding::*into)(Node&, const Scaling&, bool)) {
    if (node.outputs.empty() || node.held.has_value()) return;
    const auto norm = find_batch_norm(rewrite_.graph, node, rewrite_.metas);
    const auto scaling = norm ? norm : find_scaling(rewrite_.graph, node, rewrite_.metas);
    if (!scaling || !only_first_is_read(node, uses_)) return;
    (this->*into)(node, *scaling, norm.has_value());
  }

  void into_makers(Node& node, const Scaling& scaling, bool) {
    if (fold_into_makers(rewrite_, scaling, uses_, rewrite_.weights, changed_)) {
      join(node, scaling.src);
    }
  }

  void into_reader(Node& node, const Scaling& scaling, bool) {
    if (!fold_into_reader(rewrite_, node, scaling, uses_, rewrite_.weights)) return;
    Node* reader = uses_.only_reader(node.output());
    std::ranges::replace(uses_.readers[Uses::at(scaling.src)], &node, reader);
    node.outputs.clear();
  }

  void into_affine(Node& node, const Scaling& scaling, bool is_norm) {
    if (join_affine(scaling, uses_)) {
      uses_.maker[Uses::at(scaling.src)]->name += " + " + scaling.word;
      join(node, scaling.src);
    } else if (is_affine(scaling, is_norm, rewrite_.meta(scaling.src))) {
      node.outputs.resize(1);  // without the statistics of training, which are empty
      node.become(nodes::affine, {{ValueRef{scaling.src}}}, scaling.affine);
    }
  }

  // The maker of `src` makes the node's result instead.
  void join(Node& node, Value src) {
    Node* maker = uses_.maker[Uses::at(src)];
    maker->outputs = {node.output()};
    uses_.maker[Uses::at(node.output())] = maker;
    node.outputs.clear();
  }

  // A value that is not what the model computed gets a number that no value of the model has:
  // whoever compares them must not meet it.
  void rename_changed() {
    for (Node& node : rewrite_.graph.nodes) {
      for (Value& value : node.outputs) {
        if (!changed_.contains(value)) continue;
        const Value fresh = add_value(rewrite_, rewrite_.meta(value));
        replace(rewrite_.graph, value, fresh);
        value = fresh;
      }
    }
  }

  Rewrite& rewrite_;
  Uses uses_;
  std::set<Value> changed_;
};

}  // namespace

void fold_scalings(Rewrite& rewrite) { Folding(rewrite).run(); }

}  // namespace torch_blocked::graph
