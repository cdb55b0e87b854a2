// Renames ops with several spellings to the one that the passes look for.

#include <ATen/ops/nonzero_numpy.h>

#include "format/errors.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

// Rewrites a node to the other spelling. `rank` is its input's.
using Respell = void (*)(Node& node, std::size_t rank);

void as_concat(Node& node, std::size_t) {
  node.name = "aten::cat";
  node.overload = "";
}

void as_transpose(Node& node, std::size_t) {
  node.name = "aten::transpose";
  node.overload = "int";
}

void as_matrix_transpose(Node& node, std::size_t) {
  node.arguments = {node.arguments[0], {IValue(-2)}, {IValue(-1)}};
  as_transpose(node, 0);
}

// movedim(self, source, destination), of one dim or of several
void as_permute(Node& node, std::size_t rank) {
  const auto sources = integers(node.arguments[1], 1), targets = integers(node.arguments[2], 1);
  if (!sources || !targets || sources->size() != targets->size()) return;
  const auto size = static_cast<std::int64_t>(rank);
  Dims order(rank, -1);
  std::vector<bool> moved(rank);
  for (std::size_t i = 0; i < sources->size(); ++i) {
    const std::int64_t from = ((*sources)[i] + size) % size, to = ((*targets)[i] + size) % size;
    order[static_cast<std::size_t>(to)] = from;
    moved[static_cast<std::size_t>(from)] = true;
  }
  std::int64_t next = 0;
  for (std::int64_t& from : order) {
    if (from >= 0) continue;
    while (moved[static_cast<std::size_t>(next)]) ++next;
    from = next++;
  }
  std::vector<Argument> dims;
  for (const std::int64_t from : order) dims.push_back({IValue(from)});
  node.name = "aten::permute";
  node.overload = "";
  node.arguments = {node.arguments[0], {std::move(dims)}};
}

// hsplit(self, sections or indices), which splits the channels of images
void as_split(Node& node, std::size_t rank) {
  if (rank < 2) return;
  node.name = "aten::tensor_split";
  node.overload = node.overload == "int" ? "sections" : "indices";
  node.arguments.push_back({IValue(1)});
}

bool has_spatial_dims(std::size_t rank) { return rank >= 3 && rank <= 5; }

std::string with_dims(const char* name, std::size_t rank) {
  return text("aten::", name, rank - 2, "d");
}

// _convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
// ...): traces have it for every convolution. convolution() is the same without the last arguments.
void as_one_convolution(Node& node, std::size_t rank) {
  const auto& a = node.arguments;
  if (!has_spatial_dims(rank) || !a[6].is_constant()) return;
  if (a[6].constant().toBool()) {
    node.name = with_dims("conv_transpose", rank);
    node.overload = rank == 3 ? "" : "input";
    node.arguments = {a[0], a[1], a[2], a[3], a[4], a[7], a[8], a[5]};
  } else {
    node.name = with_dims("conv", rank);
    node.overload = "";
    node.arguments = {a[0], a[1], a[2], a[3], a[4], a[5], a[8]};
  }
}

// _convolution_mode(input, weight, bias, stride, padding, dilation, groups), with "same" or "valid"
void as_padded_convolution(Node& node, std::size_t rank) {
  if (!has_spatial_dims(rank)) return;
  node.name = with_dims("conv", rank);
  node.overload = "padding";
}

struct Spelling {
  std::string_view name;
  Respell respell;
};
constexpr std::array kSpellings{Spelling{"aten::concat", as_concat},
                                Spelling{"aten::concatenate", as_concat},
                                Spelling{"aten::swapaxes", as_transpose},
                                Spelling{"aten::swapdims", as_transpose},
                                Spelling{"aten::mT", as_matrix_transpose},
                                Spelling{"aten::movedim", as_permute},
                                Spelling{"aten::moveaxis", as_permute},
                                Spelling{"aten::hsplit", as_split},
                                Spelling{"aten::_convolution", as_one_convolution},
                                Spelling{"aten::convolution", as_one_convolution},
                                Spelling{"aten::_convolution_mode", as_padded_convolution}};

// The number in a constant without dims. Traces make such constants of numbers that come from
// sizes.
std::optional<IValue> number_of(const Rewrite& rewrite, const Argument& argument) {
  const at::Tensor* constant = constant_of(rewrite.graph, argument);
  if (!constant || constant->dim() != 0 || constant->layout() != at::kStrided) return std::nullopt;
  if (at::isFloatingType(constant->scalar_type())) return IValue(constant->item<double>());
  if (!at::isIntegralType(constant->scalar_type(), /*includeBool=*/false)) return std::nullopt;
  return IValue(constant->item<std::int64_t>());
}

// Replaces such a constant a in x * a by its number, if a does not decide the type.
void settle_number(Rewrite& rewrite, Node& node) {
  if (!is_any(node, {"aten::add", "aten::sub", "aten::mul", "aten::div"}) ||
      node.overload != "Tensor" || node.read(0) == kNone ||
      rewrite.meta(node.output()) != rewrite.meta(node.read(0))) {
    return;
  }
  if (auto number = number_of(rewrite, node.arguments[1])) node.arguments[1] = {*number};
}

bool is_mask(const at::Tensor& index) {
  return index.dim() > 0 && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
}

}  // namespace

// Replaces a constant mask in x[:, mask] by the indices that it keeps. Then the size of the result
// follows from sizes; with a mask it depends on values.
void settle_masks(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (node.name != "aten::index" || node.arguments.size() != 2) continue;
    const auto* given = std::get_if<std::vector<Argument>>(&node.arguments[1].held);
    if (!given) continue;
    std::vector<Argument> indices;
    for (const Argument& each : *given) {
      const at::Tensor* constant = constant_of(graph, each);
      if (!constant || !is_mask(*constant)) {
        indices.push_back(each);
        continue;
      }
      for (const at::Tensor& index : at::nonzero_numpy(*constant)) {
        indices.push_back({ValueRef{graph.values}});
        graph.constants[graph.values++] = index;
      }
    }
    node.arguments[1].held = std::move(indices);
  }
}

bool respell(Node& node, const std::vector<Meta>& metas) {
  const auto* found = std::ranges::find(kSpellings, std::string_view(node.name), &Spelling::name);
  if (found == kSpellings.end() || node.overload == "names") return false;
  const Value src = node.read(0);
  found->respell(node, src == kNone ? 0 : metas[Uses::at(src)].dims.size());
  return node.name != found->name;
}

void settle_spellings(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    respell(node, rewrite.metas);
    settle_number(rewrite, node);
  }
}

}  // namespace torch_blocked::graph
