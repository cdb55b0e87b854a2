// Estimates how long a convolution takes from its sizes, for the lists of implementations. The
// constants were measured on a Zen 4. Only the order of two estimates matters.
#pragma once

#include "ops/convolution_problem.h"

namespace torch_blocked {

// Factors for an implementation that is known to be a little faster (slower) than another. They
// only decide between two implementations with about the same estimate.
inline constexpr double kBarelyFaster = 0.999, kBarelySlower = 1.001;

// How long `fmas` FMAs take on one thread.
double microseconds_of(double fmas);

// The number of FMAs that take as long as `products` products for each of `tiles` tiles, per pair
// of an input and an output channel. A layer of few tiles waits for its weights. In the layers of
// 44 models on maps of 7x7 and 8x8, Winograd's 4 tiles took as long as 10 to 12 would, on a Zen 3
// with one thread and with two. With 10, one of 40 plans of ResNet-18 chose F(4x4) at 512@7, which
// takes 1.7 times as long as F(2x2) (benchmarks/plans.py): 7 % of the model.
double streamed_fmas(double products, double tiles);

bool is_dilated(const ConvolutionProblem& problem);

// The share of all taps that meet src rather than padding: a quarter for taps 12 pixels apart on
// 16x16.
double part_inside(const ConvolutionProblem& problem);

// The time of a convolution that sums all its products, at the pace of oneDNN's blocked kernels. A
// dilated one counts only the taps that meet src.
double direct_microseconds(const ConvolutionProblem& problem);

// The time of a pass that moves src or dst: about memcpy's pace in cache, plus the start of the
// threads.
double moving_microseconds(const Dims& dims, at::ScalarType dtype);

}  // namespace torch_blocked
