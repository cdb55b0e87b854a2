// Tables of ATen's ops: which are pointwise, which move elements, and where convolutions and
// poolings have their arguments.
#include "graph/aten.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <numeric>

namespace torch_blocked::graph {
namespace {

constexpr std::array kConvolutions{
    ConvolutionOp{"aten::conv1d", 3, 4, 5, -1, 6, false},
    ConvolutionOp{"aten::conv2d", 3, 4, 5, -1, 6, false},
    ConvolutionOp{"aten::conv3d", 3, 4, 5, -1, 6, false},
    ConvolutionOp{"aten::conv_transpose1d", 3, 4, 7, 5, 6, true},
    ConvolutionOp{"aten::conv_transpose2d", 3, 4, 7, 5, 6, true},
    ConvolutionOp{"aten::conv_transpose3d", 3, 4, 7, 5, 6, true},
};

constexpr std::array kPoolings{
    PoolingOp{"aten::max_pool1d", Pooling::kMax, 4, 5, -1, -1},
    PoolingOp{"aten::max_pool2d", Pooling::kMax, 4, 5, -1, -1},
    PoolingOp{"aten::max_pool3d", Pooling::kMax, 4, 5, -1, -1},
    PoolingOp{"aten::avg_pool1d", Pooling::kAverageOfWindow, -1, 4, 5, -1},
    PoolingOp{"aten::avg_pool2d", Pooling::kAverageOfWindow, -1, 4, 5, 6},
    PoolingOp{"aten::avg_pool3d", Pooling::kAverageOfWindow, -1, 4, 5, 6},
};

constexpr auto kPointwise = std::to_array<std::string_view>(
    {"relu", "relu6", "hardtanh", "leaky_relu", "hardswish", "hardsigmoid", "silu", "gelu", "elu",
     "mish", "tanh", "sigmoid", "softplus", "exp", "sqrt", "abs", "neg", "clamp", "clamp_min"});

// The row of that name; null if there is none.
const auto* row_of(const auto& rows, std::string_view name) {
  const auto found = std::ranges::find(rows, name, [](const auto& row) { return row.name; });
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace

std::optional<Dims> integers(const Argument& argument, std::size_t spatial) {
  Dims dims;
  if (argument.is_constant()) {
    if (!argument.constant().isInt()) return std::nullopt;
    dims = {argument.constant().toInt()};
  } else if (const auto* list = std::get_if<std::vector<Argument>>(&argument.held)) {
    for (const Argument& item : *list) {
      if (!item.is_constant() || !item.constant().isInt()) return std::nullopt;
      dims.push_back(item.constant().toInt());
    }
  }
  if (dims.size() == 1) dims.resize(spatial, dims[0]);
  return dims;
}

std::optional<std::vector<double>> reals(const Argument& argument) {
  const auto* list = std::get_if<std::vector<Argument>>(&argument.held);
  if (!list || !std::ranges::all_of(*list, is_real)) return std::nullopt;
  std::vector<double> numbers;
  for (const Argument& item : *list) numbers.push_back(number(item, 0));
  return numbers;
}

bool is_pointwise(std::string_view name) {
  return std::ranges::find(kPointwise, name) != kPointwise.end();
}

const ConvolutionOp* convolution_op(std::string_view name) { return row_of(kConvolutions, name); }
const PoolingOp* pooling_op(std::string_view name) { return row_of(kPoolings, name); }

bool is_reshape(const Node& node) {
  if (node.arguments.empty() || node.arguments[0].value() == kNone) return false;
  if (node.name == "aten::contiguous") {
    const Argument& format = node.arguments[1];
    return is_none(format) || (format.is_constant() &&
                               format.constant().toMemoryFormat() == c10::MemoryFormat::Contiguous);
  }
  return is_any(node, {"aten::flatten", "aten::view", "aten::reshape", "aten::unflatten",
                       "aten::_unsafe_view", "aten::reshape_as", "aten::view_as"}) &&
         node.overload != "dtype";
}

bool is_concat(const Node& node, std::int64_t dim, std::size_t rank) {
  if (node.name != "aten::cat" || node.arguments.size() < 2) return false;
  if (!node.arguments[1].is_constant() || !node.arguments[1].constant().isInt()) return false;
  const std::int64_t own = node.arguments[1].constant().toInt();
  return own == dim || own + static_cast<std::int64_t>(rank) == dim;
}

bool moves_elements(const Node& node) {
  return node.read(0) != kNone &&
         (is_reshape(node) ||
          is_any(node, {"aten::permute", "aten::transpose", "aten::squeeze", "aten::unsqueeze",
                        "aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::channel_shuffle"}));
}

// For example [0, 2, 3, 1].
Dims order_to_last(std::size_t rank) {
  Dims order(rank);
  for (std::size_t i = 1; i < rank; ++i) order[i] = static_cast<std::int64_t>(i % (rank - 1) + 1);
  return order;
}
Dims order_from_last(std::size_t rank) {
  const Dims to_last = order_to_last(rank);
  Dims order(rank);
  for (std::size_t i = 1; i < rank; ++i) {
    order[static_cast<std::size_t>(to_last[i])] = static_cast<std::int64_t>(i);
  }
  return order;
}

Dims order_of(const Node& node, std::size_t rank) {
  const auto size = static_cast<std::int64_t>(rank);
  Dims order(rank);
  if (node.name == "aten::permute") {
    const auto dims = integers(node.arguments[1], rank);
    if (!dims || dims->size() != rank) return {};
    for (std::size_t i = 0; i < rank; ++i) order[i] = ((*dims)[i] + size) % size;
    return order;
  }
  if (node.name != "aten::transpose" || node.overload != "int") return {};
  std::iota(order.begin(), order.end(), 0);
  const auto dim = [&](std::size_t i) {
    return static_cast<std::size_t>((node.arguments[i].constant().toInt() + size) % size);
  };
  std::swap(order[dim(1)], order[dim(2)]);
  return order;
}

bool is_random(const Node& node) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  return !op || op->hasTag(at::Tag::nondeterministic_seeded);
}

}  // namespace torch_blocked::graph
