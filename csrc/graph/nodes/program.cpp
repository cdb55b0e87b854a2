// Pointwise ops that follow each other, of any kind and number, as one pass over their operands.
#include "kernels/program.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "graph/arithmetic.h"
#include "graph/nodes/boxed.h"
#include "graph/planner.h"
#include "kernels/kernels.h"
#include "runtime/threads.h"

namespace torch_blocked::graph {
namespace {

using kernels::Instruction;
using kernels::ProgramOperand;
using kernels::ProgramRow;
using Kind = ProgramOperand::Kind;

// What a node holds. Its operands are the values that it reads, then `vectors`.
struct PointwiseProgram {
  std::vector<Instruction> instructions;
  std::vector<at::Tensor> vectors;  // [C], of images
  Value like;                       // an operand with the dims of the result
  bool is_image;                    // these are of an image, which may be in any format
};

// ---- from ops to nodes --------------------------------------------------------------------------

bool is_image(const Dims& dims) { return dims.size() >= 3 && dims.size() <= 5; }

bool is_one(std::int64_t size) { return size == 1; }

// How a tensor of `dims` is read for a result of dims `like`; nothing if it cannot.
std::optional<Kind> kind_of(const Dims& dims, const Dims& like) {
  if (dims == like) return Kind::kFull;
  if (!is_image(like) || dims.size() != like.size() || dims[0] != like[0]) return std::nullopt;
  const auto pixels = std::span(dims).subspan(2);
  if (dims[1] == like[1] && std::ranges::all_of(pixels, is_one)) return Kind::kLanes;
  if (dims[1] == 1 && std::ranges::equal(pixels, std::span(like).subspan(2))) return Kind::kPixels;
  return std::nullopt;
}

// Whether a constant has one value per channel of images with these dims: [C, 1, 1], [1, C, 1, 1].
bool is_vector(const at::Tensor& constant, const Dims& like) {
  const std::int64_t rank = std::ssize(like), own = constant.dim();
  return is_image(like) && constant.scalar_type() == at::kFloat && own >= rank - 1 && own <= rank &&
         constant.size(own - rank + 1) == like[1] && constant.numel() == like[1];
}

bool is_operand(const Rewrite& rewrite, Value value, const Dims& like) {
  const auto constant = rewrite.graph.constants.find(value);
  if (constant != rewrite.graph.constants.end()) {
    return constant->second.numel() == 1 || is_vector(constant->second, like);
  }
  const Meta& meta = rewrite.meta(value);
  return meta.dtype == at::kFloat && kind_of(meta.dims, like);
}

// Whether a node may be part of a program: results of comparisons come from the program itself.
bool may_join(const Rewrite& rewrite, const Node& node) {
  bool fits = true;
  for_values(node.arguments, [&](Value value) {
    fits &= rewrite.meta(value).dtype == at::kBool ||
            is_operand(rewrite, value, rewrite.meta(node.output()).dims);
  });
  return fits;
}

// Values first, then vectors of constants, then numbers, which take no place in a program.
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

// The program of a region as a node; nothing if there can be none.
std::optional<Node> program_of(const Rewrite& rewrite, Region region) {
  const Graph& graph = rewrite.graph;
  const Node& last = *region.nodes.back();
  const Dims& dims = rewrite.meta(last.output()).dims;
  std::ranges::stable_sort(region.operands, {},
                           [&](Value value) { return order_of(graph, value); });
  std::vector<Argument> reads;
  PointwiseProgram program{
      .instructions = {}, .vectors = {}, .like = kNone, .is_image = is_image(dims)};
  for (const Value value : region.operands) {
    if (!is_operand(rewrite, value, dims)) return std::nullopt;
    const int order = order_of(graph, value);
    if (order == 0) reads.push_back({ValueRef{value}});
    if (order == 1) program.vectors.push_back(graph.constants.at(value).flatten().clone());
    if (order == 0 && rewrite.meta(value).dims == dims) program.like = value;
  }
  const std::int64_t places = std::ssize(reads) + std::ssize(program.vectors);
  if (program.like == kNone || places > kernels::Program::kMostOperands) return std::nullopt;
  Computation computation;
  const auto result = lower(graph, region, computation);
  auto instructions = result ? computation.compiled(*result) : std::nullopt;
  if (!instructions) return std::nullopt;
  program.instructions = *std::move(instructions);
  Node node{
      .name = name_of(region), .overload = last.overload, .arguments = {}, .outputs = last.outputs};
  node.become(nodes::program, std::move(reads), std::move(program));
  return node;
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
}

// ---- sizes and formats --------------------------------------------------------------------------

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {metas[Uses::at(node.as<PointwiseProgram>()->like)]};
}

std::optional<FixedFormats> fixed(const Node& node) {
  if (node.as<PointwiseProgram>()->is_image) return std::nullopt;
  return FixedFormats{kPlain, kPlain};
}

double cost(Planner& planner, const Node& node, Format format) {
  const Dims& dims = planner.metas()[Uses::at(node.output())].dims;
  const bool fits = dims.size() < 3 || format.lanes(dims[1]) <= ProgramRow::kMostLanes;
  return fits ? 0 : kImpossible;
}

// ---- running ------------------------------------------------------------------------------------

// The result as rows of pixels of lanes.
struct Rows {
  std::int64_t rows, blocks, pixels, lanes, tail;

  explicit Rows(const SlotPlan& dst, bool images) {
    if (!images) {
      *this = {1, 1, c10::multiply_integers(dst.dims), 1, 0};
      return;
    }
    lanes = dst.format.lanes(dst.dims[1]);
    blocks = dst.format.blocks(dst.dims[1]);
    rows = dst.dims[0] * blocks;
    pixels = c10::multiply_integers(at::IntArrayRef(dst.dims).slice(2));
    tail = dst.format.tail(dst.dims[1]);
  }

 private:
  Rows(std::int64_t rows, std::int64_t blocks, std::int64_t pixels, std::int64_t lanes,
       std::int64_t tail)
      : rows(rows), blocks(blocks), pixels(pixels), lanes(lanes), tail(tail) {}
};

// An operand of the whole result.
struct Operand {
  Kind kind;
  std::optional<Slot> slot;  // a value, or else
  at::Tensor vector;         // one value per channel, zeros beyond C

  // What a row of dst reads from its pixel `first` on.
  ProgramOperand at(const std::vector<at::Tensor>& tensors, const Rows& of, std::int64_t row,
                    std::int64_t first) const {
    if (!slot) {
      return {kind, vector.const_data_ptr<float>() + row % of.blocks * of.lanes, 0};
    }
    const auto* data = tensors[*slot].const_data_ptr<float>();
    switch (kind) {
      case Kind::kFull:
        return {kind, data + (row * of.pixels + first) * of.lanes, 0};
      case Kind::kLanes:
        return {kind, data + row * of.lanes, 0};
      case Kind::kPixels:
        return {kind, data + (row / of.blocks * of.pixels + first) * stride, stride};
    }
    __builtin_unreachable();
  }

  std::int64_t stride = 1;
};

std::vector<Operand> operands_of(const Step& step, const Plan& plan) {
  const PointwiseProgram& program = *step.node->as<PointwiseProgram>();
  const SlotPlan& dst = plan.slots[step.writes[0]];
  std::vector<Operand> operands;
  for_values(step.node->arguments, [&](Value value) {
    const Slot slot = step.reads.at(value);
    operands.push_back({.kind = kind_of(plan.slots[slot].dims, dst.dims).value(),
                        .slot = slot,
                        .vector = {},
                        .stride = dst.format.lanes(1)});
  });
  for (const at::Tensor& vector : program.vectors) {
    const std::int64_t lanes = dst.format.lanes(dst.dims[1]) * dst.format.blocks(dst.dims[1]);
    at::Tensor padded = at::zeros({lanes}, at::kFloat);
    padded.narrow(0, 0, dst.dims[1]).copy_(vector);
    operands.push_back({.kind = Kind::kLanes, .slot = {}, .vector = std::move(padded)});
  }
  return operands;
}

void clear_tail(const ProgramRow& row, std::int64_t tail) {
  for (std::int64_t pixel = 0; pixel < row.pixels; ++pixel) {
    std::fill(row.dst + pixel * row.lanes + tail, row.dst + (pixel + 1) * row.lanes, 0.f);
  }
}

Prepared prepare(const Step& step, const Running& running) {
  // Some strips: a unit's operands are filled once.
  constexpr std::int64_t kUnit = 8 * ProgramRow::kMostLanes;
  const PointwiseProgram& held = *step.node->as<PointwiseProgram>();
  const Slot to = step.writes[0];
  const Rows rows(running.plan.slots[to], held.is_image);
  const std::int64_t piece = std::max<std::int64_t>(kUnit / rows.lanes, 1);  // pixels
  const std::int64_t pieces = (rows.pixels + piece - 1) / piece;             // of a row
  const auto run = [&tensors = running.tensors, operands = operands_of(step, running.plan),
                    instructions = held.instructions, to, rows, piece, pieces] {
    const kernels::Program program{.instructions = instructions.data(),
                                   .count = std::ssize(instructions),
                                   .operands = std::ssize(operands)};
    auto* dst = tensors[to].mutable_data_ptr<float>();
    const auto& table = rows.lanes % 8 == 0 ? kernels::kernels_for(rows.lanes) : kernels::kernels();
    parallel_units(rows.rows * pieces, piece * rows.lanes,
                   [&](std::int64_t begin, std::int64_t end) {
                     std::array<ProgramOperand, kernels::Program::kMostOperands> read;
                     for (std::int64_t i = begin; i < end; ++i) {
                       const std::int64_t row = i / pieces, first = i % pieces * piece;
                       for (std::size_t k = 0; k < operands.size(); ++k) {
                         read[k] = operands[k].at(tensors, rows, row, first);
                       }
                       const ProgramRow of{.operands = read.data(),
                                           .dst = dst + (row * rows.pixels + first) * rows.lanes,
                                           .pixels = std::min(piece, rows.pixels - first),
                                           .lanes = rows.lanes};
                       table.run_program(program, of);
                       if (rows.tail > 0 && row % rows.blocks == rows.blocks - 1)
                         clear_tail(of, rows.tail);
                     }
                   });
  };
  return {run, true};
}

}  // namespace

constinit const NodeKind nodes::program = {
    .name = "program",
    .combine = combine,
    .results = results,
    .fixed = fixed,
    .cost = cost,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->as<PointwiseProgram>()->like; },
    .prepare = prepare,
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
