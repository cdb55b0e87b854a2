// A convolution is a list of implementations; the one that should be fastest runs it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/convolution_problem.h"
#include "ops/implementations.h"
#include "ops/moving/shuffle.h"
#include "ops/products/row_chain.h"
#include "torch_blocked/descriptor.h"

namespace torch_blocked {

// The data of one run, in the formats that the problem names. bias has OC elements, or is null;
// residual is in dst's format, and null unless the epilogue adds it.
struct ConvolutionBuffers {
  const void *src, *weights, *bias, *residual;
  void* dst;
  const OnStored* on_stored = nullptr;  // null unless the plan calls it
};

// A problem made ready to run: it owns primitives and sizes, so one thread runs it at a time.
struct ConvolutionPlan {
  // The name of what pack() makes, the key of packed weights; empty: the weights stay dense.
  std::string weights_format;
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  // Of what pack() makes; 0: only that tells.
  std::int64_t packed_bytes = 0;
  std::function<void(const ConvolutionBuffers& buffers)> run;
  // All that run() does is in loops of share_units: threads may go through it together.
  bool loops_only = false;
  // run() calls on_stored for each pixel of dst once.
  bool calls_on_stored = false;
  // What pack() makes, with oneDNN's dims (G,) O, I, *kernel; nothing where no descriptor can say
  // it.
  std::optional<Descriptor> weights_desc = {};
  // By so much it must be faster than others, where all are timed, to be taken.
  double handicap = 1;
  // How it runs for some rows at a time, and what does so; nothing where it does not. Of the
  // buffers weights and bias count.
  std::optional<RowStage> row_stage = {};
  std::function<RunRows(const ConvolutionBuffers& buffers)> run_rows = {};
};

using ConvolutionImplementation = Implementation<ConvolutionProblem, ConvolutionPlan>;

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
  static std::optional<ConvolutionPlan> plan(const ConvolutionImplementation& row,
                                             const ConvolutionProblem& problem);
  static double estimate(const ConvolutionImplementation& row, const ConvolutionProblem& problem);
};

using ConvolutionImplementations =
    Implementations<ConvolutionProblem, ConvolutionPlan, AskAgainWithoutEpilogue>;
const ConvolutionImplementations& convolution_implementations();

// By the implementation that should be fastest.
using NamedPlan = ConvolutionImplementations::Named;
NamedPlan plan_convolution(const ConvolutionProblem& problem);
// By one implementation of the list, fast or slow; nothing if it cannot. Raises ValueError for an
// unknown name.
std::optional<NamedPlan> plan_convolution(const ConvolutionProblem& problem,
                                          const std::string& implementation);

// Plans (once per problem, then from a cache), packs the weights (likewise) and runs. Returns the
// physical dst.
at::Tensor run_convolution(const ConvolutionProblem& problem, const at::Tensor& src,
                           const at::Tensor& weight, const at::Tensor& bias);

// The plan of a kernel of bfloat16 that adds the bias as float32, before it rounds.
ConvolutionPlan with_float_bias(ConvolutionPlan plan, std::int64_t channels);

// How a float32 1x1 at stride 1 runs for some rows at a time; nothing where src and dst have two
// formats, or plain ones, or images have depth.
std::optional<RowStage> pixel_row_stage(const ConvolutionProblem& problem,
                                        std::int64_t packed_floats);

// The weights in the plan's format, made anew; dense ones made contiguous.
at::Tensor pack_weights(const ConvolutionPlan& plan, const at::Tensor& weight);

// Direct convolution of input channels that lie in several tensors of the problem's format, in any
// order. It reads them in place, and gathers_in_place() tells whether it can; run() takes the
// tensors.
struct GatheredConvolutionPlan {
  std::string weights_format;
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  std::function<void(const std::vector<const float*>& srcs, const ConvolutionBuffers& buffers)> run;
};
bool gathers_in_place(const ConvolutionProblem& problem, const std::vector<ChannelOf>& channels);
GatheredConvolutionPlan plan_direct_gathered(const ConvolutionProblem& problem,
                                             const std::vector<ChannelOf>& channels,
                                             const std::vector<std::int64_t>& src_channels);

}  // namespace torch_blocked
