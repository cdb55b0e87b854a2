// Turns linear layers of tokens into 1x1 convolutions where the tokens are the pixels of a
// neighbouring image. A permutation and a reshape, in either order, lead from tokens [N, L, C] to
// an image [N, C, *spatial], or back. As a convolution, a layer next to them runs in the format and
// the rows of its neighbours. Examples are the two layers around SegFormer's depthwise convolution,
// and those in front of its upsampling.
#include <array>

#include "graph/nodes/layers.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

constexpr std::size_t kTokens = 3;  // dims of [N, L, C]

bool permutes_to_last(const Node& node, std::size_t rank) {
  return order_of(node, rank) == order_to_last(rank);
}
bool permutes_from_last(const Node& node, std::size_t rank) {
  return order_of(node, rank) == order_from_last(rank);
}

class TokenLayers {
 public:
  explicit TokenLayers(Rewrite& rewrite) : rewrite_(rewrite), uses_(rewrite.graph) {}

  // False if there is no layer to rewrite.
  bool rewrite_one() {
    for (Node& node : rewrite_.graph.nodes) {
      if (!node.as<Linear>() || dims(node.output()).size() != kTokens) continue;
      if (before_image(node) || after_image(node)) return true;
    }
    return false;
  }

 private:
  const Dims& dims(Value value) const { return rewrite_.meta(value).dims; }

  // Whether an image of these dims has such tokens as its pixels, with as many channels.
  static bool are_pixels(const Dims& image, const Dims& tokens) {
    return image.size() > kTokens && image.size() <= 5 && image[0] == tokens[0] &&
           image[1] == tokens[2] && c10::multiply_integers(image) == c10::multiply_integers(tokens);
  }

  // The two views from tokens to an image, if nobody else reads the tokens or the value in between.
  std::optional<std::array<Node*, 2>> views_to_image(Value tokens) const {
    Node* first = uses_.only_reader(tokens);
    Node* second = first && moves(*first) ? uses_.only_reader(first->output()) : nullptr;
    if (!second || !moves(*second)) return std::nullopt;
    const Dims &from = dims(tokens), &between = dims(first->output()), &to = dims(second->output());
    if (!are_pixels(to, from)) return std::nullopt;
    const bool permuted_first = permutes_to_last(*first, kTokens) && is_reshape(*second);
    const bool permuted_last = is_reshape(*first) && between.size() == to.size() &&
                               between.back() == from[2] && permutes_from_last(*second, to.size());
    if (!permuted_first && !permuted_last) return std::nullopt;
    return std::array{first, second};
  }

  // The two views from an image to tokens.
  std::optional<std::array<Node*, 2>> views_to_tokens(Value tokens) const {
    Node* second = uses_.only_reader(tokens) ? uses_.maker[Uses::at(tokens)] : nullptr;
    if (!second || !moves(*second) || !uses_.only_reader(second->read(0))) return std::nullopt;
    Node* first = uses_.maker[Uses::at(second->read(0))];
    if (!first || !moves(*first)) return std::nullopt;
    const Dims &from = dims(first->read(0)), &between = dims(first->output()), &to = dims(tokens);
    if (to.size() != kTokens || !are_pixels(from, to)) return std::nullopt;
    const bool permuted_last =
        is_reshape(*first) && between.size() == kTokens && permutes_to_last(*second, kTokens);
    const bool permuted_first = permutes_to_last(*first, from.size()) && is_reshape(*second);
    if (!permuted_first && !permuted_last) return std::nullopt;
    return std::array{first, second};
  }

  bool moves(const Node& node) const {
    return !node.held.has_value() && node.outputs.size() == 1 && node.read(0) != kNone;
  }

  // linear, activation or none, views -> views, convolution, activation. Only if the layer reads no
  // more channels than it makes, so that the smaller image is reordered.
  bool before_image(Node& linear) {
    Node* reader = uses_.only_reader(linear.output());
    const bool acts = reader && !reader->held.has_value() && find_activation(*reader);
    const auto views = views_to_image((acts ? *reader : linear).output());
    const Meta tokens = rewrite_.meta(linear.read(0));
    if (!views || tokens.dims[2] > dims(linear.output())[2]) return false;
    const auto [first, last] = *views;
    const Meta image = rewrite_.meta(last->output());
    Meta src = image;
    src.dims[1] = tokens.dims[2];
    std::vector<Node> nodes;
    nodes.push_back(permuted(linear, linear.read(0), tokens));
    nodes.push_back(reshaped(linear, nodes.back().output(), src));
    nodes.push_back(convolution_of(linear, nodes.back().output(), image));
    std::vector<Node*> places{&linear};
    if (acts) {
      Node activation = *reader;
      activation.arguments[0] = {ValueRef{nodes.back().output()}};
      nodes.push_back(std::move(activation));
      places.push_back(reader);
    }
    nodes.back().outputs = last->outputs;
    places.insert(places.end(), {first, last});
    put(places, nodes);
    return true;
  }

  // views, linear -> convolution, views. Only if the layer makes no more channels than it reads.
  bool after_image(Node& linear) {
    const auto views = views_to_tokens(linear.read(0));
    const Meta tokens = rewrite_.meta(linear.output());
    if (!views || tokens.dims[2] > dims(linear.read(0))[2]) return false;
    const auto [first, last] = *views;
    Meta image = rewrite_.meta(first->read(0)), rows = tokens;
    image.dims[1] = tokens.dims[2];
    std::swap(rows.dims[1], rows.dims[2]);
    std::vector<Node> nodes;
    nodes.push_back(convolution_of(linear, first->read(0), image));
    nodes.push_back(reshaped(linear, nodes.back().output(), rows));
    nodes.push_back(permuted(linear, nodes.back().output(), rows));
    nodes.back().outputs = linear.outputs;
    put({first, last, &linear}, nodes);
    return true;
  }

  // Puts nodes in the places of as many others, in the same order.
  static void put(const std::vector<Node*>& places, std::vector<Node>& nodes) {
    for (std::size_t i = 0; i < places.size(); ++i) *places[i] = std::move(nodes[i]);
  }

  Node view(const char* name, const char* overload, const Node& like, Value src, const Meta& meta) {
    return {.name = name,
            .overload = overload,
            .arguments = {{ValueRef{src}}},
            .outputs = {add_value(rewrite_, meta)},
            .origin = like.origin};
  }

  // [N, A, B] -> [N, B, A]
  Node permuted(const Node& like, Value src, Meta meta) {
    std::swap(meta.dims[1], meta.dims[2]);
    Node node = view("aten::transpose", "int", like, src, meta);
    for (const std::int64_t dim : {1, 2}) node.arguments.push_back({c10::IValue(dim)});
    return node;
  }

  Node reshaped(const Node& like, Value src, const Meta& meta) {
    Node node = view("aten::reshape", "", like, src, meta);
    const c10::IValue dims(meta.dims);
    node.arguments.push_back({dims});
    return node;
  }

  Node convolution_of(const Node& linear, Value src, const Meta& meta) {
    Node node = linear;
    node.outputs = {add_value(rewrite_, meta)};
    node.become(nodes::convolution, {{ValueRef{src}}},
                as_convolution(*linear.as<Linear>(), meta.dims.size()));
    return node;
  }

  Rewrite& rewrite_;
  Uses uses_;
};

}  // namespace

bool join_token_layers(Rewrite& rewrite) {
  bool changed = false;
  while (TokenLayers(rewrite).rewrite_one()) changed = true;
  return changed;
}

}  // namespace torch_blocked::graph
