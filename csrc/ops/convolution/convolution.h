// A convolution is a list of implementations; the one that should be fastest runs it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>

#include "kernels/vector/epilogue.h"
#include "ops/blocked.h"
#include "ops/implementations.h"
#include "ops/convolution/row_chain.h"
#include "ops/moving/shuffle.h"
#include "ops/window.h"
#include "runtime/onednn/primitive.h"

namespace torch_blocked {

// Of strides, dilations and paddings.
inline bool are_all(const Dims& dims, std::int64_t value) {
  return std::ranges::all_of(dims, [&](std::int64_t each) { return each == value; });
}

using kernels::Activation;
using kernels::Epilogue;

// Everything that decides how a convolution runs; logical sizes, one entry per spatial dim.
struct ConvolutionProblem {
  Dims src_dims, dst_dims;  // [N, IC, *spatial], [N, OC, *spatial]
  Dims weight_dims;         // ATen's: [OC, IC/groups, *kernel], transposed [IC, OC/groups, *kernel]
  Dims stride, padding, dilation, output_padding;
  std::int64_t groups;
  Format src_format, dst_format;  // not kStrided
  bool transposed, has_bias;
  at::ScalarType dtype;
  Epilogue epilogue = {};  // dst = epilogue(sum + bias)

  std::size_t spatial() const { return stride.size(); }
  Window window(std::size_t i) const {
    return {weight_dims[2 + i], stride[i], padding[i], dilation[i]};
  }
  // src and dst in one blocked format: what most implementations are for.
  bool blocked() const { return src_format == dst_format && src_format.is_blocked(); }
};

// Called for `pixels` pixels of dst from `first` on, all of one row of [N, blocks of channels],
// once they are stored and by who stored them, while they are in its caches.
using OnStored = std::function<void(std::int64_t row, std::int64_t first, std::int64_t pixels)>;

// The data of one run, in the formats that the problem names. bias has OC elements, or is null;
// residual is in dst's format, and null unless the epilogue adds it.
struct ConvolutionBuffers {
  const void *src, *weights, *bias, *residual;
  void* dst;
  const OnStored* on_stored = nullptr;  // null unless the plan calls it
};

// A problem made ready to run: it owns primitives and sizes, so one thread runs it at a time.
inline constexpr auto kFloatBytes = static_cast<std::int64_t>(sizeof(float));

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

// Checks these arguments and makes a problem of them, with src and dst in one format. What ATen
// lets be given once holds for all spatial dims. Raises ValueError or TypeError.
ConvolutionProblem convolution_problem(at::IntArrayRef src_dims, Format format,
                                       const at::Tensor& weight, const at::Tensor& bias,
                                       at::IntArrayRef stride, at::IntArrayRef padding,
                                       at::IntArrayRef dilation, bool transposed,
                                       at::IntArrayRef output_padding, std::int64_t groups);

// All implementations of convolution. One that declines a problem is asked for it again without the
// epilogue, which then takes a pass of its own.
using ConvolutionImplementations = Implementations<ConvolutionProblem, ConvolutionPlan>;
const ConvolutionImplementations& convolution_implementations();

// By the implementation that should be fastest.
using NamedPlan = ConvolutionImplementations::Named;
NamedPlan plan_convolution(const ConvolutionProblem& problem);
// By one implementation of the list, fast or slow; nothing if it cannot. Raises ValueError for an
// unknown name.
std::optional<NamedPlan> plan_convolution(const ConvolutionProblem& problem,
                                          const std::string& implementation);
// Why an implementation that has no plan for a problem has none, in words.
std::string convolution_refusal(const ConvolutionProblem& problem,
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

// All fields of a problem as a key; `name` tells apart the caches that use one.
Key convolution_key(const char* name, const ConvolutionProblem& problem);

// All spatial sizes of a problem, as d, h, w.
struct SpatialSizes {
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;
};
SpatialSizes spatial_sizes(const ConvolutionProblem& problem);

// So many groups as fill whole blocks of src and dst are one convolution, whose weights between
// groups are 0: of groups of 8 channels two in a block of 16, with half of the products in vain.
// `count` such bundles of `groups` lie beside each other; none where groups are left over. Of one
// blocked format.
struct GroupBundles {
  std::int64_t count, groups;
};
GroupBundles group_bundles(const ConvolutionProblem& problem);

// The rows of the list, and their estimates. convolution_onednn.cpp: primitives on blocked
// activations; the same in nhwc between two reorders.
std::optional<ConvolutionPlan> plan_onednn_blocked(const ConvolutionProblem& problem);
std::optional<ConvolutionPlan> plan_onednn_channels_last(const ConvolutionProblem& problem);
double estimate_onednn_blocked(const ConvolutionProblem& problem);
const char* refuses_onednn_blocked(const ConvolutionProblem& problem);
const char* refuses_onednn_channels_last(const ConvolutionProblem& problem);

// convolution_planes.cpp: 1x1 on planes.
std::optional<ConvolutionPlan> plan_planes(const ConvolutionProblem& problem);
double estimate_planes(const ConvolutionProblem& problem);
const char* refuses_planes(const ConvolutionProblem& problem);

// convolution_few_rows.cpp: kernels that cover the image.
std::optional<ConvolutionPlan> plan_few_rows(const ConvolutionProblem& problem);
double estimate_few_rows(const ConvolutionProblem& problem);
const char* refuses_few_rows(const ConvolutionProblem& problem);

// convolution_winograd.cpp: kernels of several taps at stride 1 or 2, with fewer products.
std::optional<ConvolutionPlan> plan_winograd4(const ConvolutionProblem& problem);
std::optional<ConvolutionPlan> plan_winograd2(const ConvolutionProblem& problem);
double estimate_winograd4(const ConvolutionProblem& problem);
double estimate_winograd2(const ConvolutionProblem& problem);
const char* refuses_winograd(const ConvolutionProblem& problem);
const char* refuses_winograd2(const ConvolutionProblem& problem);
// The same for bfloat16: F(4x4) computes in float32, F(2x2) multiplies bfloat16.
std::optional<ConvolutionPlan> plan_winograd4_bfloat16(const ConvolutionProblem& problem);
std::optional<ConvolutionPlan> plan_winograd2_bfloat16(const ConvolutionProblem& problem);
std::optional<ConvolutionPlan> plan_winograd4_fixed(const ConvolutionProblem& problem);
double estimate_winograd4_fixed(const ConvolutionProblem& problem);
double estimate_winograd4_bfloat16(const ConvolutionProblem& problem);
double estimate_winograd2_bfloat16(const ConvolutionProblem& problem);
const char* refuses_winograd_bfloat16(const ConvolutionProblem& problem);
// The same for kernels of 6 to 8 rows and columns at stride 2 over a picture's few channels, whose
// even and odd rows and columns become channels of their own: a 4x4 kernel at stride 1.
std::optional<ConvolutionPlan> plan_winograd3(const ConvolutionProblem& problem);
double estimate_winograd3(const ConvolutionProblem& problem);
const char* refuses_winograd3(const ConvolutionProblem& problem);

// convolution_winograd_phases.cpp: transposed kernels with strides, as several at stride 1.
std::optional<ConvolutionPlan> plan_winograd_phases(const ConvolutionProblem& problem);
double estimate_winograd_phases(const ConvolutionProblem& problem);
const char* refuses_winograd_phases(const ConvolutionProblem& problem);

// convolution_strassen.cpp: 1x1 kernels by seven eighths of the products. Only optimize runs it,
// where it was measured to be fastest: it takes a NaN to other pixels.
std::optional<ConvolutionPlan> plan_strassen(const ConvolutionProblem& problem);
const char* refuses_strassen(const ConvolutionProblem& problem);
double estimate_strassen(const ConvolutionProblem& problem);

// convolution_amx.cpp: by tiles of bfloat16 products, on CPUs that have them.
std::optional<ConvolutionPlan> plan_amx(const ConvolutionProblem& problem);
double estimate_amx(const ConvolutionProblem& problem);
const char* refuses_amx(const ConvolutionProblem& problem);

// convolution_grouped.cpp: groups of one channel (depthwise), and groups of few.
std::optional<ConvolutionPlan> plan_depthwise(const ConvolutionProblem& problem);
std::optional<ConvolutionPlan> plan_grouped(const ConvolutionProblem& problem);
double estimate_depthwise(const ConvolutionProblem& problem);
double estimate_grouped(const ConvolutionProblem& problem);
const char* refuses_depthwise(const ConvolutionProblem& problem);
std::optional<ConvolutionPlan> plan_depthwise_bfloat16(const ConvolutionProblem& problem);
double estimate_depthwise_bfloat16(const ConvolutionProblem& problem);
const char* refuses_depthwise_bfloat16(const ConvolutionProblem& problem);
std::optional<ConvolutionPlan> plan_grouped_bfloat16(const ConvolutionProblem& problem);
double estimate_grouped_bfloat16(const ConvolutionProblem& problem);
const char* refuses_grouped_bfloat16(const ConvolutionProblem& problem);
const char* refuses_grouped(const ConvolutionProblem& problem);

// convolution_direct.cpp: our kernel without tricks, for what oneDNN's blocked ones refuse or run
// slower.
std::optional<ConvolutionPlan> plan_direct(const ConvolutionProblem& problem);
double estimate_direct(const ConvolutionProblem& problem);
const char* refuses_direct(const ConvolutionProblem& problem);

// convolution_bfloat16.cpp: by dot products of bfloat16.
std::optional<ConvolutionPlan> plan_dots_bfloat16(const ConvolutionProblem& problem);
double estimate_dots_bfloat16(const ConvolutionProblem& problem);
const char* refuses_dots_bfloat16(const ConvolutionProblem& problem);

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
