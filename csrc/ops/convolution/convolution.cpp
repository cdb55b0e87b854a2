// Convolution and transposed convolution of blocked activations with dense weights. The arguments
// are checked and become a problem; the implementation with the lowest estimate runs it. The choice
// is made once per problem and cached together with the plan.
#include "ops/convolution/convolution.h"

#include <algorithm>
#include <memory>

#include "format/errors.h"
#include "ops/convolution_time.h"
#include "ops/moving/reorder.h"
#include "ops/post_ops.h"
#include "ops/registered.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/packed_weights.h"
#include "runtime/onednn/primitive.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

void check_dtypes(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const bool same = weight.scalar_type() == input.scalar_type();
  if (same && (!bias.defined() || bias.scalar_type() == input.scalar_type())) return;
  const at::Tensor& other = same ? bias : weight;
  fail_type("convolution",
            text("a ", same ? "bias" : "weight", " of the input's dtype, ", input.dtype().name()),
            text(other.dtype().name()), "convert one of them");
}

// Applies the epilogue in a separate pass over dst, after a plan without an epilogue.
LayerPlan finished_apart(LayerPlan plan, const Problem& p) {
  const std::int64_t floats = c10::multiply_integers(p.dst_format.physical_shape(p.dst_dims));
  plan.loops_only = plan.loops_only && !p.epilogue.residual;  // the residual may have to be copied
  plan.calls_on_stored = false;
  plan.run = [run = std::move(plan.run), epilogue = p.epilogue,
              floats](const LayerBuffers& buffers) {
    const auto* residual = static_cast<const float*>(buffers.residual);
    std::vector<float> kept;
    if (residual == buffers.dst) residual = (kept.assign(residual, residual + floats), kept.data());
    LayerBuffers plain = buffers;
    plain.residual = nullptr;
    run(plain);
    finish(epilogue, residual, static_cast<float*>(buffers.dst), floats);
  };
  return plan;
}

// The problem with which a row is asked again; nothing if it would be the same.
std::optional<Problem> without_epilogue(const Problem& p) {
  if (p.epilogue.empty() || p.dtype != at::kFloat) return std::nullopt;
  Problem plain = p;
  plain.epilogue = {};
  return plain;
}

const ConvolutionImplementations kImplementations("convolution", {
#define IMPLEMENTATION(name) convolutions::name,
#include "ops/convolution/list.inc"
#undef IMPLEMENTATION
                                                                 });

}  // namespace

const char* AskAgainWithoutEpilogue::refusal(const ConvolutionImplementation& row,
                                             const Problem& p) {
  const auto plain = without_epilogue(p);
  return row.refuses(plain ? *plain : p);
}

std::optional<LayerPlan> AskAgainWithoutEpilogue::plan(const ConvolutionImplementation& row,
                                                       const Problem& p) {
  if (!row.refuses(p)) {
    if (auto plan = row.plan(p)) return plan;
  }
  const auto plain = without_epilogue(p);
  if (!plain || row.refuses(*plain)) return std::nullopt;
  auto plan = row.plan(*plain);
  if (plan) return finished_apart(std::move(*plan), p);
  return std::nullopt;
}

double AskAgainWithoutEpilogue::estimate(const ConvolutionImplementation& row, const Problem& p) {
  if (!row.refuses(p)) return row.estimate(p);
  const auto plain = without_epilogue(p);
  if (!plain || row.refuses(*plain)) return kNever;
  return row.estimate(*plain) + moving_microseconds(p.dst_dims, p.dtype);
}

LayerPlan with_float_bias(LayerPlan plan, std::int64_t channels) {
  const auto widened = [channels](const void* bias) {
    const auto* values = static_cast<const c10::BFloat16*>(bias);
    return bias ? std::vector<float>(values, values + channels) : std::vector<float>();
  };
  plan.run = [widened, run = std::move(plan.run)](const LayerBuffers& buffers) {
    const std::vector<float> wide = widened(buffers.bias);
    LayerBuffers all = buffers;
    if (buffers.bias) all.bias = wide.data();
    run(all);
  };
  if (!plan.run_rows) return plan;
  plan.run_rows = [widened,
                   run_rows = std::move(plan.run_rows)](const LayerBuffers& buffers) -> RunRows {
    const auto wide = std::make_shared<const std::vector<float>>(widened(buffers.bias));
    LayerBuffers all = buffers;
    if (buffers.bias) all.bias = wide->data();
    return [wide, rows = run_rows(all)](const BlockedRows& src, const std::uint8_t* residual,
                                        const BlockedRows& dst,
                                        Range range) { rows(src, residual, dst, range); };
  };
  return plan;
}

std::optional<RowStage> pixel_row_stage(const Problem& p, std::int64_t packed_floats) {
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  const SpatialSizes s = spatial_sizes(p);
  if (p.src_format != p.dst_format || p.dst_format == kPlain || s.in[0] != 1) return std::nullopt;
  const std::int64_t src_lanes = p.src_format.lanes(p.src_dims[1]),
                     dst_lanes = p.dst_format.lanes(p.dst_dims[1]);
  return RowStage{.window = {1, 1, 0, 1},
                  .src = {s.in[2], 0, s.in[2], src_lanes * kFloat, 0, false},
                  .n = p.src_dims[0],
                  .src_rows = s.in[1],
                  .src_blocks = ceil_div(p.src_dims[1], src_lanes),
                  .dst_rows = s.out[1],
                  .dst_columns = s.out[2],
                  .dst_blocks = ceil_div(p.dst_dims[1], dst_lanes),
                  .dst_pixel_bytes = dst_lanes * kFloat,
                  .weight_bytes = packed_floats * kFloat};
}

const ConvolutionImplementations& convolution_implementations() { return kImplementations; }

std::optional<NamedPlan> plan_convolution(const Problem& p, const std::string& implementation) {
  const auto& row = kImplementations.row(implementation);
  if (auto plan = kImplementations.plan(row, p)) return NamedPlan{row.name, std::move(*plan)};
  return std::nullopt;
}

NamedPlan plan_convolution(const Problem& p) {
  if (auto plan = kImplementations.fastest(p)) return std::move(*plan);
  fail_not_implemented("convolution", "float32 for an activation that oneDNN cannot fuse",
                       c10::toString(p.dtype), "");
}

at::Tensor pack_weights(const LayerPlan& plan, const at::Tensor& weight) {
  if (plan.weights_format.empty()) return weight.contiguous();
  const at::Tensor packed = plan.pack(weight);
  TORCH_INTERNAL_ASSERT(plan.packed_bytes == 0 ||
                        plan.packed_bytes == static_cast<std::int64_t>(packed.nbytes()));
  return packed;
}

at::Tensor run_convolution(const Problem& p, const at::Tensor& src, const at::Tensor& weight,
                           const at::Tensor& bias) {
  static thread_local LruCache<NamedPlan> cache(kPrimitiveCacheCapacity);
  const auto* only = kImplementations.forced();
  const char* key = only ? only->name : "convolution";
  const NamedPlan& named = cache.get(convolution_key(key, p).finish(), [&] {
    if (!only) return plan_convolution(p);
    return *kImplementations.choose(
        p, only, [&] { return text("weight ", p.weight_dims, " on ", p.src_dims); });
  });
  kImplementations.set_last(named.name);
  const LayerPlan& plan = named.plan;
  const at::Tensor packed =
      plan.weights_format.empty()
          ? weight.contiguous()
          : packed_weights(weight, plan.weights_format, [&] { return plan.pack(weight); });
  const at::Tensor shift = bias.defined() ? bias.contiguous() : bias;
  const Blocked dst = empty_blocked(p.dst_dims, p.dst_format.block, src.options());
  plan.run({.src = src.const_data_ptr(),
            .weights = packed.const_data_ptr(),
            .bias = bias.defined() ? shift.const_data_ptr() : nullptr,
            .residual = nullptr,
            .dst = dst.physical.mutable_data_ptr()});
  return dst.physical;
}

at::Tensor convolution(const at::Tensor& input, std::int64_t channels, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, std::int64_t groups) {
  const Blocked src = blocked_argument("convolution", input, channels);
  const at::Tensor bias_tensor = bias.value_or(at::Tensor());
  check_dtypes(input, weight, bias_tensor);
  const Problem p = convolution_problem(src.dims(), src.format(), weight, bias_tensor, stride,
                                        padding, dilation, transposed, output_padding, groups);
  if (p.src_dims[0] == 0) return empty_blocked(p.dst_dims, src.block(), input.options()).physical;
  try {
    return run_convolution(p, src.physical, weight, bias_tensor);
  } catch (const dnnl::error& error) {
    fail_onednn("convolution", error.what(),
                text("src ", p.src_dims, " in ", p.src_format.name(p.src_dims.size()), ", weights ",
                     p.weight_dims, ", dst ", p.dst_dims, ", ", c10::toString(p.dtype)));
  }
}

}  // namespace torch_blocked
