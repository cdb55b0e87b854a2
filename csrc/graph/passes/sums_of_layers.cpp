// Sums of layers that read the same image are one layer: a 3x3 convolution, a 1x1 and a scale of
// each channel, as RepVGG's blocks add them in the form in which they are trained, are a 3x3 whose
// weight is the sum of the three, the smaller ones in its middle. FastViT's mixers add and subtract
// five. What is scaled then, as by a layer scale, is scaled in the weight.
#include <ATen/ops/zeros.h>

#include "format/errors.h"
#include "graph/nodes/layers.h"
#include "graph/passes/rules.h"
#include "runtime/content_hash.h"

namespace torch_blocked::graph {
namespace {

constexpr auto kSumName = "aten::add", kDifferenceName = "aten::sub";

// A convolution or a scale and shift of each channel, that nothing but one sum reads.
struct Term {
  Node* node;
  double sign;  // with which it enters the sum

  const Convolution* convolution() const { return node->as<Convolution>(); }
  const Affine* affine() const { return node->as<Affine>(); }
  const at::Tensor& bias() const { return convolution() ? convolution()->bias : affine()->shift; }
};

// Tensors that tell a convolution from others for as long as the model's weights are kept.
std::vector<at::Tensor> tensors_of(const Convolution& c) {
  return {c.weight.source, c.weight.factors, c.bias};
}

// An affine is made anew for each plan: its numbers tell it from others.
std::string in_words(const Affine& affine) {
  return text(content_hash(affine.scale.contiguous()), " ",
              content_hash(affine.shift.contiguous()));
}

// Where the taps of a smaller kernel are among those of a larger one, along each spatial dim.
struct Place {
  Dims first, step, taps;
};

// Nothing if it has taps that the larger kernel lacks. A tap t reads pixel o * stride - padding +
// t * dilation for output o, so that strides must be the same.
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

// A scale of each channel as a 1x1 convolution, of as many groups as another.
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

// Adds the smaller weight, times a sign, to the part of the larger one where it has taps.
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
  // Layers of numbers alone, with nothing fused into them yet.
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

  // The sum as the layer of the first term, whose kernel holds that of the second.
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

  // A convolution in the place of a node that comes later than it.
  static void put(Node& place, const Node& layer, Convolution convolution) {
    const std::vector<Value> outputs = place.outputs;
    const Value src = layer.read(0);
    place = layer;
    place.outputs = outputs;
    place.become(nodes::convolution, {{ValueRef{src}}}, std::move(convolution));
  }

  // A scale and shift behind a convolution, which sums have left there.
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
