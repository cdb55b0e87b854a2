// The arguments of a node, as the rules of shapes.cpp read them. Numbers may be a stranger's,
// from a file. A rule gets only small ones, and so need not check for overflow.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "graph/graph.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {

using Metas = std::vector<Meta>;

struct NotKnown {};
inline void require(bool known) {
  if (!known) throw NotKnown{};
}

// `dim` counted from 0; it may count from the end of `rank` dims.
inline std::size_t wrap(std::int64_t dim, std::size_t rank) {
  const auto size = static_cast<std::int64_t>(rank);
  require(dim >= -size && dim < size);
  return static_cast<std::size_t>(dim < 0 ? dim + size : dim);
}

// Numbers and sizes that a rule may multiply by another without overflow.
constexpr std::int64_t kMost = std::int64_t{1} << 31;
inline void require_small(std::int64_t number) { require(-kMost <= number && number <= kMost); }
inline void require_small(const Dims& dims) {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 46;
  constexpr std::size_t kMostDims = 64;  // ATen's iterators have no more
  require(dims.size() <= kMostDims);
  std::int64_t elements = 1;
  for (const std::int64_t size : dims) {
    require(0 <= size && size <= kMost && elements <= kMostElements);
    elements *= std::max<std::int64_t>(size, 1);
  }
  require(elements <= kMostElements);
}

// The arguments of a node. An argument of another kind than asked for ends the rule.
class Call {
 public:
  Call(const Node& node, const Metas& metas)
      : node_(node), arguments_(node.arguments), metas_(metas) {}

  std::string_view name() const { return node_.name; }
  std::size_t count() const { return arguments_.size(); }
  std::int64_t results() const { return std::ssize(node_.outputs); }

  const Meta& tensor(std::size_t i) const {
    require(is_tensor(i));
    return meta(argument(i));
  }
  // A floating-point tensor, for rules that would give another dtype for other types.
  const Meta& floating(std::size_t i) const {
    require(c10::isFloatingType(tensor(i).dtype));
    return tensor(i);
  }
  bool is_tensor(std::size_t i) const { return argument(i).value() != kNone; }
  bool is_none(std::size_t i) const {
    return argument(i).is_constant() && argument(i).constant().isNone();
  }
  const c10::IValue& constant(std::size_t i) const {
    require(argument(i).is_constant());
    return argument(i).constant();
  }
  std::int64_t integer(std::size_t i) const {
    require_small(unbounded(i));
    return unbounded(i);
  }
  // As a bound of a slice, where 2^63 - 1 is usual.
  std::int64_t unbounded(std::size_t i) const {
    require(constant(i).isInt());
    return constant(i).toInt();
  }
  std::string_view text(std::size_t i) const {
    require(constant(i).isString());
    return constant(i).toStringRef();
  }
  bool flag(std::size_t i) const {
    require(constant(i).isBool());
    return constant(i).toBool();
  }
  // A list of `size` integers, where a single one stands for all; size 0: as many as there are.
  Dims list(std::size_t i, std::size_t size = 0) const {
    require(!is_none(i));
    const auto dims = integers(argument(i), size > 0 ? size : 1);
    require(dims && (size == 0 || dims->size() == size));
    for (const std::int64_t number : *dims) require_small(number);
    return *dims;
  }
  std::vector<double> numbers(std::size_t i) const {
    const auto numbers = reals(argument(i));
    require(numbers.has_value());
    return *numbers;
  }
  Metas tensors(std::size_t i) const {
    Metas result;
    for (const Argument& item : items(i)) {
      require(item.value() != kNone);
      result.push_back(meta(item));
    }
    require(!result.empty());
    return result;
  }

 private:
  const Argument& argument(std::size_t i) const {
    require(i < arguments_.size());
    return arguments_[i];
  }
  const Meta& meta(const Argument& argument) const {
    const Meta& meta = metas_[static_cast<std::size_t>(argument.value())];
    require_small(meta.dims);
    return meta;
  }
  const std::vector<Argument>& items(std::size_t i) const {
    const auto* list = std::get_if<std::vector<Argument>>(&argument(i).held);
    require(list != nullptr);
    return *list;
  }

  const Node& node_;
  const std::vector<Argument>& arguments_;
  const Metas& metas_;
};

}  // namespace torch_blocked::graph
