// Squeeze and excitation as one node: the mean of an image over the spatial dims, one or two small
// layers (1x1 convolutions, or linear layers between views), a sigmoid, the product with the image,
// and pointwise ops that follow. Source: "Squeeze-and-Excitation Networks" (arXiv 1709.01507).
#include "ops/images/squeeze_excite.h"

#include "format/errors.h"
#include "graph/nodes/layers.h"
#include "graph/planning/planner.h"

namespace torch_blocked::graph {
namespace {

struct Layer {
  Weight weight;  // [O, I, ...ones]
  at::Tensor bias;
  Activation activation;
};

// src times a gate per channel. The layers run one after the other on the means of src over the
// spatial dims, and `gate` is applied to their result.
struct SqueezeExcite {
  std::vector<Layer> layers;
  Gate gate;
  Epilogue epilogue = {};
};

// Ops that may stand between the layers. On [N, C] they only add, drop or expand dims of size 1.
bool is_view(const Node& node) {
  return is_reshape(node) || is_any(node, {"aten::unsqueeze", "aten::squeeze", "aten::expand",
                                           "aten::expand_as", "aten::contiguous"});
}

std::optional<Gate> gate_of(const Node& node) {
  if (node.name == "aten::sigmoid") return Gate::kSigmoid;
  if (node.name == "aten::hardsigmoid") return Gate::kHardsigmoid;
  return std::nullopt;
}

// A node as a layer from [N, I] to [N, O]; nothing if it is no such layer.
std::optional<Layer> layer_of(const Node& node) {
  if (const auto* layer = node.as<Linear>()) {
    if (layer->epilogue.residual) return std::nullopt;
    return Layer{layer->weight, layer->bias, layer->epilogue.before};
  }
  if (!node.as<Convolution>()) return std::nullopt;
  const Convolution& c = *node.as<Convolution>();
  const auto all = [](const auto& values, std::int64_t wanted) {
    return std::ranges::all_of(values, [&](std::int64_t value) { return value == wanted; });
  };
  const bool pointwise = !c.transposed && c.groups == 1 && !c.epilogue.residual &&
                         all(c.weight.sizes().slice(2), 1) && all(c.stride, 1) &&
                         all(c.padding, 0) && all(c.padding_end, 0);
  if (!pointwise) return std::nullopt;
  return Layer{c.weight, c.bias, c.epilogue.before};
}

// Whether a node is the mean over all spatial dims, whatever their sizes. find_means has turned all
// such means into poolings.
bool is_mean(const Node& node) {
  if (!node.name.starts_with("aten::adaptive_avg_pool")) return false;
  const auto sizes = integers(node.arguments[1], 1);
  return sizes && std::ranges::all_of(*sizes, [](std::int64_t size) { return size == 1; });
}

// Walks from a gate back to the mean, along nodes whose results nobody else reads.
class Chain {
 public:
  Chain(const Uses& uses, const std::vector<Meta>& metas, const Dims& image)
      : uses_(uses), metas_(metas), image_(image) {}

  // The chain that computes the value `gate`, as squeeze and excitation of `src`; nothing if there
  // is none.
  std::optional<SqueezeExcite> find(Value src, Value gate) {
    Node* node = maker(gate);
    if (!node || !gate_of(*node)) return std::nullopt;
    SqueezeExcite found{.layers = {}, .gate = *gate_of(*node)};
    for (node = previous(*node); node && !is_mean(*node); node = previous(*node)) {
      Activation activation;  // after a linear layer: convolutions have theirs in the epilogue
      if (const auto own = find_activation(*node); own && !layer_of(*node)) {
        activation = *own;
        node = previous(*node);
      }
      auto layer = node ? layer_of(*node) : std::nullopt;
      if (!layer) return std::nullopt;
      if (activation.kind != Activated::kNone) {
        if (layer->activation.kind != Activated::kNone) return std::nullopt;
        layer->activation = activation;
      }
      found.layers.insert(found.layers.begin(), *std::move(layer));
    }
    if (!node || node->arguments[0].value() != src || !fits(found.layers)) return std::nullopt;
    return found;
  }

  // The nodes of the chain, the mean first.
  std::vector<Node*> nodes() const { return {nodes_.rbegin(), nodes_.rend()}; }

 private:
  // Whether each layer takes the channels that the one before makes, and all together go from C to
  // C.
  bool fits(const std::vector<Layer>& layers) const {
    std::int64_t channels = image_[1];
    for (const Layer& layer : layers) {
      if (layer.weight.sizes()[1] != channels) return false;
      channels = layer.weight.sizes()[0];
    }
    return !layers.empty() && channels == image_[1];
  }

  // The maker of the only value that a node reads; views are skipped.
  Node* previous(const Node& node) {
    Value src = kNone;
    int count = 0;
    for_values(node.arguments, [&](Value value) {
      src = value;
      ++count;
    });
    return count == 1 ? maker(src) : nullptr;
  }

  Node* maker(Value value) {
    for (;;) {
      Node* node = uses_.maker[Uses::at(value)];
      if (!node || !uses_.only_reader(value) || node->outputs.size() != 1) return nullptr;
      nodes_.push_back(node);
      if (!is_view(*node)) return node;
      if (!is_pixel(node->arguments[0].value())) return nullptr;
      value = node->arguments[0].value();
    }
  }

  // Whether a value's dims are [N, C'], followed by ones.
  bool is_pixel(Value value) const {
    if (value == kNone) return false;
    const Dims& dims = metas_[Uses::at(value)].dims;
    return dims.size() >= 2 && dims[0] == image_[0] &&
           c10::multiply_integers(dims) == dims[0] * dims[1];
  }

  const Uses& uses_;
  const std::vector<Meta>& metas_;
  const Dims& image_;
  std::vector<Node*> nodes_;
};

std::string name_of(const std::vector<Node*>& nodes, const Node& product) {
  std::string name = nodes[0]->name;
  for (std::size_t i = 1; i < nodes.size(); ++i) {
    if (!is_view(*nodes[i])) name = joined_name(name, *nodes[i]);
  }
  return joined_name(name, product);
}

void find_one(Node& product, const Uses& uses, const std::vector<Meta>& metas) {
  if (product.name != "aten::mul" || product.overload != "Tensor") return;
  if (product.held.has_value()) return;  // by a constant
  const auto& [dims, dtype] = metas[Uses::at(product.output())];
  if (dims.size() < 3 || dims.size() > 5 || dtype != at::kFloat) return;
  for (const std::size_t i : {0, 1}) {
    const Value src = product.arguments[i].value(), gate = product.arguments[1 - i].value();
    if (src == kNone || gate == kNone || metas[Uses::at(src)].dims != dims) continue;
    const Dims& gate_dims = metas[Uses::at(gate)].dims;
    if (gate_dims.size() != dims.size() || gate_dims[1] != dims[1]) continue;
    Chain chain(uses, metas, dims);
    auto found = chain.find(src, gate);
    if (!found) continue;
    product.name = name_of(chain.nodes(), product);
    product.become(nodes::squeeze_excite, {{ValueRef{src}}}, *std::move(found));
    for (Node* node : chain.nodes()) node->outputs.clear();
    return;
  }
}

// Fuses activations and a sum after the product. The node then runs in the place of the last of
// these.
void fuse_epilogues(Rewrite& rewrite, const Uses& uses) {
  for (Node& node : rewrite.graph.nodes) {
    const auto* found = node.as<SqueezeExcite>();
    if (!found || node.outputs.empty()) continue;
    Node* reader = uses.only_reader(node.output());
    if (!reader || !reader->is(nodes::pointwise)) continue;
    SqueezeExcite fused = *found;
    Value residual = node.read(1);
    if (!join_epilogue(rewrite.graph, *reader, node.output(), rewrite.metas, fused.epilogue,
                       residual)) {
      continue;
    }
    reader->name = joined_name(node.name, *reader);
    reader->origin = node.origin;
    reader->become(nodes::squeeze_excite, with_residual(node.read(0), residual), std::move(fused));
    node.outputs.clear();
  }
}

void combine(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    if (!node.outputs.empty()) find_one(node, uses, rewrite.metas);
  }
  fuse_epilogues(rewrite, uses);
  sweep(rewrite.graph);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {metas[Uses::at(node.read(0))]};
}

double cost(Planner&, const Node&, Format format) { return format == kPlain ? kImpossible : 0; }

SqueezeExciteProblem problem_of(const SqueezeExcite& node, const SlotPlan& dst) {
  SqueezeExciteProblem problem{.dims = dst.dims,
                               .format = dst.format,
                               .layers = {},
                               .gate = node.gate,
                               .epilogue = node.epilogue,
                               .dtype = dst.dtype};
  for (const Layer& layer : node.layers) {
    problem.layers.push_back({layer.weight.sizes()[1], layer.weight.sizes()[0], layer.activation});
  }
  return problem;
}

Prepared prepare(const Step& step, const Running& running) {
  const SqueezeExcite& node = *step.node->as<SqueezeExcite>();
  const Slot dst = step.writes[0], src = step.reads.at(step.node->read(0));
  const std::optional<Slot> residual =
      step.node->read(1) == kNone ? std::nullopt : std::optional(step.reads.at(step.node->read(1)));
  auto plan = plan_squeeze_excite(problem_of(node, running.plan.slots[dst]));
  std::vector<at::Tensor> all;
  for (const auto& [weight, bias, activation] : node.layers) {
    all.insert(all.end(), {weight.source, weight.factors, bias});
  }
  const at::Tensor packed = running.weights.get(*step.node, all, plan.weights_format, [&] {
    std::vector<SqueezeExciteLayer> layers;
    for (const auto& [weight, bias, activation] : node.layers) {
      layers.push_back({weight.values(), bias, activation});
    }
    return plan.pack(layers);
  });
  return {[&tensors = running.tensors, run = std::move(plan.run), packed, src, residual, dst] {
            run({.src = tensors[src].const_data_ptr(),
                 .residual = residual ? tensors[*residual].const_data_ptr() : nullptr,
                 .weights = packed.const_data_ptr<float>(),
                 .dst = tensors[dst].mutable_data_ptr()});
          },
          true};
}

void release(Node& node) {
  for (Layer& layer : node.as<SqueezeExcite>()->layers) {
    for (at::Tensor* each : {&layer.weight.source, &layer.weight.factors, &layer.bias}) {
      drop_memory(*each);
    }
  }
}

std::string why(const Step& step) {
  return text("squeeze and excitation in one step, ", step.node->as<SqueezeExcite>()->layers.size(),
              " layers");
}

}  // namespace

constinit const NodeKind nodes::squeeze_excite = {
    .name = "squeeze_excite",
    .combine = combine,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .prefers_blocks = true,
    .cost = cost,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = by_torch_blocked,
    .why = why,
    .release = release,
};

}  // namespace torch_blocked::graph
