// Other names of the same op, under which the passes do not look for it.

#include "graph/rules.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

// Makes a node what it is called elsewhere; rank: of its input.
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

// hsplit(self, sections or indices), of images the split of their channels
void as_split(Node& node, std::size_t rank) {
  if (rank < 2) return;
  node.name = "aten::tensor_split";
  node.overload = node.overload == "int" ? "sections" : "indices";
  node.arguments.push_back({IValue(1)});
}

struct Spelling {
  std::string_view name;
  Respell respell;
};
constexpr std::array kSpellings{
    Spelling{"aten::concat", as_concat},       Spelling{"aten::concatenate", as_concat},
    Spelling{"aten::swapaxes", as_transpose},  Spelling{"aten::swapdims", as_transpose},
    Spelling{"aten::mT", as_matrix_transpose}, Spelling{"aten::movedim", as_permute},
    Spelling{"aten::moveaxis", as_permute},    Spelling{"aten::hsplit", as_split}};

}  // namespace

void settle_spellings(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    const auto* found = std::ranges::find(kSpellings, std::string_view(node.name), &Spelling::name);
    if (found == kSpellings.end() || node.overload == "names") continue;
    const Value src = node.read(0);
    found->respell(node, src == kNone ? 0 : rewrite.meta(src).dims.size());
  }
}

}  // namespace torch_blocked::graph
