// Rewrites matrix products (mm, bmm, addmm, baddbmm, einsum, linear with a computed weight) as the
// ops that kinds of nodes look for: a linear layer if one side is constant, a 1x1 convolution if
// that is the left one, and matmul otherwise.
#include <algorithm>
#include <iterator>
#include <string>

#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

// Letters of dims.
using Letters = std::string;

// The letters for dims that an equation abbreviates as "...".
constexpr std::string_view kDots = "01234567";

bool has_letter(const Letters& letters, char letter) {
  return letters.find(letter) != Letters::npos;
}

std::size_t dots_of(const Letters& letters) {
  return static_cast<std::size_t>(
      std::ranges::count_if(letters, [](char c) { return has_letter(Letters(kDots), c); }));
}

// An einsum's equation, such as "bhid,bhjd->bhij".
struct Equation {
  Letters left, right, result = {};
  // Letters that are in all three, not in the result, and in one side and the result.
  Letters batch = {}, summed = {}, of_left = {}, of_right = {};
};

// Replaces "..." by as many letters of kDots as the rank requires. It takes them from the end, so
// that the dims of both sides align at the last.
Letters without_dots(Letters letters, std::size_t rank) {
  const std::size_t dots = letters.find("...");
  if (dots == Letters::npos) return letters;
  const std::size_t count = rank - std::min(rank, letters.size() - 3);
  return letters.replace(dots, 3,
                         Letters(kDots).substr(kDots.size() - std::min(count, kDots.size())));
}

// Nothing for equations that are no matrix product: a letter twice on one side, a sum over one side
// alone, an outer product.
std::optional<Equation> parse(std::string text, std::size_t left_rank, std::size_t right_rank) {
  std::erase(text, ' ');
  const std::size_t comma = text.find(','), arrow = text.find("->");
  if (comma == std::string::npos || text.find(',', comma + 1) != std::string::npos) return {};
  Equation e{.left = text.substr(0, comma), .right = text.substr(comma + 1)};
  if (arrow != std::string::npos) {
    e.right = text.substr(comma + 1, arrow - comma - 1);
    e.result = text.substr(arrow + 2);
  } else {
    if (text.find('.') != std::string::npos) return {};
    Letters all = e.left + e.right;
    std::ranges::sort(all);
    std::ranges::copy_if(all, std::back_inserter(e.result),
                         [&](char letter) { return std::ranges::count(all, letter) == 1; });
  }
  e.left = without_dots(e.left, left_rank);
  e.right = without_dots(e.right, right_rank);
  e.result =
      without_dots(e.result, e.result.size() - 3 + std::max(dots_of(e.left), dots_of(e.right)));
  for (Letters letters : {e.left, e.right, e.result}) {
    std::ranges::sort(letters);
    const bool once = std::ranges::adjacent_find(letters) == letters.end();
    const auto is_letter = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || has_letter(Letters(kDots), c);
    };
    if (!once || !std::ranges::all_of(letters, is_letter)) return {};
  }
  const auto is_there = [&](char letter) {
    return has_letter(e.left, letter) || has_letter(e.right, letter);
  };
  if (!std::ranges::all_of(e.result, is_there)) return {};
  for (const char letter : e.left) {
    const bool both = has_letter(e.right, letter), stays = has_letter(e.result, letter);
    if (!both && !stays) return {};
    (both ? stays ? e.batch : e.summed : e.of_left) += letter;
  }
  for (const char letter : e.right) {
    if (has_letter(e.left, letter)) continue;
    if (!has_letter(e.result, letter)) return {};
    e.of_right += letter;
  }
  return e.summed.empty() ? std::nullopt : std::optional(std::move(e));
}

class ProductOps {
 public:
  explicit ProductOps(Rewrite& rewrite) : rewrite_(rewrite) {}

  void rewrite_all() {
    std::vector<Node> nodes = std::move(rewrite_.graph.nodes);
    for (Node& node : nodes) {
      origin_ = node.origin;
      if (!node.outputs.empty() && of_floats(node) && rewritten(node)) {
        made_.back().outputs = node.outputs;
      } else {
        const bool dequantizes = node.name.find("dequantize") != std::string::npos;
        if (dequantizes || widens_bytes(rewrite_.graph, node)) {
          bytes_[node.output()] = dequantizes ? nullptr : constant(node.read(0));
        }
        made_.push_back(std::move(node));
      }
    }
    rewrite_.graph.nodes = std::move(made_);
  }

 private:
  const Dims& dims(Value value) const { return rewrite_.meta(value).dims; }
  const at::Tensor* constant(Value value) const {
    const auto found = rewrite_.graph.constants.find(value);
    return found == rewrite_.graph.constants.end() ? nullptr : &found->second;
  }

  bool of_floats(const Node& node) const {
    const at::ScalarType dtype = rewrite_.meta(node.output()).dtype;
    bool all = dtype == at::kFloat || dtype == at::kBFloat16;
    for_values(node.arguments, [&](Value value) { all &= rewrite_.meta(value).dtype == dtype; });
    return all && node.outputs.size() == 1 && node.overload.empty();
  }

  // The last node made has the result.
  bool rewritten(const Node& node) {
    if (node.name == "aten::einsum") return einsum(node);
    if (is_any(node, {"aten::mm", "aten::bmm", "aten::matmul"})) {
      const Value left = node.read(0), right = node.read(1);
      if (left == kNone || right == kNone) return false;
      if (dims(left).size() < 2 || dims(right).size() < 2) return false;
      product(left, right);
      return true;
    }
    if (is_any(node, {"aten::addmm", "aten::baddbmm"})) return sum(node);
    return node.name == "aten::linear" && linear(node);
  }

  // (self, left, right, beta, alpha). With beta 0, self is ignored, even if it is NaN.
  bool sum(const Node& node) {
    const Value self = node.read(0), left = node.read(1), right = node.read(2);
    const bool known = self != kNone && left != kNone && right != kNone &&
                       is_real(node.arguments[3]) && is_real(node.arguments[4]);
    if (!known) return false;
    const double beta = number(node.arguments[3], 1), alpha = number(node.arguments[4], 1);
    const Value product_only = product(left, right);
    const Meta meta = rewrite_.meta(product_only);
    Node& last = made_.back();
    const at::Tensor* bias = constant(self);
    if (last.name == "aten::linear" && bias && bias->dim() == 1 && alpha == 1 && beta == 1 &&
        bias->size(0) == meta.dims.back()) {
      last.arguments[2] = {ValueRef{self}};
      return true;
    }
    Value result = product_only;
    if (alpha != 1) {
      result = make("aten::mul", "Tensor", {{ValueRef{result}}, {c10::IValue(alpha)}}, meta);
    }
    if (beta != 0) {
      make("aten::add", "Tensor", {{ValueRef{result}}, {ValueRef{self}}, {c10::IValue(beta)}},
           meta);
    }
    return true;
  }

  // A linear layer whose weight is computed, but not dequantized from bytes.
  bool linear(const Node& node) {
    const Value src = node.read(0), weight = node.read(1), bias = node.read(2);
    if (src == kNone || weight == kNone || constant(weight)) return false;
    if (bytes_.contains(weight)) return false;
    if (dims(src).size() < 2 || dims(weight).size() != 2) return false;
    if (bias == kNone && !is_none(node.arguments[2])) return false;
    const Value result = product(src, permuted(weight, {1, 0}));
    if (bias != kNone) {
      const Meta meta = rewrite_.meta(result);
      make("aten::add", "Tensor",
           {{ValueRef{result}}, {ValueRef{bias}}, {c10::IValue(std::int64_t{1})}}, meta);
    }
    return true;
  }

  bool einsum(const Node& node) {
    const auto* operands = std::get_if<std::vector<Argument>>(&node.arguments[1].held);
    if (!operands || operands->size() != 2 || !node.arguments[0].is_constant()) return false;
    Value left = (*operands)[0].value(), right = (*operands)[1].value();
    if (left == kNone || right == kNone) return false;
    auto equation = parse(std::string(node.arguments[0].constant().toStringView()),
                          dims(left).size(), dims(right).size());
    if (!equation) return false;
    Equation& e = *equation;
    if (e.left.size() != dims(left).size() || e.right.size() != dims(right).size()) return false;
    for (std::size_t i = 0; i < e.left.size(); ++i) {
      const std::size_t at = e.right.find(e.left[i]);
      if (at != Letters::npos && dims(right)[at] != dims(left)[i]) return false;
    }
    if (constant(left) && e.batch.empty()) {
      std::swap(left, right);
      std::swap(e.left, e.right);
      std::swap(e.of_left, e.of_right);
    }
    contract(e, left, right);
    return true;
  }

  // Makes nodes that reshape each side to matrices, multiply them, and split and order the dims of
  // the product.
  void contract(const Equation& e, Value left, Value right) {
    std::map<char, std::int64_t> sizes;
    for (std::size_t i = 0; i < e.left.size(); ++i) sizes[e.left[i]] = dims(left)[i];
    for (std::size_t i = 0; i < e.right.size(); ++i) sizes[e.right[i]] = dims(right)[i];
    const auto sizes_of = [&](const Letters& letters) {
      Dims all;
      for (const char letter : letters) all.push_back(sizes[letter]);
      return all;
    };
    const auto matrices = [&](Value value, const Letters& from, const Letters& rows,
                              const Letters& columns) {
      const Value ordered = reordered(value, from, e.batch + rows + columns);
      Dims shape = sizes_of(e.batch);
      shape.push_back(c10::multiply_integers(sizes_of(rows)));
      shape.push_back(c10::multiply_integers(sizes_of(columns)));
      return reshaped(ordered, shape);
    };
    const Value result = product(matrices(left, e.left, e.of_left, e.summed),
                                 matrices(right, e.right, e.summed, e.of_right));
    const Letters letters = e.batch + e.of_left + e.of_right;
    const Value apart = reshaped(result, sizes_of(letters));
    reordered(apart, letters, e.result);
  }

  // The product of left [..., M, K] and right [..., K, N].
  Value product(Value left, Value right) {
    Meta meta = rewrite_.meta(left);
    if (const at::Tensor* weight = constant(right);
        weight && weight->dim() == 2 && !constant(left)) {
      meta.dims.back() = dims(right)[1];
      const Value transposed = add_constant(rewrite_, weight->t());
      return make("aten::linear", "", {{ValueRef{left}}, {ValueRef{transposed}}, {c10::IValue()}},
                  meta);
    }
    if (const auto bytes = bytes_.find(right);
        bytes != bytes_.end() && bytes->second && !constant(left)) {
      meta.dims.back() = dims(right)[1];
      const Value transposed = add_constant(rewrite_, bytes->second->t());
      const Meta numbers{{dims(right)[1], dims(right)[0]}, at::kFloat};
      const Value weight = make("aten::to", "dtype",
                                {{ValueRef{transposed}},
                                 {c10::IValue(static_cast<std::int64_t>(at::kFloat))},
                                 {c10::IValue(false)},
                                 {c10::IValue(false)},
                                 {c10::IValue()}},
                                numbers);
      return make("aten::linear", "", {{ValueRef{left}}, {ValueRef{weight}}, {c10::IValue()}},
                  meta);
    }
    if (const at::Tensor* weight = constant(left);
        weight && weight->dim() == 2 && dims(right).size() == 3 && !constant(right)) {
      meta.dims = {dims(right)[0], dims(left)[0], dims(right)[2]};
      const Value taps = add_constant(rewrite_, weight->unsqueeze(-1));
      const auto one = [](std::int64_t number) {
        return Argument{c10::IValue(std::vector<std::int64_t>{number})};
      };
      return make("aten::conv1d", "",
                  {{ValueRef{right}},
                   {ValueRef{taps}},
                   {c10::IValue()},
                   one(1),
                   one(0),
                   one(1),
                   {c10::IValue(std::int64_t{1})}},
                  meta);
    }
    meta.dims = matmul_dims(dims(left), dims(right));
    return make("aten::matmul", "", {{ValueRef{left}}, {ValueRef{right}}}, meta);
  }

  Value make(const char* name, const char* overload, std::vector<Argument> arguments,
             const Meta& meta) {
    made_.push_back({.name = name,
                     .overload = overload,
                     .arguments = std::move(arguments),
                     .outputs = {add_value(rewrite_, meta)},
                     .origin = origin_});
    return made_.back().output();
  }

  Value reordered(Value value, const Letters& from, const Letters& to) {
    Dims order;
    for (const char letter : to) order.push_back(static_cast<std::int64_t>(from.find(letter)));
    return permuted(value, order);
  }

  Value permuted(Value value, const Dims& order) {
    if (std::ranges::is_sorted(order)) return value;
    if (const at::Tensor* tensor = constant(value)) {
      return add_constant(rewrite_, tensor->permute(order));
    }
    Meta meta = rewrite_.meta(value);
    for (std::size_t i = 0; i < order.size(); ++i) {
      meta.dims[i] = dims(value)[static_cast<std::size_t>(order[i])];
    }
    return make("aten::permute", "", {{ValueRef{value}}, {c10::IValue(order)}}, meta);
  }

  Value reshaped(Value value, const Dims& to) {
    if (dims(value) == to) return value;
    if (const at::Tensor* tensor = constant(value)) {
      return add_constant(rewrite_, tensor->reshape(to));
    }
    return make("aten::reshape", "", {{ValueRef{value}}, {c10::IValue(to)}},
                {to, rewrite_.meta(value).dtype});
  }

  Rewrite& rewrite_;
  std::vector<Node> made_;
  // Numbers that a node makes of bytes: of these constants, or by their scales (null).
  std::map<Value, const at::Tensor*> bytes_;
  Origin origin_;  // of the node that is rewritten
};

}  // namespace

Dims matmul_dims(const Dims& left, const Dims& right) {
  const bool longer_left = left.size() >= right.size();
  Dims dims = longer_left ? left : right;
  const Dims& shorter = longer_left ? right : left;
  const std::size_t missing = dims.size() - shorter.size();
  for (std::size_t i = 0; i + 2 < shorter.size(); ++i) {
    if (shorter[i] != 1) dims[missing + i] = shorter[i];
  }
  dims.end()[-2] = left.end()[-2];
  dims.end()[-1] = right.end()[-1];
  return dims;
}

void settle_product_ops(Rewrite& rewrite) { ProductOps(rewrite).rewrite_all(); }

}  // namespace torch_blocked::graph
