// The formats that implementations want for a module's op: oneDNN's format tag `any`, answered by
// all of our implementations.
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
  // Nothing if no descriptor can describe the packed weights.
  std::optional<Descriptor> weights;
  Descriptor dst;
};

// Asks oneDNN alone, with `any` for src, weights and dst.
inline constexpr const char* kAsksOneDnn = "onednn";

// The formats of the implementation that should be fastest, where src and dst are in the format in
// which it should be: a block for which the CPU has fast kernels, or channels-last. The formats in
// the problem are ignored. `implementation` asks one of the list; it raises NotImplementedError if
// that one has no kernel.
WantedFormats wanted_formats(const ConvolutionProblem& problem,
                             const std::optional<std::string>& implementation);
WantedFormats wanted_formats(const LinearProblem& problem,
                             const std::optional<std::string>& implementation);

// Defined in convolution/onednn.cpp. It may name a `ref` kernel.
WantedFormats formats_wanted_by_onednn(const ConvolutionProblem& problem);

}  // namespace torch_blocked
