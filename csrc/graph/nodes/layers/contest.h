// Chooses and times the implementations of a convolution that may be the fastest.
#pragma once

#include "graph/planning/plan.h"
#include "ops/convolution/convolution.h"

namespace torch_blocked::graph {

double flops_of(const ConvolutionProblem& problem);
// A lower bound, in microseconds, for any kernel that sums all products.
double least_microseconds(const ConvolutionProblem& problem);
// Whether the bounds hold for the problem.
bool is_known(const ConvolutionProblem& problem);

// A plain src with more channels than this is reordered to the format of dst.
inline constexpr std::int64_t kFewChannels = 4;

// A lower bound, in microseconds, for a problem in another format than `of_blocks`, given that the
// same layer takes `known` in `of_blocks`.
double least_beside(const ConvolutionProblem& problem, double known, Format of_blocks);

// The same layer in other formats, and what was chosen for it.
struct Beside {
  const ConvolutionProblem& problem;
  Tuner::Choice choice;
};

// The fastest implementation in the problem's formats; nothing if none takes it. With `beside`,
// times are measured against that layer's.
std::optional<Tuner::Choice> fastest(Tuner& tuner, const ConvolutionProblem& problem,
                                     const std::optional<Beside>& beside = std::nullopt);
// All implementations that take the problem, timed.
std::vector<Tuner::Choice> all_timed(Tuner& tuner, const ConvolutionProblem& problem);

}  // namespace torch_blocked::graph
