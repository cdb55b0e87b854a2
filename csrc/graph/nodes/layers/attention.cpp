// Attention: finds ATen's op, or two products of matrices with a softmax between them, and runs our
// kernel.
#include "ops/tokens/attention.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tril.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"
#include "graph/planning/planner.h"

namespace torch_blocked::graph {
namespace {

// What a node holds. The node reads query, key, value and, if there is one, the bias of the scores.
struct Attention {
  double scale;
  bool key_is_transposed;             // [..., D, S]
  at::ScalarType dtype = at::kFloat;  // of the result
};

// ---- from ops to nodes --------------------------------------------------------------------------

// Whether three values are query, key and value of heads, none with an empty dim.
bool are_heads(const Rewrite& rewrite, Value query, Value key, Value value, bool transposed) {
  for (const Value each : {query, key, value}) {
    if (each == kNone || rewrite.meta(each).dtype != at::kFloat) return false;
    if (rewrite.meta(each).dims.size() != rewrite.meta(query).dims.size()) return false;
    if (std::ranges::count(rewrite.meta(each).dims, 0) > 0) return false;
  }
  const std::size_t rank = rewrite.meta(query).dims.size();
  if (rank < 3) return false;
  Dims q = rewrite.meta(query).dims, k = rewrite.meta(key).dims, v = rewrite.meta(value).dims;
  if (transposed) std::swap(k[rank - 1], k[rank - 2]);
  if (q.back() != k.back() || k[rank - 2] != v[rank - 2]) return false;
  for (Dims* each : {&q, &k, &v}) each->resize(rank - 2);
  return q == k && q == v;
}

// Whether a tensor of `dims` broadcasts to scores of these dims.
bool broadcasts(const Dims& dims, const Dims& scores) {
  if (dims.size() > scores.size()) return false;
  const std::size_t missing = scores.size() - dims.size();
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != 1 && dims[i] != scores[missing + i]) return false;
  }
  return true;
}

bool is_bias(const Rewrite& rewrite, Value bias, const Dims& scores) {
  return bias != kNone && rewrite.meta(bias).dtype == at::kFloat &&
         rewrite.meta(bias).dims.size() >= 2 && broadcasts(rewrite.meta(bias).dims, scores);
}

// The dims of the result [..., T, E] in memory order: the heads of [B, H, T, E] lie side by side.
Dims dims_in_memory(Dims query, std::int64_t lanes) {
  query.back() = lanes;
  if (query.size() == 4) std::swap(query[1], query[2]);
  return query;
}

void become(Node& node, std::initializer_list<Value> reads, const Attention& attention) {
  std::vector<Argument> arguments;
  for (const Value value : reads) {
    if (value != kNone) arguments.push_back({ValueRef{value}});
  }
  node.become(nodes::attention, std::move(arguments), attention);
}

// A mask [..., T, S] as numbers to add to scores: 0 where it is true, that is where the query sees
// the key. Undefined if the mask hides all keys from a query, whose result would be zeros.
at::Tensor bias_of(const at::Tensor& mask) {
  at::Tensor bias = mask;
  if (mask.scalar_type() == at::kBool) {
    bias = at::where(mask, 0., -std::numeric_limits<double>::infinity()).to(at::kFloat);
  }
  const bool shows = bias.amax(-1).isfinite().all().item<bool>();  // NaN and infinity are no masks
  return shows ? bias : at::Tensor();
}

// (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
void find_op(Rewrite& rewrite, Node& node) {
  if (node.name != "aten::scaled_dot_product_attention" || node.arguments.size() != 8) return;
  const auto& a = node.arguments;
  const Value query = node.read(0), key = node.read(1), value = node.read(2);
  const auto is = [](const Argument& flag, bool on) {
    return flag.is_constant() && flag.constant() == c10::IValue(on);
  };
  const bool is_causal = is(a[5], true);
  if (number(a[4], 1) != 0 || !(is_causal || is(a[5], false)) || !is(a[7], false)) return;
  if (!are_heads(rewrite, query, key, value, false)) return;
  const Dims dims = rewrite.meta(query).dims;
  const std::int64_t keys = rewrite.meta(key).dims[dims.size() - 2];
  Value bias = kNone;
  if (is_causal) {
    if (!is_none(a[3])) return;  // ATen refuses both
    const at::Tensor seen = at::ones({dims[dims.size() - 2], keys}, at::kBool).tril();
    bias = add_constant(rewrite, bias_of(seen));
  } else if (!is_none(a[3])) {
    const at::Tensor* mask = constant_of(rewrite.graph, a[3]);
    Dims scores = dims;
    scores.back() = keys;
    if (!mask || mask->dim() < 2 || !broadcasts(Dims(mask->sizes().vec()), scores)) return;
    if (mask->scalar_type() != at::kBool && mask->scalar_type() != at::kFloat) return;
    const at::Tensor numbers = bias_of(*mask);
    if (!numbers.defined()) return;
    bias = mask->scalar_type() == at::kBool ? add_constant(rewrite, numbers) : node.read(3);
  }
  const double scale = number(a[6], 1 / std::sqrt(static_cast<double>(dims.back())));
  if (scale > 0) become(node, {query, key, value, bias}, {scale, false});
}

bool is_product(const Node* node) {
  return node && is_any(*node, {"aten::matmul", "aten::bmm"}) && node->read(1) != kNone;
}

// The number by which a node multiplies a tensor; nothing if it does something else.
std::optional<double> factor_of(const Node& node) {
  if (!is_any(node, {"aten::mul", "aten::div"}) || node.arguments.size() != 2 ||
      !is_real(node.arguments[1])) {
    return std::nullopt;
  }
  const double value = number(node.arguments[1], 1);
  return node.name == "aten::div" ? 1 / value : value;
}

// Collects, backwards, the nodes between the product of queries and keys and the softmax of its
// rows: scale and factor times the scores, plus a constant bias or a computed one. Views that keep
// rows of scores whole, such as those that separate windows from heads, may stand in between.
class Scores {
 public:
  Scores(const Rewrite& rewrite, const Uses& uses, Node& softmax)
      : rewrite_(rewrite),
        uses_(uses),
        taken_{&softmax},
        dims_(rewrite.meta(softmax.output()).dims) {
    at_ = softmax.read(0);
    const Dims last = dims_;
    while (Node* node = maker()) {
      if (is_product(node)) {
        if (dims_ == last) product = node;
        taken_.push_back(node);
        break;
      }
      if (!take(*node)) break;
    }
  }

  Node* product = nullptr;  // null: these are not scores of attention
  double scale = 1;
  at::Tensor bias;         // constant
  Value value = kNone;     // a bias that is computed
  Node* factor = nullptr;  // multiplies the scores by a constant per head
  at::Tensor factors;

  // All nodes from the product to the softmax, except `factor`.
  const std::vector<Node*>& taken() const { return taken_; }

 private:
  Node* maker() const { return uses_.only_reader(at_) ? uses_.maker[Uses::at(at_)] : nullptr; }

  // The operand of a node that is not the scores; null if both or none could be.
  const Argument* other_than_scores(const Node& node) {
    const auto is_full = [&](std::size_t i) {
      const Value value = node.read(i);
      return value != kNone && !rewrite_.graph.constants.contains(value) &&
             rewrite_.meta(value).dims == dims_;
    };
    const std::size_t scores = is_full(0) ? 0 : 1;
    if (node.arguments.size() < 2 || !is_full(scores)) return nullptr;
    at_ = node.read(scores);
    return &node.arguments[1 - scores];
  }

  bool take(Node& node) {
    const bool taken = is_reshape(node)                           ? take_view(node)
                       : node.name == "aten::add"                 ? take_sum(node)
                       : is_any(node, {"aten::mul", "aten::div"}) ? take_factor(node)
                                                                  : false;
    if (taken && &node != factor) taken_.push_back(&node);
    return taken;
  }

  bool take_view(const Node& node) {
    const Value from = node.read(0);
    if (from == kNone) return false;
    const Dims& before = rewrite_.meta(from).dims;
    const std::size_t rank = before.size();
    if (rank < 2 || !std::equal(before.end() - 2, before.end(), dims_.end() - 2)) return false;
    if (value != kNone || factors.defined()) return false;
    dims_ = before;
    at_ = from;
    return true;
  }

  bool take_sum(const Node& node) {
    const Argument* other = number(node.arguments[2], 1) == 1 ? other_than_scores(node) : nullptr;
    const Value added = other ? other->value() : kNone;
    const Dims& scores = rewrite_.meta(taken_[0]->output()).dims;
    if (!is_bias(rewrite_, added, dims_) || value != kNone) return false;
    if (const at::Tensor* constant = constant_of(rewrite_.graph, *other)) {
      at::Tensor more = dims_ == scores ? *constant : constant->expand(dims_).reshape(scores);
      more = factors.defined() ? more.mul(scale).mul(factors) : more.mul(scale);
      bias = bias.defined() ? bias.add(more) : more;
      return true;
    }
    value = added;
    return dims_ == scores && scale == 1 && !factors.defined() && !bias.defined();
  }

  bool take_factor(Node& node) {
    if (const auto number = factor_of(node)) {
      scale *= *number;
      at_ = node.read(0);
      return rewrite_.meta(at_).dims == dims_;
    }
    const Argument* other = node.name == "aten::mul" ? other_than_scores(node) : nullptr;
    const at::Tensor* constant = other ? constant_of(rewrite_.graph, *other) : nullptr;
    const bool per_head = constant && constant->scalar_type() == at::kFloat &&
                          constant->dim() >= 2 && constant->size(-1) == 1 &&
                          constant->size(-2) == 1 &&
                          broadcasts(Dims(constant->sizes().vec()), dims_);
    if (!per_head || factor || dims_ != rewrite_.meta(taken_[0]->output()).dims) return false;
    factor = &node;
    factors = *constant;
    return true;
  }

  const Rewrite& rewrite_;
  const Uses& uses_;
  std::vector<Node*> taken_;
  Dims dims_;  // of the scores at
  Value at_;   // this value, which the nodes taken so far read
};

// Finds product(softmax(scale product(query, key) + bias), value). A factor per head multiplies the
// queries instead of the scores: queries are fewer.
void find_written_out(Rewrite& rewrite, const Uses& uses, Node& node) {
  if (!is_product(&node) || node.read(0) == kNone || !uses.only_reader(node.read(0))) return;
  Node* softmax = uses.maker[Uses::at(node.read(0))];
  if (!softmax || softmax->held.has_value() || !is_softmax_of_rows(rewrite, *softmax)) return;
  const Scores scores(rewrite, uses, *softmax);
  if (!scores.product || !(scores.scale > 0)) return;
  Value query = scores.product->read(0);
  const Value key = scores.product->read(1), value = node.read(1);
  if (!are_heads(rewrite, query, key, value, true)) return;
  for (Node* each : scores.taken()) each->outputs.clear();
  if (Node* factor = scores.factor) {
    const Value scaled = add_value(rewrite, rewrite.meta(query));
    factor->arguments = {{ValueRef{query}}, {ValueRef{add_constant(rewrite, scores.factors)}}};
    factor->outputs = {scaled};
    query = scaled;
  }
  const Value bias = scores.bias.defined() ? add_constant(rewrite, scores.bias) : scores.value;
  become(node, {query, key, value, bias}, {scores.scale, true});
}

// Whether a node exchanges the last two dims of what it reads.
bool transposes_matrices(const Rewrite& rewrite, const Node& node) {
  if (node.held.has_value() || node.read(0) == kNone) return false;
  if (node.name == "aten::adjoint") return true;
  const std::size_t rank = rewrite.meta(node.output()).dims.size();
  Dims wanted(rank);
  std::iota(wanted.begin(), wanted.end(), 0);
  if (rank >= 2) std::swap(wanted[rank - 2], wanted[rank - 1]);
  return rank >= 2 && order_of(node, rank) == wanted;
}

// The softmax whose transposed result is the right operand of a product, as in non-local blocks
// with values [.., E, S]; null if there is none.
Node* transposed_softmax(const Rewrite& rewrite, const Uses& uses, const Node& node) {
  if (node.held.has_value() || !is_product(&node) || node.read(0) == kNone) return nullptr;
  if (rewrite.graph.constants.contains(node.read(0))) return nullptr;
  const auto only_maker = [&](Value value) -> Node* {
    return uses.only_reader(value) ? uses.maker[Uses::at(value)] : nullptr;
  };
  Node* transpose = only_maker(node.read(1));
  if (!transpose || !transposes_matrices(rewrite, *transpose)) return nullptr;
  Node* softmax = only_maker(transpose->read(0));
  const bool is_softmax =
      softmax && !softmax->held.has_value() && is_softmax_of_rows(rewrite, *softmax);
  const std::size_t rank = rewrite.meta(node.output()).dims.size();
  return is_softmax && rewrite.meta(node.read(0)).dims.size() == rank ? softmax : nullptr;
}

// Turns a product with a transposed softmax, value^T softmax^T, into (softmax value)^T.
void turn_products(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  std::vector<Node> nodes;
  const auto transposed = [&](Value value, Value result, const Node& origin) {
    nodes.push_back({.name = "aten::transpose",
                     .overload = "int",
                     .arguments = {{ValueRef{value}}, {c10::IValue(-2)}, {c10::IValue(-1)}},
                     .outputs = {result},
                     .origin = origin.origin});
  };
  const auto turned = [&](Value value) {
    Meta meta = rewrite.meta(value);
    std::swap(meta.dims.back(), meta.dims[meta.dims.size() - 2]);
    return add_value(rewrite, meta);
  };
  for (Node& node : rewrite.graph.nodes) {
    const Node* softmax = transposed_softmax(rewrite, uses, node);
    if (!softmax) {
      nodes.push_back(node);
      continue;
    }
    const Value result = node.output(), value = turned(node.read(0));
    transposed(node.read(0), value, node);
    node.arguments[0] = {ValueRef{softmax->output()}};
    node.arguments[1] = {ValueRef{value}};
    node.outputs = {turned(result)};
    nodes.push_back(node);
    transposed(node.output(), result, node);
  }
  rewrite.graph.nodes = std::move(nodes);
  drop_dead(rewrite.graph);
}

// Attention writes [B, T, H, E]; adds the view of it that the op returns.
void transpose_results(Rewrite& rewrite) {
  std::vector<Node> nodes;
  for (Node& node : rewrite.graph.nodes) {
    const bool transposes =
        node.is(nodes::attention) && rewrite.meta(node.output()).dims.size() == 4;
    nodes.push_back(std::move(node));
    if (!transposes) continue;
    Node& attention = nodes.back();
    const Value result = attention.output();
    Meta written = rewrite.meta(result);
    std::swap(written.dims[1], written.dims[2]);
    attention.outputs = {add_value(rewrite, written)};
    nodes.push_back(
        {.name = "aten::transpose",
         .overload = "int",
         .arguments = {{ValueRef{attention.output()}}, {c10::IValue(1)}, {c10::IValue(2)}},
         .outputs = {result},
         .origin = attention.origin});
  }
  rewrite.graph.nodes = std::move(nodes);
}

void find(Rewrite& rewrite) {
  turn_products(rewrite);
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    find_op(rewrite, node);
    if (!node.held.has_value() && !node.outputs.empty()) find_written_out(rewrite, uses, node);
  }
  sweep(rewrite.graph);
  transpose_results(rewrite);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  const Dims& query = metas[Uses::at(node.read(0))].dims;
  return {{dims_in_memory(query, metas[Uses::at(node.read(2))].dims.back()),
           node.as<Attention>()->dtype}};
}

void narrow(Rewrite&, Node& node) { node.as<Attention>()->dtype = at::kBFloat16; }

// ---- running ------------------------------------------------------------------------------------

Prepared prepare(const Step& step, const Running& running) {
  const Node& node = *step.node;
  std::array<std::optional<Slot>, 4> slots;
  for (std::size_t i = 0; i < node.arguments.size(); ++i) slots[i] = step.reads.at(node.read(i));
  return {
      [&tensors = running.tensors, slots, dst = step.writes[0], attention = *node.as<Attention>()] {
        const at::Tensor& key = tensors[*slots[1]];
        torch_blocked::attention(tensors[*slots[0]],
                                 attention.key_is_transposed ? key.transpose(-1, -2) : key,
                                 tensors[*slots[2]], attention.scale,
                                 slots[3] ? tensors[*slots[3]] : at::Tensor(), tensors[dst]);
      }};
}

// Both products. For each pair of a query and a key, they multiply the lanes of a query and of a
// value.
double flops(const Plan& plan, const Step& step) {
  const auto dims = [&](std::size_t i) {
    return plan.slots[step.reads.at(step.node->read(i))].dims;
  };
  const Dims query = dims(0), value = dims(2);
  const std::int64_t keys = value[value.size() - 2];
  return 2.0 * static_cast<double>(c10::multiply_integers(query) / query.back() * keys *
                                   (query.back() + value.back()));
}

}  // namespace

constinit const NodeKind nodes::attention = {
    .name = "attention",
    .find = find,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kEachItsOwn; },
    .narrow = narrow,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kStrided, kPlain}); },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .prepare = prepare,
    .flops = flops,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
