// The formats that the implementations of a module's op want: oneDNN's question `any`, put to all
// that there are.
#pragma once

#include <optional>
#include <string>

#include "ops/convolution/convolution.h"
#include "ops/linear/linear.h"
#include "torch_blocked/descriptor.h"

namespace torch_blocked {

struct WantedFormats {
  std::string implementation;
  Descriptor src;
  // Nothing where no descriptor can say what weights are packed into.
  std::optional<Descriptor> weights;
  Descriptor dst;
};

// Asks oneDNN alone, with `any` for src, weights and dst.
inline constexpr const char* kAsksOneDnn = "onednn";

// By the implementation that should be fastest, in the format in which it should be: a block that
// the CPU has fast kernels for, or channels-last. Of the problem's formats nothing is read.
// `implementation` asks one of the list; NotImplementedError where that has no kernel.
WantedFormats wanted_formats(const ConvolutionProblem& problem,
                             const std::optional<std::string>& implementation);
WantedFormats wanted_formats(const LinearProblem& problem,
                             const std::optional<std::string>& implementation);

// convolution/onednn.cpp: may name a `ref` kernel.
WantedFormats formats_wanted_by_onednn(const ConvolutionProblem& problem);

}  // namespace torch_blocked
