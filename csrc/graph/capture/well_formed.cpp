// Checks a graph from a file: its value numbers, the arguments and results of its nodes, and its
// sizes.
#include "graph/capture/well_formed.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "format/errors.h"

namespace torch_blocked::graph {
namespace {

constexpr auto kOptimizeAgain = "optimize the model again";

// Vectors are as long as the highest value number; a model of 100,000 ops has some 300,000 values.
constexpr Value kMostValues = Value{1} << 22;
// More than any memory holds, and small enough that kernels' products of sizes do not overflow.
constexpr std::int64_t kMostElements = std::int64_t{1} << 46;
constexpr std::size_t kMostDims = 64;

// The ops that quantize are written in Python, and the dispatcher does not know them until somebody
// imports them. Their nodes have kinds of their own.
const c10::FunctionSchema* known_schema(const Node& node) {
  static const std::array schemas{
      torch::jit::parseSchema("quantized_decomposed::quantize_per_tensor(Tensor input, float "
                              "scale, int zero_point, int quant_min, int quant_max, ScalarType "
                              "dtype) -> Tensor"),
      torch::jit::parseSchema("quantized_decomposed::dequantize_per_tensor(Tensor input, float "
                              "scale, int zero_point, int quant_min, int quant_max, ScalarType "
                              "dtype, *, ScalarType? out_dtype=None) -> Tensor"),
      torch::jit::parseSchema("quantized_decomposed::dequantize_per_channel(Tensor input, Tensor "
                              "scales, Tensor? zero_points, int axis, int quant_min, int "
                              "quant_max, ScalarType dtype, *, ScalarType? out_dtype=None) -> "
                              "Tensor")};
  const auto found = std::ranges::find_if(schemas, [&](const c10::FunctionSchema& schema) {
    return schema.name() == node.name && schema.overload_name() == node.overload;
  });
  return found == schemas.end() ? nullptr : &*found;
}

// ---- arguments ----------------------------------------------------------------------------------

bool is_name_below(const c10::IValue& value, std::int64_t end) {
  return value.isInt() && value.toInt() >= 0 && value.toInt() < end;
}

// Ints that stand for an enum of torch's are cast to it, so they must be in its range.
bool is_constant_of(const c10::IValue& value, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::NumberType:
      return value.isScalar();
    case c10::TypeKind::FloatType:
      return value.isDouble() || value.isInt();
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return value.isInt();
    case c10::TypeKind::BoolType:
      return value.isBool();
    case c10::TypeKind::StringType:
      return value.isString();
    case c10::TypeKind::DeviceObjType:
      return value.isDevice();
    case c10::TypeKind::ScalarTypeType:
      return is_name_below(value, static_cast<std::int64_t>(at::ScalarType::Undefined));
    case c10::TypeKind::LayoutType:
      return is_name_below(value, static_cast<std::int64_t>(at::Layout::NumOptions));
    case c10::TypeKind::MemoryFormatType:
      return is_name_below(value, static_cast<std::int64_t>(at::MemoryFormat::NumOptions));
    default:
      return false;
  }
}

bool is_int_list(const c10::Type& element) {
  return element.kind() == c10::TypeKind::IntType || element.kind() == c10::TypeKind::SymIntType;
}

bool argument_fits(const Argument& argument, const c10::Type& type) {
  if (const auto* optional = type.castRaw<c10::OptionalType>()) {
    const bool is_none = argument.is_constant() && argument.constant().isNone();
    return is_none || argument_fits(argument, *optional->getElementType());
  }
  if (argument.value() != kNone) return type.kind() == c10::TypeKind::TensorType;
  const auto* list = type.castRaw<c10::ListType>();
  if (argument.is_constant()) {
    // One int may stand for all entries of a list of sizes.
    if (list) return argument.constant().isInt() && is_int_list(*list->getElementType());
    return is_constant_of(argument.constant(), type);
  }
  const auto* items = std::get_if<std::vector<Argument>>(&argument.held);
  if (!list || !items) return false;
  const c10::Type& element = *list->getElementType();
  return std::ranges::all_of(*items, [&](const Argument& item) {
    const bool is_number = item.is_constant() && item.constant().isScalar();
    const bool are_tensors = element.isSubtypeOf(*c10::OptionalType::ofTensor());
    return argument_fits(item, element) && !(are_tensors && is_number);
  });
}

void check_arguments(const Node& node, const c10::FunctionSchema& schema) {
  const auto& declared = schema.arguments();
  if (node.arguments.size() != declared.size()) {
    fail_value("optimize", text(declared.size(), " arguments of ", node.name),
               text(node.arguments.size()), kOptimizeAgain);
  }
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const c10::Argument& argument = declared[i];
    if (argument_fits(node.arguments[i], *argument.real_type())) continue;
    fail_value("optimize",
               text(argument.real_type()->str(), " as ", argument.name(), " of ", node.name),
               "another type", kOptimizeAgain);
  }
}

// A list of tensors may have any length; otherwise each result of the schema has a value.
void check_result_count(const Node& node, const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  const bool list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  const std::size_t wanted = list ? std::max(node.outputs.size(), std::size_t{1}) : returns.size();
  if (node.outputs.size() == wanted && wanted > 0) return;
  fail_value("optimize", text(wanted, " results of ", node.name), text(node.outputs.size()),
             kOptimizeAgain);
}

void check_call(const Node& node) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  const c10::FunctionSchema* schema = op ? &op->schema() : known_schema(node);
  if (!schema) {
    const std::string name = node.overload.empty() ? node.name : node.name + "." + node.overload;
    fail_value("optimize", "an op of this PyTorch and the libraries that are imported", name,
               "import what registers it");
  }
  check_arguments(node, *schema);
  check_result_count(node, *schema);
}

// ---- values -------------------------------------------------------------------------------------

class Values {
 public:
  void define(Value value) {
    if (value < 0 || value >= kMostValues) {
      fail_value("optimize", text("numbers of values from 0 to ", kMostValues - 1), text(value),
                 kOptimizeAgain);
    }
    const auto at = static_cast<std::size_t>(value);
    if (at >= known_.size()) known_.resize(at + 1);
    if (known_[at])
      fail_value("optimize", "a number for each value", text(value, " twice"), kOptimizeAgain);
    known_[at] = true;
  }
  void read(Value value) const {
    if (is_known(value)) return;
    fail_value("optimize", "values that are there before they are read", text(value),
               kOptimizeAgain);
  }
  // Whether it is within the highest number.
  bool is_counted(Value value) const { return value >= 0 && value < count(); }
  Value count() const { return std::ssize(known_); }

 private:
  bool is_known(Value value) const {
    return is_counted(value) && known_[static_cast<std::size_t>(value)];
  }

  std::vector<bool> known_;
};

void check_metas(const std::vector<Meta>& metas, std::size_t inputs) {
  if (metas.size() != inputs) {
    fail_value("optimize", text("sizes of ", inputs, " inputs"), text(metas.size()),
               kOptimizeAgain);
  }
  for (const Meta& meta : metas) check_dims(meta.dims);
}

// A question may be about a value that no node makes any more.
void check_question(const Question& question, const Values& values) {
  if (values.is_counted(question.value) && question.what >= Question::kAtLeast) return;
  fail_value("optimize", "questions about values of the graph",
             text(question.what, " of ", question.value), kOptimizeAgain);
}

}  // namespace

void check_dims(const Dims& dims) {
  std::int64_t elements = 1;
  bool possible = dims.size() <= kMostDims;
  for (const std::int64_t dim : dims) {
    possible = possible && dim >= 0 && dim <= kMostElements / std::max(elements, std::int64_t{1});
    if (!possible) break;
    elements *= std::max(dim, std::int64_t{1});
  }
  if (!possible) fail_value("optimize", "sizes that a tensor can have", text(dims), kOptimizeAgain);
}

void check_and_count(Graph& graph) {
  Values values;
  for (const Value value : graph.inputs) values.define(value);
  for (const auto& [value, tensor] : graph.constants) values.define(value);
  for (const Node& node : graph.nodes) {
    check_call(node);
    for_values(node.arguments, [&](Value value) { values.read(value); });
    for (const Value value : node.outputs) values.define(value);
  }
  for_values(graph.outputs, [&](Value value) { values.read(value); });
  check_metas(graph.input_metas, graph.inputs.size());
  for (const std::vector<Meta>& metas : graph.also) check_metas(metas, graph.inputs.size());
  for (const auto& [value, meta] : graph.metas) check_dims(meta.dims);
  for (const Question& question : graph.questions) check_question(question, values);
  graph.values = values.count();
}

}  // namespace torch_blocked::graph
