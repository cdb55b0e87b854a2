// How long a convolution should take by its sizes, for the estimates of the lists. Measured on
// Zen 4; only which of two estimates is the longer matters.
#pragma once

#include "ops/convolution_problem.h"

namespace torch_blocked {

// Factors for an implementation that is known to be faster (slower) than another, but not by how
// much: they only decide between two that take about the same time.
inline constexpr double kBarelyFaster = 0.999, kBarelySlower = 1.001;

// FMAs in microseconds, on one thread.
double microseconds_of(double fmas);

// The FMAs that take as long as `products` for each of `tiles` tiles, per pair of an input and an
// output channel: few tiles wait for the weights. Of 44 models' layers on maps of 7x7 and 8x8,
// those of Winograd's 4 tiles took as long as 10 to 12 would on a Zen 3, on one thread and on two;
// with 10, one of 40 plans of ResNet-18 had F(4x4) at 512@7, which takes 1.7 times as long as
// F(2x2) (benchmarks/plans.py): 7 % of the model.
double streamed_fmas(double products, double tiles);

bool is_dilated(const ConvolutionProblem& problem);

// The part of all taps that meet src and no padding: a quarter of those 12 pixels apart on 16x16.
double part_inside(const ConvolutionProblem& problem);

// A convolution that sums all its products, at the pace of oneDNN's blocked kernels; of taps that
// are apart, those that meet src.
double direct_microseconds(const ConvolutionProblem& problem);

// A pass that moves src or dst: about memcpy's pace in cache, and the start of the threads.
double moving_microseconds(const Dims& dims, at::ScalarType dtype);

}  // namespace torch_blocked
