// Plans and runs a convolution: the implementation of the list that should be fastest runs it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/convolution_problem.h"
#include "ops/implementations.h"
#include "ops/layer_plan.h"
#include "ops/moving/shuffle.h"

namespace torch_blocked {

using ConvolutionImplementation = Implementation<ConvolutionProblem, LayerPlan>;

// The rows of the list; each is defined in the file of its kernel's name.
namespace convolutions {
#define IMPLEMENTATION(name) extern const ConvolutionImplementation name;
#include "ops/convolution/list.inc"
#undef IMPLEMENTATION
}  // namespace convolutions

// A row that refuses a float32 problem for its epilogue is asked again without it; the epilogue
// then takes a pass of its own over dst.
struct AskAgainWithoutEpilogue {
  static const char* refusal(const ConvolutionImplementation& row,
                             const ConvolutionProblem& problem);
  static std::optional<LayerPlan> plan(const ConvolutionImplementation& row,
                                       const ConvolutionProblem& problem);
  static double estimate(const ConvolutionImplementation& row, const ConvolutionProblem& problem);
};

using ConvolutionImplementations =
    Implementations<ConvolutionProblem, LayerPlan, AskAgainWithoutEpilogue>;
const ConvolutionImplementations& convolution_implementations();

// The plan by the implementation that should be fastest.
using NamedPlan = ConvolutionImplementations::Named;
NamedPlan plan_convolution(const ConvolutionProblem& problem);
// The plan by one implementation of the list; nothing if it does not take the problem. Raises
// ValueError for an unknown name.
std::optional<NamedPlan> plan_convolution(const ConvolutionProblem& problem,
                                          const std::string& implementation);

// Plans, packs the weights and runs. Plans and packed weights are cached. Returns the physical dst.
at::Tensor run_convolution(const ConvolutionProblem& problem, const at::Tensor& src,
                           const at::Tensor& weight, const at::Tensor& bias);

// Wraps the plan of a bfloat16 kernel that takes its bias as float32 and adds it before it rounds.
LayerPlan with_float_bias(LayerPlan plan, std::int64_t channels);

// How a float32 1x1 at stride 1 runs a few rows at a time. Nothing if src and dst differ in format
// or are plain, or if images have depth.
std::optional<RowStage> pixel_row_stage(const ConvolutionProblem& problem,
                                        std::int64_t packed_floats);

// Packs the weights into the plan's format, without a cache. Weights that stay dense become
// contiguous.
at::Tensor pack_weights(const LayerPlan& plan, const at::Tensor& weight);

// Direct convolution whose input channels lie in several tensors of the problem's format, in any
// order. It reads them in place if gathers_in_place() says that it can. run() takes the tensors.
struct GatheredConvolutionPlan {
  std::string weights_format;
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  std::function<void(const std::vector<const void*>& srcs, const LayerBuffers& buffers)> run;
};
bool gathers_in_place(const ConvolutionProblem& problem, const std::vector<ChannelOf>& channels);
GatheredConvolutionPlan plan_direct_gathered(const ConvolutionProblem& problem,
                                             const std::vector<ChannelOf>& channels,
                                             const std::vector<std::int64_t>& src_channels);

}  // namespace torch_blocked
