// Squeeze and excitation as one node: the mean over the spatial dims, one or two small layers
// (1x1 convolutions, or linear layers between views), a sigmoid, the product with what the mean is
// of, and what follows it pointwise. Source: "Squeeze-and-Excitation Networks" (arXiv 1709.01507).
#include <algorithm>
#include <array>
#include <string_view>

#include "graph/rules.h"

namespace torch_blocked::graph {
namespace {

// Views that only add or drop dims of size 1 from [N, C], and what repeats these.
constexpr std::array<std::string_view, 9> kViews{
    "aten::flatten", "aten::view",   "aten::reshape",   "aten::unflatten", "aten::unsqueeze",
    "aten::squeeze", "aten::expand", "aten::expand_as", "aten::contiguous"};

std::optional<Gate> gate_of(const Node& node) {
  if (node.name == "aten::sigmoid") return Gate::kSigmoid;
  if (node.name == "aten::hardsigmoid") return Gate::kHardsigmoid;
  return std::nullopt;
}

// A node as a layer from [N, I] to [N, O]; nothing if it is none.
std::optional<SqueezeExciteLayer> layer_of(const Node& node) {
  if (node.linear) {
    const Linear& linear = *node.linear;
    const auto is = [&](LinearActivation kind) { return linear.activation == kind; };
    if (is(LinearActivation::kGelu) || is(LinearActivation::kGeluTanh)) return std::nullopt;
    Activation activation;
    if (is(LinearActivation::kRelu)) {
      activation = {Activated::kClamp, 0, std::numeric_limits<float>::infinity()};
    }
    if (is(LinearActivation::kSilu)) activation = {Activated::kSilu};
    return SqueezeExciteLayer{linear.weight, linear.bias, activation};
  }
  if (!node.convolution) return std::nullopt;
  const Convolution& c = *node.convolution;
  const auto all = [](const auto& values, std::int64_t wanted) {
    return std::ranges::all_of(values, [&](std::int64_t value) { return value == wanted; });
  };
  const bool pointwise = !c.transposed && c.groups == 1 && !c.epilogue.residual &&
                         all(c.weight.sizes().slice(2), 1) && all(c.stride, 1) &&
                         all(c.padding, 0) && all(c.padding_end, 0);
  if (!pointwise) return std::nullopt;
  return SqueezeExciteLayer{c.weight, c.bias, c.epilogue.before};
}

// Whether a node is the mean over all spatial dims, whatever their sizes; find_means has made
// poolings of all such.
bool is_mean(const Node& node) {
  if (!node.name.starts_with("aten::adaptive_avg_pool")) return false;
  const auto sizes = integers(node.arguments[1], 1);
  return sizes && std::ranges::all_of(*sizes, [](std::int64_t size) { return size == 1; });
}

// From a gate back to the mean: nodes whose result nobody else reads.
class Chain {
 public:
  Chain(const Uses& uses, const std::vector<Meta>& metas, const Dims& image)
      : uses_(uses), metas_(metas), image_(image) {}

  // What the value `gate` comes from, as a node on `src`; nothing if it is no such chain.
  std::optional<SqueezeExcite> find(Value src, Value gate) {
    Node* node = maker(gate);
    if (!node || !gate_of(*node)) return std::nullopt;
    SqueezeExcite found{.src = src, .layers = {}, .gate = *gate_of(*node)};
    for (node = previous(*node); node && !is_mean(*node); node = previous(*node)) {
      Activation activation;  // after a linear layer: others are part of their layer
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

  // The nodes on the way, the mean first.
  std::vector<Node*> nodes() const { return {nodes_.rbegin(), nodes_.rend()}; }

 private:
  // Whether each layer takes what the one before makes, and all go from C to C.
  bool fits(const std::vector<SqueezeExciteLayer>& layers) const {
    std::int64_t channels = image_[1];
    for (const SqueezeExciteLayer& layer : layers) {
      if (layer.weight.size(1) != channels) return false;
      channels = layer.weight.size(0);
    }
    return !layers.empty() && channels == image_[1];
  }

  // The node that makes what the node reads, views skipped.
  Node* previous(const Node& node) {
    Value src = kNone;
    int count = 0;
    for_reads(node, [&](Value value) {
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
      if (std::ranges::find(kViews, std::string_view(node->name)) == kViews.end()) return node;
      if (!is_pixel(node->arguments[0].value())) return nullptr;
      value = node->arguments[0].value();
    }
  }

  // Whether a value is [N, C'] and ones.
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
    const bool view = std::ranges::find(kViews, std::string_view(nodes[i]->name)) != kViews.end();
    if (!view) name = joined_name(name, *nodes[i]);
  }
  return joined_name(name, product);
}

void find_one(Node& product, const Uses& uses, const std::vector<Meta>& metas) {
  if (product.name != "aten::mul" || product.overload != "Tensor") return;
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
    product.kind = Kind::kSqueezeExcite;
    product.name = name_of(chain.nodes(), product);
    product.squeeze_excite = std::move(found);
    product.arguments.clear();
    for (Node* node : chain.nodes()) node->outputs.clear();
    return;
  }
}

// Activations and a sum after the product; the last of these takes its place.
void fuse_epilogues(Graph& graph, const Uses& uses, const std::vector<Meta>& metas) {
  for (Node& node : graph.nodes) {
    if (!node.squeeze_excite || node.outputs.empty()) continue;
    Node* reader = uses.only_reader(node.output());
    if (!reader || reader->kind != Kind::kPointwise) continue;
    SqueezeExcite fused = *node.squeeze_excite;
    if (!join_epilogue(graph, *reader, node.output(), metas, fused.epilogue, fused.residual)) {
      continue;
    }
    reader->kind = Kind::kSqueezeExcite;
    reader->name = joined_name(node.name, *reader);
    reader->squeeze_excite = std::move(fused);
    reader->arguments.clear();
    node.outputs.clear();
  }
}

}  // namespace

void find_squeeze_excites(Graph& graph, const std::vector<Meta>& metas) {
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (!node.outputs.empty()) find_one(node, uses, metas);
  }
  fuse_epilogues(graph, uses, metas);
  sweep(graph);
}

SqueezeExciteProblem problem_of(const SqueezeExcite& node, const Dims& dims, std::int64_t format) {
  SqueezeExciteProblem problem{
      .dims = dims, .block = format, .layers = {}, .gate = node.gate, .epilogue = node.epilogue};
  for (const SqueezeExciteLayer& layer : node.layers) {
    problem.layers.push_back({layer.weight.size(1), layer.weight.size(0), layer.activation});
  }
  return problem;
}

}  // namespace torch_blocked::graph
