// Attention: the op of that name, and two products of matrices with a softmax between them.
#include "ops/attention.h"

#include <cmath>

#include "graph/nodes/boxed.h"
#include "graph/planner.h"
#include "graph/rules.h"

namespace torch_blocked::graph {
namespace {

// What a node holds. It reads query, key, value and, if there is one, the bias of the scores.
struct Attention {
  double scale;
  bool key_is_transposed;  // [..., D, S]
};

// ---- from ops to nodes --------------------------------------------------------------------------

// Whether three values are query, key and value of heads without an empty dim.
bool are_heads(const Rewrite& rewrite, Value query, Value key, Value value, bool transposed) {
  for (const Value each : {query, key, value}) {
    if (each == kNone || rewrite.meta(each).dtype != at::kFloat) return false;
    if (rewrite.meta(each).dims.size() != rewrite.meta(query).dims.size()) return false;
    if (std::ranges::count(rewrite.meta(each).dims, 0) > 0) return false;
  }
  const std::size_t rank = rewrite.meta(query).dims.size();
  if (rank != 3 && rank != 4) return false;
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

void become(Node& node, std::initializer_list<Value> reads, const Attention& attention) {
  std::vector<Argument> arguments;
  for (const Value value : reads) {
    if (value != kNone) arguments.push_back({ValueRef{value}});
  }
  node.become(nodes::attention, std::move(arguments), attention);
}

// (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa). A row that a mask hides
// whole is zeros there, so only masks that hide nothing are biases.
void find_op(const Rewrite& rewrite, Node& node) {
  if (node.name != "aten::scaled_dot_product_attention" || node.arguments.size() != 8) return;
  const auto& a = node.arguments;
  const Value query = node.read(0), key = node.read(1), value = node.read(2), bias = node.read(3);
  const auto is_false = [](const Argument& flag) {
    return flag.is_constant() && flag.constant() == c10::IValue(false);
  };
  if (number(a[4], 1) != 0 || !is_false(a[5]) || !is_false(a[7])) return;
  if (!are_heads(rewrite, query, key, value, false)) return;
  const Dims& dims = rewrite.meta(query).dims;
  if (bias != kNone) {
    const at::Tensor* mask = constant_of(rewrite.graph, a[3]);
    Dims scores = dims;
    scores.back() = rewrite.meta(key).dims[dims.size() - 2];
    if (!mask || !is_bias(rewrite, bias, scores) || !mask->isfinite().all().item<bool>()) return;
  } else if (!is_none(a[3])) {
    return;
  }
  const double scale = number(a[6], 1 / std::sqrt(static_cast<double>(dims.back())));
  if (scale > 0) become(node, {query, key, value, bias}, {scale, false});
}

bool is_product(const Node* node) {
  return node && is_any(*node, {"aten::matmul", "aten::bmm"}) && node->read(1) != kNone;
}

bool is_softmax_of_rows(const Rewrite& rewrite, const Node* node) {
  if (!node || !is_any(*node, {"aten::softmax", "aten::_softmax"}) || node->overload == "Dimname" ||
      node->read(0) == kNone || !node->arguments[1].is_constant()) {
    return false;
  }
  const std::int64_t dim = node->arguments[1].constant().toInt();
  return (dim == -1 || dim + 1 == std::ssize(rewrite.meta(node->output()).dims)) &&
         rewrite.meta(node->output()) == rewrite.meta(node->read(0));
}

// The number that a node multiplies a tensor by; nothing if it does something else.
std::optional<double> factor_of(const Node& node) {
  if (!is_any(node, {"aten::mul", "aten::div"}) || node.arguments.size() != 2 ||
      !is_real(node.arguments[1])) {
    return std::nullopt;
  }
  const double value = number(node.arguments[1], 1);
  return node.name == "aten::div" ? 1 / value : value;
}

// product(softmax(scale product(query, key) + bias), value)
void find_written_out(const Rewrite& rewrite, const Uses& uses, Node& node) {
  if (!is_product(&node)) return;
  std::vector<Node*> taken;
  const auto before = [&](Value value) {
    taken.push_back(value != kNone && uses.only_reader(value) ? uses.maker[Uses::at(value)]
                                                              : nullptr);
    return taken.back();
  };
  const Node* softmax = before(node.read(0));
  if (!is_softmax_of_rows(rewrite, softmax)) return;
  const Node* last = before(softmax->read(0));
  const Dims& scores = rewrite.meta(softmax->output()).dims;
  Value bias = kNone;
  if (last && last->name == "aten::add" && number(last->arguments[2], 1) == 1) {
    bias = last->read(1);
    if (!is_bias(rewrite, bias, scores) || last->read(0) == kNone) return;
    if (rewrite.meta(last->read(0)).dims != scores) return;
    last = before(last->read(0));
  }
  double scale = 1;
  if (const auto factor = last ? factor_of(*last) : std::nullopt) {
    scale = *factor;
    last = before(last->read(0));
  }
  if (!is_product(last)) return;
  const Value query = last->read(0), key = last->read(1), value = node.read(1);
  if (!(scale > 0) || !are_heads(rewrite, query, key, value, true)) return;
  become(node, {query, key, value, bias}, {scale, true});
  for (Node* each : taken) each->outputs.clear();
}

void find(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    find_op(rewrite, node);
    if (!node.held.has_value() && !node.outputs.empty()) find_written_out(rewrite, uses, node);
  }
  sweep(rewrite.graph);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  Meta dst = metas[Uses::at(node.read(0))];
  dst.dims.back() = metas[Uses::at(node.read(2))].dims.back();
  return {dst};
}

// ---- running ------------------------------------------------------------------------------------

Prepared prepare(const Step& step, const Running& running) {
  const Node& node = *step.node;
  std::array<std::optional<Slot>, 4> slots;
  for (std::size_t i = 0; i < node.arguments.size(); ++i) slots[i] = step.reads.at(node.read(i));
  return {
      [&tensors = running.tensors, slots, dst = step.writes[0], attention = *node.as<Attention>()] {
        const at::Tensor& key = tensors[*slots[1]];
        tensors[dst] = torch_blocked::attention(
            tensors[*slots[0]], attention.key_is_transposed ? key.transpose(-1, -2) : key,
            tensors[*slots[2]], attention.scale, slots[3] ? tensors[*slots[3]] : at::Tensor());
      }};
}

// Both products: each pair of a query and a key takes the lanes of a query and of a value.
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
    .fixed = [](const Node&) { return std::optional(FixedFormats{kStrided, kStrided}); },
    .prepare = prepare,
    .flops = flops,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
