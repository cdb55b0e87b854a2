// What the passes know of ATen's ops: names, places of arguments, effects on dims. Each fact is
// written here once.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "graph/graph.h"
#include "ops/images/pooling.h"

namespace torch_blocked::graph {

inline bool is_any(const Node& node, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, std::string_view(node.name)) != names.end();
}

inline bool is_none(const Argument& argument) {
  return argument.is_constant() && argument.constant().isNone();
}

inline bool is_real(const Argument& argument) {
  return argument.is_constant() && argument.constant().isScalar() &&
         !argument.constant().isComplexDouble();
}

inline double number(const Argument& argument, double missing) {
  return is_real(argument) ? argument.constant().toScalar().toDouble() : missing;
}

// The integers of a list of constants. A single integer is repeated for all spatial dims. Nothing
// if the list holds something else.
std::optional<Dims> integers(const Argument& argument, std::size_t spatial);

// The numbers of a list of constants; nothing if the list holds something else.
std::optional<std::vector<double>> reals(const Argument& argument);

// Whether an op of ATen, named without "aten::", computes each element of its result from the same
// element of one tensor. Only ops that may keep a blocked tensor blocked are listed.
bool is_pointwise(std::string_view name);

// Where a convolution (input, weight, bias, ...) has its other arguments; -1: it has none.
struct ConvolutionOp {
  std::string_view name;
  std::int64_t stride, padding, dilation, output_padding, groups;
  bool transposed;
};
// Null if no convolution has this name.
const ConvolutionOp* convolution_op(std::string_view name);

// Where a pooling (input, kernel, stride, padding, ...) has its other arguments; -1: it has none.
struct PoolingOp {
  std::string_view name;
  Pooling kind;
  std::int64_t dilation, ceil_mode, include_pad, divisor;
};
const PoolingOp* pooling_op(std::string_view name);

// Whether the node's result has the same elements in the same order with other dims.
bool is_reshape(const Node& node);

// Whether the node joins tensors of that rank along `dim`.
bool is_concat(const Node& node, std::int64_t dim, std::size_t rank);

// Whether each element of the result is an element of the first argument, in another place.
bool moves_elements(const Node& node);

// The order of dims that a node permutes its first argument into; empty if it does not.
Dims order_of(const Node& node, std::size_t rank);
// Such an order from [N, C, *spatial] to [N, *spatial, C], and back.
Dims order_to_last(std::size_t rank);
Dims order_from_last(std::size_t rank);

// Whether the op draws random numbers.
bool is_random(const Node& node);

}  // namespace torch_blocked::graph
