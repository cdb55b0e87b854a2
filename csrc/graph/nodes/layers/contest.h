// Which implementations of a convolution may be the fastest, and how they are timed.
#pragma once

#include "graph/planning/plan.h"
#include "ops/convolution/convolution.h"

namespace torch_blocked::graph {

double flops_of(const ConvolutionProblem& problem);
// Microseconds below which no kernel that sums all products can be.
double least_microseconds(const ConvolutionProblem& problem);
// Whether bounds hold for it.
bool is_known(const ConvolutionProblem& problem);

// A plain src of more channels is reordered to the format of dst.
inline constexpr std::int64_t kFewChannels = 4;

// Microseconds that a problem in another format than `of_blocks` takes at least, where that of the
// same layer in it takes `known`.
double least_beside(const ConvolutionProblem& problem, double known, Format of_blocks);

// The same layer in other formats, and what was found for it.
struct Beside {
  const ConvolutionProblem& problem;
  Tuner::Choice choice;
};

// Nothing if none takes the problem. The problem names the formats of src and dst. What is timed
// beside others is told in the measure of their time.
std::optional<Tuner::Choice> fastest(Tuner& tuner, const ConvolutionProblem& problem,
                                     const std::optional<Beside>& beside = std::nullopt);
// All that take the problem, timed.
std::vector<Tuner::Choice> all_timed(Tuner& tuner, const ConvolutionProblem& problem);

}  // namespace torch_blocked::graph
