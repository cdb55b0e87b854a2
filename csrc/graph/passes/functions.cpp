// Recognizes functions of one tensor by what they compute, not by how they are written. A region of
// pointwise nodes is run on sample numbers. If the results are those of one of ATen's functions,
// the region becomes a node of that function, which kernels have in their epilogues.
#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/passes/arithmetic.h"
#include "kernels/rows/arithmetic.h"

namespace torch_blocked::graph {
namespace {

using kernels::Instruction;
using kernels::Program;
using Samples = std::vector<double>;

// The numbers that tell functions apart: 0, and both signs from where smooth functions are nearly
// linear to far beyond all kinks. In float there are fewer, because x * x must not overflow.
constexpr double kFar = 1e12, kFarInFloat = 1e4;

const Samples& probes() {
  static const Samples numbers = [] {
    Samples all{0};
    for (double x = 1e-3; x <= kFar; x *= x < 1e3 ? 1.17 : 10) {
      all.push_back(x);
      all.push_back(-x);
    }
    return all;
  }();
  return numbers;
}

// Where formulas for the same function differ: at -infinity (x + |x|) / 2 is NaN, and relu is not.
const Samples& beyond() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static const Samples numbers{kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()};
  return numbers;
}

// Whether a program's constants guarantee that all its kinks lie well within the probes, however it
// transforms its operand first.
bool has_common_numbers(const std::vector<Instruction>& program) {
  const auto common = [](double number) {
    return !std::isfinite(number) || std::abs(number) < 1e5;
  };
  const auto scales = [](double number) { return number == 0 || std::abs(number) > 1e-2; };
  return std::ranges::all_of(program, [&](const Instruction& it) {
    return common(it.alpha) && common(it.beta) && common(it.x_shift) && common(it.y_shift) &&
           scales(it.x_scale) && scales(it.y_scale);
  });
}

// The results of a program at `probes`, in the arithmetic of T. All operands are the same probe.
template <typename T>
Samples evaluate(const std::vector<Instruction>& program, const Samples& probes) {
  using V = at::vec::Vectorized<T>;
  const std::vector<T> given(probes.begin(), probes.end());
  std::vector<T> results(given.size());
  std::vector<V> places(Program::kZeros + 1, V(0));
  const auto number = [](double value) { return V(static_cast<T>(value)); };
  for (std::size_t i = 0; i < given.size(); i += V::size()) {
    const auto count = static_cast<int>(std::min<std::size_t>(V::size(), given.size() - i));
    std::fill_n(places.begin(), Program::kMostOperands, V::loadu(&given[i], count));
    V last(0);
    for (const Instruction& it : program) {
      const auto place = [&](std::int64_t at) { return places[static_cast<std::size_t>(at)]; };
      last = kernels::compute(it.op, place(it.x) * number(it.x_scale) + number(it.x_shift),
                              place(it.y) * number(it.y_scale) + number(it.y_shift), place(it.z),
                              number(it.alpha), number(it.beta));
      places[static_cast<std::size_t>(it.dst)] = last;
    }
    last.store(&results[i], count);
  }
  return {results.begin(), results.end()};
}

// Whether all results at probes up to `far` are the wanted ones, within `relative` of the result or
// of the probe.
bool are_near(const Samples& found, const Samples& wanted, double relative, double far) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double probe = std::abs(probes()[i]);
    const double scale = std::max(std::abs(wanted[i]), std::min(probe, 1.));
    if (probe <= far && !(std::abs(found[i] - wanted[i]) <= relative * scale)) return false;
  }
  return true;
}

// Whether all results are the wanted ones exactly, where NaN equals NaN.
bool are_same(const Samples& found, const Samples& wanted) {
  return std::ranges::equal(
      found, wanted, [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); });
}

Node function(const char* name, std::vector<c10::IValue> more = {}) {
  Node node{.name = name, .overload = "", .arguments = {{ValueRef{0}}}, .outputs = {1}};
  for (c10::IValue& value : more) node.arguments.push_back({std::move(value)});
  return node;
}

std::optional<std::vector<Instruction>> program_of(const Graph& graph, const Region& region) {
  Computation computation;
  const auto result = lower(graph, region, computation);
  return result ? computation.compiled(*result) : std::nullopt;
}

struct Known {
  Node node;
  Samples numbers, beyond;
};

Known known(Node node) {
  const auto program = program_of({}, {.nodes = {&node}, .operands = {0}}).value();
  return {std::move(node), evaluate<double>(program, probes()),
          evaluate<double>(program, beyond())};
}

const std::vector<Known>& known_functions() {
  static const std::vector<Known> all = [] {
    std::vector<Known> functions;
    for (Node node :
         {function("aten::hardswish"), function("aten::silu"), function("aten::gelu", {"none"}),
          function("aten::gelu", {"tanh"}), function("aten::sigmoid"),
          function("aten::hardsigmoid"), function("aten::mish"), function("aten::tanh"),
          function("aten::softplus", {1., 20.})}) {
      functions.push_back(known(std::move(node)));
    }
    return functions;
  }();
  return all;
}

// Functions with parameters, each with the parameters that fit best.
std::vector<Node> fitted_functions(const Samples& numbers) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto [lowest, highest] = std::ranges::minmax(numbers);
  const double least = lowest < -kFar / 10 ? -kInfinity : lowest;
  const double greatest = highest > kFar / 10 ? kInfinity : highest;
  const double slope = numbers[2] / probes()[2];  // at the first probe below 0
  std::vector<Node> fitted;
  if (least > -kInfinity || greatest < kInfinity) {  // otherwise it is x
    fitted.push_back(function("aten::clamp", {least, greatest}));
  }
  if (slope > 0 && std::abs(slope - 1) > 1e-3) {
    fitted.push_back(function("aten::leaky_relu", {slope}));
  }
  return fitted;
}

// ATen's function that a program of one operand computes; nothing if there is none.
std::optional<Node> recognize(const std::vector<Instruction>& program) {
  constexpr double kSame = 1e-6, kSameInFloat = 1e-3;
  if (!has_common_numbers(program)) return std::nullopt;
  const Samples numbers = evaluate<double>(program, probes());
  if (!std::ranges::all_of(numbers, [](double each) { return std::isfinite(each); })) return {};
  const auto is = [&](const Known& wanted) {  // in float, too: adding 2^23 to x rounds it
    return are_near(numbers, wanted.numbers, kSame, kFar) &&
           are_near(evaluate<float>(program, probes()), wanted.numbers, kSameInFloat,
                    kFarInFloat) &&
           are_same(evaluate<double>(program, beyond()), wanted.beyond);
  };
  for (const Known& each : known_functions()) {
    if (is(each)) return each.node;
  }
  for (Node& node : fitted_functions(numbers)) {
    if (const Known fitted = known(std::move(node)); is(fitted)) return fitted.node;
  }
  return std::nullopt;
}

// The only tensor that a region reads, besides numbers; kNone if it reads several.
Value only_tensor(const Graph& graph, const Region& region) {
  Value tensor = kNone;
  for (const Value value : region.operands) {
    const auto constant = graph.constants.find(value);
    if (constant != graph.constants.end() && constant->second.numel() == 1) continue;
    if (constant != graph.constants.end() || tensor != kNone) return kNone;
    tensor = value;
  }
  return tensor;
}

// A node that computes the same as a region.
struct Recognized {
  Node node;
  std::vector<const Node*> instead_of;
};

// The node for the largest region that ends with `last` and is a function of one tensor with the
// same dims.
std::optional<Recognized> recognize_before(const Rewrite& rewrite, const Regions& regions,
                                           const Node& last) {
  constexpr std::size_t kMostNodes = 16;
  auto region = regions.begin(last);
  std::optional<Recognized> best;
  while (region && region->nodes.size() <= kMostNodes) {
    const Value src = only_tensor(rewrite.graph, *region);
    if (src != kNone && rewrite.meta(src) == rewrite.meta(last.output())) {
      const auto program = program_of(rewrite.graph, *region);
      if (auto found = program ? recognize(*program) : std::nullopt) {
        found->arguments[0] = {ValueRef{src}};
        found->outputs = last.outputs;
        found->origin = last.origin;
        best = {*std::move(found), region->nodes};
      }
    }
    if (!regions.grow(*region)) break;
  }
  return best;
}

}  // namespace

void recognize_functions(Rewrite& rewrite) {
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  const Regions regions(rewrite, uses);
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    if (node->outputs.size() != 1 || !has_arithmetic(*node)) continue;
    auto found = recognize_before(rewrite, regions, *node);
    if (!found || (found->instead_of.size() == 1 && find_activation(*node))) continue;
    for (const Node* each : found->instead_of)
      uses.maker[Uses::at(each->output())]->outputs.clear();
    *node = std::move(found->node);
  }
  sweep(graph);
}

}  // namespace torch_blocked::graph
