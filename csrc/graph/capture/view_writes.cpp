// Inverts view ops: a table says how the source of each view follows from what was written into it.
#include "graph/capture/view_writes.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "graph/aten.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

// How to get the source of a view from what was written into the view.
enum class Inverse {
  kSame,         // the op returns its source as it is
  kReshape,      // the same elements in the same order
  kSelf,         // the op again
  kPermute,      // the inverse order
  kSwap,         // from and to, exchanged
  kScatter,      // the op's `_scatter`, with the same arguments
  kNarrow,       // start and length
  kUnbind,       // one part per index of the dim
  kSplit,        // consecutive parts of the lengths in the arguments
  kSplitEvenly,  // consecutive parts of lengths that follow from the source's size
};

const std::map<std::pair<std::string_view, std::string_view>, Inverse> kInverses = {
    {{"aten::alias", ""}, Inverse::kSame},
    {{"aten::contiguous", ""}, Inverse::kSame},
    {{"aten::detach", ""}, Inverse::kSame},
    {{"aten::dropout", ""}, Inverse::kSame},
    {{"aten::feature_dropout", ""}, Inverse::kSame},
    {{"aten::to", "dtype"}, Inverse::kSame},
    {{"aten::to", "dtype_layout"}, Inverse::kSame},
    {{"aten::to", "device"}, Inverse::kSame},
    {{"aten::to", "other"}, Inverse::kSame},
    {{"aten::type_as", ""}, Inverse::kSame},
    {{"aten::flatten", "using_ints"}, Inverse::kReshape},
    {{"aten::ravel", ""}, Inverse::kReshape},
    {{"aten::reshape", ""}, Inverse::kReshape},
    {{"aten::reshape_as", ""}, Inverse::kReshape},
    {{"aten::squeeze", ""}, Inverse::kReshape},
    {{"aten::squeeze", "dim"}, Inverse::kReshape},
    {{"aten::squeeze", "dims"}, Inverse::kReshape},
    {{"aten::unflatten", "int"}, Inverse::kReshape},
    {{"aten::unsqueeze", ""}, Inverse::kReshape},
    {{"aten::view", ""}, Inverse::kReshape},
    {{"aten::view_as", ""}, Inverse::kReshape},
    {{"aten::mT", ""}, Inverse::kSelf},
    {{"aten::numpy_T", ""}, Inverse::kSelf},
    {{"aten::swapaxes", ""}, Inverse::kSelf},
    {{"aten::swapdims", ""}, Inverse::kSelf},
    {{"aten::t", ""}, Inverse::kSelf},
    {{"aten::transpose", "int"}, Inverse::kSelf},
    {{"aten::permute", ""}, Inverse::kPermute},
    {{"aten::moveaxis", "int"}, Inverse::kSwap},
    {{"aten::moveaxis", "intlist"}, Inverse::kSwap},
    {{"aten::movedim", "int"}, Inverse::kSwap},
    {{"aten::movedim", "intlist"}, Inverse::kSwap},
    {{"aten::diagonal", ""}, Inverse::kScatter},
    {{"aten::select", "int"}, Inverse::kScatter},
    {{"aten::slice", "Tensor"}, Inverse::kScatter},
    {{"aten::narrow", ""}, Inverse::kNarrow},
    {{"aten::unbind", "int"}, Inverse::kUnbind},
    {{"aten::split_with_sizes", ""}, Inverse::kSplit},
    {{"aten::split", "sizes"}, Inverse::kSplit},
    {{"aten::split", "Tensor"}, Inverse::kSplitEvenly},
    {{"aten::chunk", ""}, Inverse::kSplitEvenly},
    {{"aten::tensor_split", "sections"}, Inverse::kSplitEvenly},
};

std::optional<Inverse> inverse_of(const Node& node) {
  const auto found = kInverses.find({node.name, node.overload});
  return found == kInverses.end() ? std::nullopt : std::optional(found->second);
}

Argument constant(IValue value) { return {std::move(value)}; }

Node plain(std::string name, std::vector<Argument> arguments) {
  return {
      .name = std::move(name), .overload = {}, .arguments = std::move(arguments), .outputs = {}};
}

// The same op with `written` in the source's place.
Node again(const ViewStep& step, Value written) {
  Node node{.name = step.node.name,
            .overload = step.node.overload,
            .arguments = step.node.arguments,
            .outputs = {}};
  node.arguments[step.argument] = {ValueRef{written}};
  return node;
}

Node permuted_back(const ViewStep& step, Value written) {
  const Dims order = order_of(step.node, step.results[step.output].dims.size());
  std::vector<Argument> inverse(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    inverse[static_cast<std::size_t>(order[i])] = constant(static_cast<std::int64_t>(i));
  }
  return plain("aten::permute", {{ValueRef{written}}, {std::move(inverse)}});
}

Node slice_scatter(Value source, Value written, const Argument& dim, std::int64_t start,
                   std::int64_t length) {
  return plain("aten::slice_scatter", {{ValueRef{source}},
                                       {ValueRef{written}},
                                       dim,
                                       constant(start),
                                       constant(start + length),
                                       constant(std::int64_t{1})});
}

// A part of a split starts where the parts before it end.
std::optional<Node> joined(const ViewStep& step, Value source, Value written) {
  const Argument& argument = step.node.arguments[2];
  if (!argument.is_constant() || !argument.constant().isInt()) return std::nullopt;
  const Dims& part = step.results[step.output].dims;
  const std::int64_t dim = argument.constant().toInt();
  const auto along = static_cast<std::size_t>(dim < 0 ? dim + std::ssize(part) : dim);
  std::int64_t start = 0;
  for (std::size_t i = 0; i < step.output; ++i) start += step.results[i].dims[along];
  return slice_scatter(source, written, argument, start, part[along]);
}

}  // namespace

bool may_copy(const Node& node) {
  for (const char* name : {"aten::contiguous", "aten::flatten", "aten::ravel", "aten::reshape",
                           "aten::reshape_as", "aten::to"}) {
    if (node.name == name) return true;
  }
  return false;
}

bool depends_on_sizes(const ViewStep& step) {
  return inverse_of(step.node) == Inverse::kSplitEvenly;
}

// The new source may have other strides. Where view() would fail, reshape() copies.
Node shown(const ViewStep& step, Value source) {
  Node node = again(step, source);
  if (node.name == "aten::view") node.name = "aten::reshape";
  if (node.name == "aten::view_as") node.name = "aten::reshape_as";
  return node;
}

std::optional<Node> written_back(const ViewStep& step, Value source, Value written) {
  const std::optional<Inverse> inverse = inverse_of(step.node);
  if (!inverse) return std::nullopt;
  const std::vector<Argument>& arguments = step.node.arguments;
  switch (*inverse) {
    case Inverse::kSame:
      return plain("aten::alias", {{ValueRef{written}}});
    case Inverse::kReshape:
      return plain("aten::reshape_as", {{ValueRef{written}}, {ValueRef{source}}});
    case Inverse::kSelf:
      return again(step, written);
    case Inverse::kPermute:
      return permuted_back(step, written);
    case Inverse::kSwap: {
      Node node = again(step, written);
      std::swap(node.arguments[1], node.arguments[2]);
      return node;
    }
    case Inverse::kScatter: {
      Node node = plain(step.node.name + "_scatter", arguments);
      node.arguments[0] = {ValueRef{source}};
      node.arguments.insert(node.arguments.begin() + 1, Argument{ValueRef{written}});
      return node;
    }
    case Inverse::kNarrow:
      return slice_scatter(source, written, arguments[1], arguments[2].constant().toInt(),
                           arguments[3].constant().toInt());
    case Inverse::kUnbind:
      return plain("aten::select_scatter", {{ValueRef{source}},
                                            {ValueRef{written}},
                                            arguments[1],
                                            constant(static_cast<std::int64_t>(step.output))});
    case Inverse::kSplit:
    case Inverse::kSplitEvenly:
      return joined(step, source, written);
  }
  return std::nullopt;
}

}  // namespace torch_blocked::graph
