// Translates pointwise ops of ATen into instructions of kernels/rows/program.h.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "graph/passes/regions.h"
#include "kernels/rows/program.h"

namespace torch_blocked::graph {

// The value at a place of a program, times a scale, plus a shift. A number is the shift alone.
struct Term {
  static constexpr std::int64_t kNumber = -1;

  std::int64_t place = kNumber;
  double scale = 1, shift = -0.;

  static Term number(double value) { return {.place = kNumber, .scale = 0, .shift = value}; }
  bool is_number() const { return place == kNumber; }
};

// A program that is being built. Numbers stay in terms until an instruction reads them, so that a
// chain of sums and products with numbers becomes one instruction, or part of another. Every
// instruction has a place of its own, after those of kernels::Program::kMostOperands operands.
class Computation {
 public:
  using Op = kernels::Arithmetic;

  Term operand(std::int64_t index) const { return {.place = index}; }
  Term apply(Op op, const Term& x, double alpha = 0, double beta = 0);
  Term apply(Op op, const Term& x, const Term& y);
  Term apply(Op op, const Term& x, const Term& y, const Term& z);
  Term clamp(const Term& x, double least, double greatest);
  Term add(const Term& x, const Term& y);
  Term multiply(const Term& x, const Term& y);
  Term divide(const Term& x, const Term& y);

  const std::vector<kernels::Instruction>& instructions() const { return instructions_; }
  // The program that computes `result`: the instructions that it needs, on as few strips as
  // possible. Nothing if it needs more strips than there are.
  std::optional<std::vector<kernels::Instruction>> compiled(const Term& result) const;

 private:
  Term emit(kernels::Instruction instruction);
  std::int64_t place_of(const Term& term);

  std::vector<kernels::Instruction> instructions_;
};

// Whether the arithmetic of a node's op is known. Such a result depends, at each index, only on the
// operands at that index.
bool has_arithmetic(const Node& node);
// Whether it is a comparison of known arithmetic.
bool is_comparison(const Node& node);

// Adds the nodes of a region to a computation and returns the last one's result; nothing if a
// node's arithmetic is not known for its arguments. Operands get places in the order of
// region.operands.
std::optional<Term> lower(const Graph& graph, const Region& region, Computation& computation);

// functions.cpp: replaces nodes that together compute one of ATen's functions of one tensor by that
// function; x * relu6(x + 3) / 6 becomes hardswish.
void recognize_functions(Rewrite& rewrite);

}  // namespace torch_blocked::graph
