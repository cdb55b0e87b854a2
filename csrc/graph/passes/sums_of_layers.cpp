// Merges summed layers that read the same image into one layer. RepVGG's blocks, as they are
// trained, add a 3x3 convolution, a 1x1 convolution and a scale per channel. Together these are a
// 3x3 convolution: the three weights are summed, the smaller ones in the middle. FastViT's mixers
// add and subtract five layers. A scale behind the sum, such as a layer scale, goes into the
// weight.
#include <ATen/ops/zeros.h>

#include "format/errors.h"
#include "graph/nodes/layers.h"
#include "graph/passes/rules.h"
#include "runtime/content_hash.h"

namespace torch_blocked::graph {
namespace {

constexpr auto kSumName = "aten::add", kDifferenceName = "aten::sub";

// A convolution or an affine node that only one sum reads.
struct Term {
  Node* node;
  double sign;  // with which it enters the sum

  const Convolution* convolution() const { return node->as<Convolution>(); }
  const Affine* affine() const { return node->as<Affine>(); }
  const at::Tensor& bias() const { return convolution() ? convolution()->bias : affine()->shift; }
};

// Tensors that identify a convolution as long as the model's weights are kept.
std::vector<at::Tensor> tensors_of(const Convolution& c) {
  return {c.weight.source, c.weight.factors, c.bias};
}

// Affine nodes are made anew for each plan, so their numbers identify them.
std::string in_words(const Affine& affine) {
  return text(content_hash(affine.scale.contiguous()), " ",
              content_hash(affine.shift.contiguous()));
}

// Where a smaller kernel's taps lie among a larger kernel's, along each spatial dim.
struct Place {
  Dims first, step, taps;
};

// Nothing if the smaller kernel has taps that the larger one lacks. For output o, tap t reads pixel
// o * stride - padding + t * dilation, so the strides must be the same.
std::optional<Place> place_in(const Convolution& large, const Convolution& small) {
  Place place;
  for (std::size_t i = 0; i < large.stride.size(); ++i) {
    const std::int64_t taps = small.weight.sizes()[2 + i], step = large.dilation[i],
                       distance = taps > 1 ? small.dilation[i] : step,
                       first = large.padding[i] - small.padding[i];
    if (large.stride[i] != small.stride[i] || first < 0) return std::nullopt;
    if (first % step != 0 || distance % step != 0) return std::nullopt;
    const std::int64_t last = first / step + (taps - 1) * (distance / step);
    if (last >= large.weight.sizes()[2 + i]) return std::nullopt;
    place.first.push_back(first / step);
    place.step.push_back(distance / step);
    place.taps.push_back(taps);
  }
  return place;
}

// A scale per channel as a 1x1 convolution with as many groups as `like`.
Convolution as_convolution(const Affine& affine, const Convolution& like) {
  const std::int64_t channels = affine.scale.numel(), inputs = channels / like.groups;
  Dims sizes(like.stride.size() + 2, 1), none(like.stride.size(), 0), ones(like.stride.size(), 1);
  sizes[0] = channels;
  sizes[1] = inputs;
  const at::Tensor weight = at::zeros(sizes, affine.scale.options());
  const at::Tensor matrix = weight.view({like.groups, inputs, inputs});
  matrix.diagonal(0, 1, 2).copy_(affine.scale.view({like.groups, inputs}));
  Convolution result = like;
  result.weight = {weight};
  result.bias = affine.shift;
  result.stride = ones;
  result.padding = none;
  result.dilation = ones;
  result.padding_end = {};
  return result;
}

at::Tensor values_of(const Convolution& c) { return c.weight.values().to(at::kDouble); }

// Adds the smaller weight, times a sign, to the taps of the larger one at `place`.
void add_at(const at::Tensor& large, const Place& place, const at::Tensor& small, double sign) {
  at::Tensor part = large;
  for (std::size_t i = 0; i < place.first.size(); ++i) {
    const std::int64_t end = place.first[i] + (place.taps[i] - 1) * place.step[i] + 1;
    part = part.slice(static_cast<std::int64_t>(2 + i), place.first[i], end, place.step[i]);
  }
  part.add_(small, sign);
}

class Sums {
 public:
  explicit Sums(Rewrite& rewrite) : rewrite_(rewrite), uses_(rewrite.graph) {}

  // False if there is nothing to rewrite.
  bool rewrite_one() {
    for (Node& node : rewrite_.graph.nodes) {
      if (add_up(node) || scale_weight(node)) return true;
    }
    return false;
  }

 private:
  // Whether a node is a float32 layer with nothing fused into it yet.
  bool is_layer(const Node& node) const {
    if (rewrite_.meta(node.output()).dtype != at::kFloat || node.arguments.size() != 1)
      return false;
    if (const auto* affine = node.as<Affine>()) {
      return affine->activation.kind == Activated::kNone;
    }
    const auto* c = node.as<Convolution>();
    return c && !c->transposed && c->epilogue.empty();
  }

  std::optional<Term> term_of(const Node& sum, std::size_t argument, double sign) const {
    const Value value = sum.read(argument);
    Node* maker =
        value != kNone && uses_.only_reader(value) ? uses_.maker[Uses::at(value)] : nullptr;
    return maker && is_layer(*maker) ? std::optional(Term{maker, sign}) : std::nullopt;
  }

  bool add_up(Node& node) {
    const bool subtracts = node.name == kDifferenceName;
    if ((!subtracts && node.name != kSumName) || node.overload != "Tensor") return false;
    if (node.held.has_value() || number(node.arguments[2], 1) != 1) return false;
    const auto a = term_of(node, 0, 1), b = term_of(node, 1, subtracts ? -1 : 1);
    if (!a || !b || a->node == b->node || a->node->read(0) != b->node->read(0)) return false;
    const Meta& result = rewrite_.meta(node.output());
    if (rewrite_.meta(a->node->output()) != result) return false;
    if (rewrite_.meta(b->node->output()) != result) return false;
    return join(node, *a, *b) || join(node, *b, *a);
  }

  // Turns the sum into the layer of the first term, if its kernel contains that of the second.
  bool join(Node& node, const Term& large, const Term& small) {
    const Convolution* c = large.convolution();
    if (!c) return false;
    if (small.affine() && c->weight.sizes()[0] != c->weight.sizes()[1] * c->groups) return false;
    const Convolution other =
        small.affine() ? as_convolution(*small.affine(), *c) : *small.convolution();
    const auto place = c->groups == other.groups ? place_in(*c, other) : std::nullopt;
    if (!place) return false;
    std::vector<at::Tensor> sources = tensors_of(*c);
    std::string how = text("sum ", large.sign, " ", small.sign, place->first, place->step, " ");
    if (small.affine()) {
      how += in_words(*small.affine());
    } else {
      const std::vector<at::Tensor> more = tensors_of(other);
      sources.insert(sources.end(), more.begin(), more.end());
    }
    const auto total = [&]() -> Folded {
      const at::Tensor weight = values_of(*c).mul(large.sign);
      add_at(weight, *place, values_of(other), small.sign);
      at::Tensor bias = at::zeros({weight.size(0)}, weight.options());
      for (const Term& term : {large, small}) {
        if (term.bias().defined()) bias = bias.add(term.bias(), term.sign);
      }
      return {{weight.to(at::kFloat)}, bias.to(at::kFloat)};
    };
    const Folded folded = rewrite_.weights.folded(sources, how, total);
    Convolution sum = *c;
    sum.weight = folded.weight;
    sum.bias = folded.bias;
    put(node, *large.node, std::move(sum));
    large.node->outputs.clear();
    small.node->outputs.clear();
    sweep(rewrite_.graph);
    return true;
  }

  // Puts a convolution in the place of a later node.
  static void put(Node& place, const Node& layer, Convolution convolution) {
    const std::vector<Value> outputs = place.outputs;
    const Value src = layer.read(0);
    place = layer;
    place.outputs = outputs;
    place.become(nodes::convolution, {{ValueRef{src}}}, std::move(convolution));
  }

  // Folds a scale and a shift behind a convolution into it, once no sum stands between them any
  // more.
  bool scale_weight(Node& node) {
    if (!node.as<Affine>() || !is_layer(node)) return false;
    const auto term = term_of(node, 0, 1);
    const Convolution* c = term ? term->convolution() : nullptr;
    if (!c) return false;
    const Affine affine = *node.as<Affine>();
    Dims shape(c->weight.sizes().size(), 1);
    shape[0] = -1;
    const auto product = [&]() -> Folded {
      const at::Tensor scale = affine.scale.to(at::kDouble);
      at::Tensor bias = affine.shift.to(at::kDouble);
      if (c->bias.defined()) bias = bias.add(c->bias.to(at::kDouble).mul(scale));
      return {{values_of(*c).mul(scale.view(shape)).to(at::kFloat)}, bias.to(at::kFloat)};
    };
    const Folded folded =
        rewrite_.weights.folded(tensors_of(*c), text("scaled ", in_words(affine)), product);
    Convolution scaled = *c;
    scaled.weight = folded.weight;
    scaled.bias = folded.bias;
    Node& layer = *term->node;
    put(node, layer, std::move(scaled));
    layer.outputs.clear();
    sweep(rewrite_.graph);
    return true;
  }

  Rewrite& rewrite_;
  Uses uses_;
};

}  // namespace

void simplify_sums(Rewrite& rewrite) {
  while (Sums(rewrite).rewrite_one()) {
  }
}

}  // namespace torch_blocked::graph
