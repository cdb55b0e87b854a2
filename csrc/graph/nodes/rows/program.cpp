// Sequences of pointwise ops, of any kind and number, as one pass over their operands. Operands and
// result may be bytes or bfloat16: a few of them at a time are converted to float32, in the cache.
#include "kernels/rows/program.h"

#include <algorithm>
#include <array>

#include "graph/nodes/boxed.h"
#include "graph/nodes/layers.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/passes/arithmetic.h"
#include "graph/passes/types.h"
#include "graph/planning/planner.h"
#include "kernels/kernels.h"
#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

using kernels::Instruction;
using kernels::ProgramOperand;
using kernels::ProgramRow;
using Kind = ProgramOperand::Kind;

// What a node holds. The operands are the values that the node reads, then `vectors`.
struct PointwiseProgram {
  std::vector<Instruction> instructions;
  std::vector<at::Tensor> vectors;  // [C], of images
  Value like;                       // an operand with the dims of the result
  bool is_image;                    // these are an image's dims, which may be in any format
  at::ScalarType dtype;             // of operands and result, where these are not bytes
  std::map<Value, Quantization> bytes = {};  // operands that are bytes
  std::optional<Quantization> dst = {};      // none: numbers
};

// ---- from ops to nodes --------------------------------------------------------------------------

bool is_image(const Dims& dims) { return dims.size() >= 3 && dims.size() <= 5; }

bool is_one(std::int64_t size) { return size == 1; }

// How a program reads a tensor of `dims` for a result of dims `like`; nothing if it cannot.
std::optional<Kind> kind_of(const Dims& dims, const Dims& like) {
  if (dims == like) return Kind::kFull;
  if (!is_image(like) || dims.size() != like.size() || dims[0] != like[0]) return std::nullopt;
  const auto pixels = std::span(dims).subspan(2);
  if (dims[1] == like[1] && std::ranges::all_of(pixels, is_one)) return Kind::kLanes;
  if (dims[1] == 1 && std::ranges::equal(pixels, std::span(like).subspan(2))) return Kind::kPixels;
  return std::nullopt;
}

// Whether a constant has one value per channel of images with these dims: [C, 1, 1], [1, C, 1, 1].
bool is_vector(const at::Tensor& constant, const Meta& like) {
  const std::int64_t rank = std::ssize(like.dims), own = constant.dim();
  return is_image(like.dims) && constant.scalar_type() == like.dtype && own >= rank - 1 &&
         own <= rank && constant.size(own - rank + 1) == like.dims[1] &&
         constant.numel() == like.dims[1];
}

bool is_operand(const Rewrite& rewrite, Value value, const Meta& like) {
  const auto constant = rewrite.graph.constants.find(value);
  if (constant != rewrite.graph.constants.end()) {
    return constant->second.numel() == 1 || is_vector(constant->second, like);
  }
  const Meta& meta = rewrite.meta(value);
  return meta.dtype == like.dtype && kind_of(meta.dims, like.dims);
}

// Whether a node may be part of a program. Comparisons that it reads are part of the program, too.
bool may_join(const Rewrite& rewrite, const Node& node) {
  const Meta& result = rewrite.meta(node.output());
  bool fits = true;
  for_values(node.arguments, [&](Value value) {
    const at::ScalarType dtype = rewrite.meta(value).dtype;
    const bool compares = result.dtype == at::kBool;  // numbers of any type
    fits &= dtype == at::kBool ||
            is_operand(rewrite, value, {result.dims, compares ? dtype : result.dtype});
  });
  return fits;
}

// Reshapes the slopes of prelu, one per channel, to [C, 1, 1]. They then broadcast, and a program
// reads them as a vector.
void find(Rewrite& rewrite) {
  std::map<Value, at::Tensor>& constants = rewrite.graph.constants;
  for (Node& node : rewrite.graph.nodes) {
    if (node.name != "aten::prelu" || !constants.contains(node.read(1))) continue;
    const at::Tensor slopes = constants.at(node.read(1));
    const Dims& dims = rewrite.meta(node.output()).dims;
    if (slopes.numel() == 1 || dims.size() < 3) continue;
    Dims shape(dims.size() - 1, 1);
    shape[0] = slopes.numel();
    node.name = "aten::_prelu_kernel";  // prelu itself does not take such a weight
    node.arguments[1] = {ValueRef{add_constant(rewrite, slopes.reshape(shape))}};
  }
}

// Order of operands: values first, then constant vectors, then numbers, which take no place in a
// program.
int order_of(const Graph& graph, Value value) {
  const auto constant = graph.constants.find(value);
  if (constant == graph.constants.end()) return 0;
  return constant->second.numel() == 1 ? 2 : 1;
}

std::string name_of(const Region& region) {
  std::string name = region.nodes[0]->name;
  for (std::size_t i = 1; i < region.nodes.size(); ++i) {
    name = joined_name(name, *region.nodes[i]);
  }
  return name;
}

at::Tensor as_float32(const at::Tensor& vector) {
  return vector.flatten().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

// The program of a region as a node; nothing if it cannot be one.
std::optional<Node> program_of(const Rewrite& rewrite, Region region) {
  const Graph& graph = rewrite.graph;
  const Node& last = *region.nodes.back();
  const Meta& result_meta = rewrite.meta(last.output());
  const Dims& dims = result_meta.dims;
  std::ranges::stable_sort(region.operands, {},
                           [&](Value value) { return order_of(graph, value); });
  std::vector<Argument> reads;
  PointwiseProgram program{.instructions = {},
                           .vectors = {},
                           .like = kNone,
                           .is_image = is_image(dims),
                           .dtype = result_meta.dtype};
  for (const Value value : region.operands) {
    if (!is_operand(rewrite, value, result_meta)) return std::nullopt;
    const int order = order_of(graph, value);
    if (order == 0) reads.push_back({ValueRef{value}});
    if (order == 1) program.vectors.push_back(as_float32(graph.constants.at(value)));
    if (order == 0 && rewrite.meta(value).dims == dims) program.like = value;
  }
  const std::int64_t places = std::ssize(reads) + std::ssize(program.vectors);
  if (program.like == kNone || places > kernels::Program::kMostOperands) return std::nullopt;
  Computation computation;
  const auto result = lower(graph, region, computation);
  auto instructions = result ? computation.compiled(*result) : std::nullopt;
  if (!instructions) return std::nullopt;
  program.instructions = *std::move(instructions);
  Node node{.name = name_of(region),
            .overload = last.overload,
            .arguments = {},
            .outputs = last.outputs,
            .origin = last.origin};
  node.become(nodes::program, std::move(reads), std::move(program));
  return node;
}

// Makes programs read bytes instead of dequantized numbers, and write bytes where their result is
// quantized.
void read_bytes(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    auto* program = node.as<PointwiseProgram>();
    if (!program) continue;
    for (Argument& argument : node.arguments) {
      const Value numbers = argument.value();
      const Node* maker = uses.maker[Uses::at(numbers)];
      const Quantization* q = quantization_of(maker, nodes::dequantize);
      const auto known = q ? program->bytes.find(maker->read(0)) : program->bytes.end();
      if (!q || (known != program->bytes.end() && known->second != *q)) continue;
      const Value bytes = maker->read(0);
      program->bytes[bytes] = *q;
      if (program->like == numbers) program->like = bytes;
      argument = {ValueRef{bytes}};
    }
    Node* reader = uses.only_reader(node.output());
    if (const Quantization* q = quantization_of(reader, nodes::quantize)) {
      program->dst = *q;
      node.outputs = reader->outputs;
      reader->outputs.clear();
    }
  }
  sweep(rewrite.graph);
}

void combine(Rewrite& rewrite) {
  constexpr std::size_t kMostNodes = 24;
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  const Regions regions(rewrite, uses, may_join);
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    auto region = regions.begin(*node);
    std::optional<Node> best;
    std::vector<const Node*> taken;
    while (region && region->nodes.size() <= kMostNodes) {
      if (auto found = program_of(rewrite, *region)) {
        best = std::move(found);
        taken = region->nodes;
      }
      if (!regions.grow(*region)) break;
    }
    if (!best) continue;
    for (const Node* each : taken) uses.maker[Uses::at(each->output())]->outputs.clear();
    *node = *std::move(best);
  }
  sweep(graph);
  read_bytes(rewrite);
}

// The convolution whose result a program reads, if it reads nothing else except constants; else
// null. A vector with more channels than a strip has floats does not fit into a strip in every
// format.
Node* convolution_before(const Rewrite& rewrite, const Node& node, const Uses& uses) {
  const auto* program = node.as<PointwiseProgram>();
  if (!program || !program->is_image || program->dtype != at::kFloat || program->dst)
    return nullptr;
  const Meta& result = rewrite.meta(node.output());
  const bool fits = node.arguments.size() == 1 && node.read(0) == program->like &&
                    program->bytes.empty() && result.dims[1] <= ProgramRow::kMostLanes;
  Node* maker = fits ? uses.maker[Uses::at(program->like)] : nullptr;
  const auto* convolution = maker ? maker->as<Convolution>() : nullptr;
  if (!convolution || uses.only_reader(program->like) != &node) return nullptr;
  return rewrite.meta(program->like) == result ? maker : nullptr;
}

}  // namespace

Node conversion(const Rewrite& rewrite, Value src, Value dst, const Origin& origin) {
  const Meta& meta = rewrite.meta(dst);
  Computation computation;
  Node node{.name = "to", .overload = {}, .arguments = {}, .outputs = {dst}, .origin = origin};
  node.become(nodes::program, {{ValueRef{src}}},
              PointwiseProgram{.instructions = *computation.compiled(computation.operand(0)),
                               .vectors = {},
                               .like = src,
                               .is_image = is_image(meta.dims),
                               .dtype = meta.dtype});
  return node;
}

void join_programs(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    Node* maker = convolution_before(rewrite, node, uses);
    if (!maker) continue;
    auto& program = *node.as<PointwiseProgram>();
    maker->as<Convolution>()->stored = StoredProgram{program.instructions, program.vectors};
    maker->name = joined_name(maker->name, node);
    maker->outputs = std::exchange(node.outputs, {});
  }
  sweep(rewrite.graph);
}

namespace {

// ---- sizes and formats --------------------------------------------------------------------------

void narrow(Rewrite&, Node& node) { node.as<PointwiseProgram>()->dtype = at::kBFloat16; }

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  const auto& program = *node.as<PointwiseProgram>();
  return {{metas[Uses::at(program.like)].dims, program.dst ? at::kByte : program.dtype}};
}

std::optional<FixedFormats> fixed(const Node& node) {
  if (node.as<PointwiseProgram>()->is_image) return std::nullopt;
  return FixedFormats{kPlain, kPlain};
}

// A vector with more channels than a strip has floats does not fit into a strip.
double cost(Planner& planner, const Node& node, Format format) {
  const auto dims_of = [&](Value value) { return planner.metas()[Uses::at(value)].dims; };
  const Dims dims = dims_of(node.output());
  if (dims.size() < 3 || format.lanes(dims[1]) <= ProgramRow::kMostLanes) return 0;
  bool all_full = node.as<PointwiseProgram>()->vectors.empty();
  for_values(node.arguments, [&](Value value) { all_full &= dims_of(value) == dims; });
  return all_full ? 0 : kImpossible;
}

// ---- running ------------------------------------------------------------------------------------

// The result as rows of pixels, each of `lanes` lanes; `blocks` rows are an image.
struct Rows {
  std::int64_t rows = 1, blocks = 1, pixels, lanes = 1, tail = 0;

  std::int64_t channels() const { return tail == 0 ? lanes : tail; }  // of the last block
};

Rows rows_of(const SlotPlan& dst) {
  const std::int64_t channels = dst.dims[1], blocks = dst.format.blocks(channels);
  return {.rows = dst.dims[0] * blocks,
          .blocks = blocks,
          .pixels = c10::multiply_integers(at::IntArrayRef(dst.dims).slice(2)),
          .lanes = dst.format.lanes(channels),
          .tail = dst.format.tail(channels)};
}

// An operand for the whole result: a value's slot, or else one number per channel, with zeros
// beyond C.
struct Operand {
  Kind kind;
  std::optional<Slot> slot;
  at::Tensor vector = {};
  std::optional<kernels::Quantizer> bytes = {};
  bool is_bfloat16 = false;
};

std::vector<Operand> operands_of(const Step& step, const Plan& plan) {
  const PointwiseProgram& program = *step.node->as<PointwiseProgram>();
  const SlotPlan& dst = plan.slots[step.writes[0]];
  std::vector<Operand> operands;
  for_values(step.node->arguments, [&](Value value) {
    const Slot slot = step.reads.at(value);
    Operand operand{kind_of(plan.slots[slot].dims, dst.dims).value(), slot};
    const auto bytes = program.bytes.find(value);
    if (bytes != program.bytes.end()) operand.bytes = bytes->second.quantizer();
    operand.is_bfloat16 = plan.slots[slot].dtype == at::kBFloat16;
    operands.push_back(std::move(operand));
  });
  for (const at::Tensor& vector : program.vectors) {
    operands.push_back({Kind::kLanes, std::nullopt, padded_vector(vector, dst.format)});
  }
  return operands;
}

// Runs a program on the tensors of its slots, in units of some pixels of one row.
class ProgramRun {
 public:
  ProgramRun(const Step& step, const Running& running)
      : tensors_(running.tensors),
        instructions_(step.node->as<PointwiseProgram>()->instructions),
        operands_(operands_of(step, running.plan)),
        to_(step.writes[0]) {
    if (const auto& dst = step.node->as<PointwiseProgram>()->dst) dst_ = dst->quantizer();
    const SlotPlan& dst = running.plan.slots[to_];
    dtype_ = dst.dtype;
    converts_ = dtype_ != at::kFloat || std::ranges::any_of(operands_, [](const Operand& operand) {
                  return operand.bytes || operand.is_bfloat16;
                });
    const bool all_full = std::ranges::all_of(
        operands_, [](const Operand& operand) { return operand.kind == Kind::kFull; });
    const bool is_image = step.node->as<PointwiseProgram>()->is_image;
    if (is_image) {
      rows_ = rows_of(dst);
      plane_lanes_ = dst.format.lanes(1);
    }
    if (!is_image || (all_full && rows_.tail == 0)) {  // one row, whatever its dims
      rows_ = {.pixels = c10::multiply_integers(is_image ? dst.format.physical_shape(dst.dims)
                                                         : dst.dims)};
    }
    unit_pixels_ = std::max<std::int64_t>((converts_ ? kUnitToConvert : kUnit) / rows_.lanes, 1);
    units_ = (rows_.pixels + unit_pixels_ - 1) / unit_pixels_;
  }

  void operator()() const {
    parallel_units(rows_.rows * units_, unit_pixels_ * rows_.lanes,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       run_unit(i / units_, i % units_ * unit_pixels_);
                     }
                   });
  }

 private:
  // Floats in a unit: several strips, so that vectors are spread over a strip once for all of them.
  static constexpr std::int64_t kUnit = 8 * ProgramRow::kMostLanes;
  // Smaller where operands are converted to float32: several of them should fit into L1.
  static constexpr std::int64_t kUnitToConvert = 2 * ProgramRow::kMostLanes;

  void run_unit(std::int64_t row, std::int64_t first) const {
    const std::int64_t pixels = std::min(unit_pixels_, rows_.pixels - first),
                       size = unit_pixels_ * std::max(rows_.lanes, plane_lanes_),
                       at = (row * rows_.pixels + first) * rows_.lanes;
    // Room for the result, then for each operand.
    float* numbers = converts_ ? workspace((std::ssize(operands_) + 1) * size) : nullptr;
    std::array<ProgramOperand, kernels::Program::kMostOperands> operands;
    float* own = numbers;
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      if (own) own += size;
      operands[i] = operand_at(operands_[i], row, first, pixels, own);
    }
    const at::Tensor& dst = tensors_[to_];
    const ProgramRow of{.operands = operands.data(),
                        .dst = dtype_ == at::kFloat ? dst.mutable_data_ptr<float>() + at : numbers,
                        .pixels = pixels,
                        .lanes = rows_.lanes};
    const auto& table =
        rows_.lanes % 8 == 0 ? kernels::kernels_for(rows_.lanes) : kernels::kernels();
    table.run_program({.instructions = instructions_.data(),
                       .count = std::ssize(instructions_),
                       .operands = std::ssize(operands_)},
                      of);
    // Clears the tail. Not for bytes: their 0 is another number than 0; bfloat16's 0 is 0.
    const bool ends_in_tail = row % rows_.blocks == rows_.blocks - 1;
    if (ends_in_tail && !dst_) clear_lanes(of.dst, pixels, rows_.lanes, rows_.channels());
    if (dtype_ == at::kBFloat16) {
      auto* bits = static_cast<std::uint16_t*>(dst.mutable_data_ptr()) + at;
      table.narrow_floats(numbers, bits, pixels * rows_.lanes);
    }
    if (!dst_) return;
    auto* bytes = dst.mutable_data_ptr<std::uint8_t>() + at;
    table.quantize(*dst_, numbers, bytes, pixels * rows_.lanes);
    if (ends_in_tail) clear_lanes(bytes, pixels, rows_.lanes, rows_.channels());
  }

  // Elements of a tensor.
  struct Part {
    std::int64_t begin, count, stride;
  };

  // The part of an operand that a row reads from its pixel `first` on.
  Part part_of(Kind kind, std::int64_t row, std::int64_t first, std::int64_t pixels) const {
    switch (kind) {
      case Kind::kFull:
        return {(row * rows_.pixels + first) * rows_.lanes, pixels * rows_.lanes, 0};
      case Kind::kLanes:
        return {row * rows_.lanes, rows_.lanes, 0};
      case Kind::kPixels:
        return {(row / rows_.blocks * rows_.pixels + first) * plane_lanes_, pixels * plane_lanes_,
                plane_lanes_};
    }
    __builtin_unreachable();
  }

  // The same part in memory. Bytes and bfloat16 are converted into `numbers`.
  ProgramOperand operand_at(const Operand& operand, std::int64_t row, std::int64_t first,
                            std::int64_t pixels, float* numbers) const {
    if (!operand.slot) {
      const auto* vectors = operand.vector.const_data_ptr<float>();
      return {operand.kind, vectors + row % rows_.blocks * rows_.lanes, 0};
    }
    const at::Tensor& src = tensors_[*operand.slot];
    const auto [begin, count, stride] = part_of(operand.kind, row, first, pixels);
    const bool is_full = operand.kind == Kind::kPixels && rows_.lanes == 1 && plane_lanes_ == 1;
    const Kind kind = is_full ? Kind::kFull : operand.kind;
    if (operand.is_bfloat16) {
      const auto* bits = static_cast<const std::uint16_t*>(src.const_data_ptr()) + begin;
      kernels::kernels().widen_bfloats(bits, numbers, count);
      return {kind, numbers, stride};
    }
    if (!operand.bytes) return {kind, src.const_data_ptr<float>() + begin, stride};
    const auto* bytes = src.const_data_ptr<std::uint8_t>() + begin;
    kernels::kernels().dequantize(*operand.bytes, bytes, numbers, count);
    return {kind, numbers, stride};
  }

  const std::vector<at::Tensor>& tensors_;
  std::vector<Instruction> instructions_;
  std::vector<Operand> operands_;
  Slot to_;
  std::optional<kernels::Quantizer> dst_ = {};
  at::ScalarType dtype_;  // of the result
  bool converts_;         // an operand or the result is not float32
  Rows rows_{};
  std::int64_t plane_lanes_ = 1;  // lanes of an image of one channel
  std::int64_t unit_pixels_, units_;
};

// Numbers may overwrite numbers, and bytes may overwrite bytes.
Value stored_over(const Step& step) {
  const auto& program = *step.node->as<PointwiseProgram>();
  return program.bytes.contains(program.like) == program.dst.has_value() ? program.like : kNone;
}

Prepared prepare(const Step& step, const Running& running) {
  return {ProgramRun(step, running), true};
}

}  // namespace

constinit const NodeKind nodes::program = {
    .name = "program",
    .find = find,
    .combine = combine,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kEachItsOwn; },
    .narrow = narrow,
    .fixed = fixed,
    .cost = cost,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = stored_over,
    .prepare = prepare,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
