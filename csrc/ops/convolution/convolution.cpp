// Convolution and transposed convolution of blocked activations with dense weights:
// check -> problem -> the fastest implementation in the list, by estimates -> run. The choice is
// made once per problem and cached with what it needs to run.
#include "ops/convolution/convolution.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>

#include "format/errors.h"
#include "ops/convolution/time.h"
#include "ops/post_ops.h"
#include "ops/registered.h"
#include "ops/moving/reorder.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/packed_weights.h"
#include "runtime/onednn/primitive.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// The largest size or step: oneDNN counts in 32 bits in places, and what is computed from two of
// these still fits 64.
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

// Any one of the arguments that ATen allows to be given once for all spatial dims.
Dims per_dim(const char* name, at::IntArrayRef values, std::size_t spatial, std::int64_t least) {
  if (values.size() != 1 && values.size() != spatial) {
    fail_value("convolution", text(name, " with 1 or ", spatial, " values"), text(values), "");
  }
  if (std::ranges::any_of(values, [&](std::int64_t value) { return value < least; })) {
    fail_value("convolution", text(name, " >= ", least), text(values), "");
  }
  if (std::ranges::any_of(values, [&](std::int64_t value) { return value > kMost; })) {
    fail_value("convolution", text(name, " <= ", kMost), text(values), "");
  }
  return values.size() == 1 ? Dims(spatial, values[0]) : values.vec();
}

void check_sizes(const Problem& p) {
  const auto large = [](std::int64_t size) { return size > kMost; };
  if (std::ranges::any_of(p.src_dims, large) || std::ranges::any_of(p.weight_dims, large) ||
      p.groups > kMost) {
    fail_value("convolution", text("sizes and groups <= ", kMost),
               text("weight ", p.weight_dims, " in ", p.groups, " groups on ", p.src_dims), "");
  }
}

void check_weight(const Problem& p, const at::Tensor& bias) {
  const std::size_t ndims = p.src_dims.size();
  if (p.weight_dims.size() != ndims) {
    fail_value("convolution", text("a weight with ", ndims, " dims"), text(p.weight_dims), "");
  }
  if (p.groups < 1) fail_value("convolution", "groups >= 1", text(p.groups), "");
  if (std::ranges::count(p.weight_dims, 0) > 0) {
    fail_value("convolution", "a weight without zero dims", text(p.weight_dims),
               "its result has no defined value");
  }
  const std::int64_t channels = p.transposed ? p.weight_dims[0] : p.weight_dims[1] * p.groups;
  if (channels != p.src_dims[1] || p.weight_dims[0] % p.groups != 0) {
    fail_value("convolution",
               text("a weight for ", p.src_dims[1], " input channels in ", p.groups, " groups"),
               text(p.weight_dims), "");
  }
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != p.dst_dims[1])) {
    fail_value("convolution", text("a bias of size [", p.dst_dims[1], "]"), text(bias.sizes()), "");
  }
}

void check_dtypes(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const bool same = weight.scalar_type() == input.scalar_type();
  if (same && (!bias.defined() || bias.scalar_type() == input.scalar_type())) return;
  const at::Tensor& other = same ? bias : weight;
  fail_type("convolution",
            text("a ", same ? "bias" : "weight", " of the input's dtype, ", input.dtype().name()),
            text(other.dtype().name()), "convert one of them");
}

Dims output_dims(const Problem& p) {
  Dims dims{p.src_dims[0], p.transposed ? p.weight_dims[1] * p.groups : p.weight_dims[0]};
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    const std::int64_t in = p.src_dims[2 + i];
    const std::int64_t out =
        p.transposed ? p.window(i).transposed(in, p.output_padding[i]) : p.window(i).count(in);
    if (out < 1 || in < 1) {
      fail_value("convolution", "a kernel that fits the padded input",
                 text("kernel ", p.weight_dims, " on input ", p.src_dims),
                 "pad more or use a smaller kernel");
    }
    if (p.transposed && p.output_padding[i] >= std::max(p.stride[i], p.dilation[i])) {
      fail_value("convolution", "output_padding below stride or dilation", text(p.output_padding),
                 "");
    }
    dims.push_back(out);
  }
  return dims;
}

// Zeros at the far ends beyond the symmetric padding, last dim first, as ATen pads; empty: none.
Dims padding_beyond(const Problem& p) {
  Dims more(2 * p.spatial(), 0);
  for (std::size_t i = 0; i < p.spatial() && !p.transposed; ++i) {
    const std::int64_t end = p.window(i).padding_end(p.src_dims[2 + i], p.dst_dims[2 + i]);
    more[2 * (p.spatial() - 1 - i) + 1] = std::max<std::int64_t>(0, end - p.padding[i]);
  }
  const bool any = std::ranges::any_of(more, [](std::int64_t size) { return size > 0; });
  return any ? more : Dims();
}

const char* refuses_aten(const Problem& p) {
  return p.epilogue.empty() ? nullptr : "fuses nothing";
}

std::optional<ConvolutionPlan> plan_aten(const Problem& p) {
  if (refuses_aten(p)) return std::nullopt;
  const auto run = [p](const ConvolutionBuffers& buffers) {
    trace::record({trace::Kind::kFallback, "convolution",
                   text("no kernel for weight ", p.weight_dims, " on ", p.src_dims)});
    const at::TensorOptions options = at::TensorOptions().dtype(p.dtype);
    at::Tensor src = empty_dense(p.src_dims, false, options);
    reorder("convolution", p.src_dims, reorder_side(buffers.src, p.src_dims, p.src_format, p.dtype),
            {src});
    if (const Dims more = padding_beyond(p); !more.empty()) src = at::constant_pad_nd(src, more);
    const auto from = [&](const void* data, const Dims& dims) {
      return at::from_blob(const_cast<void*>(data), dims, options);
    };
    at::Tensor dst = at::convolution(
        src, from(buffers.weights, p.weight_dims),
        buffers.bias ? std::optional(from(buffers.bias, {p.dst_dims[1]})) : std::nullopt, p.stride,
        p.padding, p.dilation, p.transposed, p.output_padding, p.groups);
    // Where p is the gradient of a transposed convolution whose output padding is a stride or more,
    // a convolution of this src has more pixels than the input of that.
    for (std::size_t i = 2; i < p.dst_dims.size(); ++i) {
      dst = dst.narrow(static_cast<std::int64_t>(i), 0, p.dst_dims[i]);
    }
    reorder("convolution", p.dst_dims, {dst.contiguous()},
            reorder_side(buffers.dst, p.dst_dims, p.dst_format, p.dtype));
  };
  return ConvolutionPlan{.weights_format = "", .pack = nullptr, .run = run};
}

// bfloat16 and float16 where the CPU has no kernel for them, computed in float32: the activations
// are converted at each run, the weights once, when they are packed.
const char* refuses_in_float32(const Problem& p) {
  const bool narrow = p.dtype == at::kBFloat16 || p.dtype == at::kHalf;
  return narrow ? nullptr : "is for bfloat16 and float16";
}

std::optional<ConvolutionPlan> plan_in_float32(const Problem& p) {
  if (refuses_in_float32(p)) return std::nullopt;
  Problem wide = p;
  wide.dtype = at::kFloat;
  const NamedPlan inner = plan_convolution(wide);
  const auto widened = [type = p.dtype](const void* data, const Dims& dims) {
    return data ? at::from_blob(const_cast<void*>(data), dims, type).to(at::kFloat) : at::Tensor();
  };
  const auto run = [p, plan = inner.plan, widened](const ConvolutionBuffers& buffers) {
    const Dims dst_dims = p.dst_format.physical_shape(p.dst_dims);
    const at::Tensor src = widened(buffers.src, p.src_format.physical_shape(p.src_dims)),
                     bias = widened(buffers.bias, {p.dst_dims[1]}),
                     residual = widened(buffers.residual, dst_dims),
                     dst = empty_pooled(dst_dims, at::kFloat);
    const auto data = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.const_data_ptr() : nullptr;
    };
    plan.run({src.const_data_ptr(), buffers.weights, data(bias), data(residual),
              dst.mutable_data_ptr()});
    at::from_blob(buffers.dst, dst_dims, p.dtype).copy_(dst);
  };
  return ConvolutionPlan{
      .weights_format = "float32 " + inner.plan.weights_format,
      .pack = [plan = inner.plan](
                  const at::Tensor& weight) { return pack_weights(plan, weight.to(at::kFloat)); },
      .run = run};
}

// The epilogue in a pass of its own, over what a plan without it has left in dst.
ConvolutionPlan finished_apart(ConvolutionPlan plan, const Problem& p) {
  const std::int64_t floats = c10::multiply_integers(p.dst_format.physical_shape(p.dst_dims));
  plan.loops_only = plan.loops_only && !p.epilogue.residual;  // it may have to be copied
  plan.calls_on_stored = false;
  plan.run = [run = std::move(plan.run), epilogue = p.epilogue,
              floats](const ConvolutionBuffers& buffers) {
    const auto* residual = static_cast<const float*>(buffers.residual);
    std::vector<float> kept;
    if (residual == buffers.dst) residual = (kept.assign(residual, residual + floats), kept.data());
    ConvolutionBuffers plain = buffers;
    plain.residual = nullptr;
    run(plain);
    finish(epilogue, residual, static_cast<float*>(buffers.dst), floats);
  };
  return plan;
}

std::optional<ConvolutionPlan> plan_by(const ConvolutionImplementations::Row& row,
                                       const Problem& p) {
  if (auto plan = row.plan(p)) return plan;
  if (p.epilogue.empty() || p.dtype != at::kFloat) return std::nullopt;
  Problem plain = p;
  plain.epilogue = {};
  auto plan = row.plan(plain);
  if (plan) return finished_apart(std::move(*plan), p);
  return std::nullopt;
}

double reorders(const Problem& p) {
  return moving_microseconds(p.src_dims, p.dtype) + moving_microseconds(p.dst_dims, p.dtype);
}

double estimate_channels_last(const Problem& p) {
  return kBarelySlower * direct_microseconds(p) + reorders(p);
}

double estimate_in_float32(const Problem& p) { return 2 * estimate_channels_last(p); }

// ATen runs oneDNN's kernels too, so this wins only where oneDNN has none and ATen's own is slow.
double estimate_aten(const Problem& p) { return 10 * estimate_channels_last(p); }

const ConvolutionImplementations kImplementations(
    "convolution",
    {{"winograd4", plan_winograd4, estimate_winograd4, {.sums_in_place = true}, refuses_winograd},
     {"winograd2", plan_winograd2, estimate_winograd2, {.sums_in_place = true}, refuses_winograd2},
     {"winograd3", plan_winograd3, estimate_winograd3, {.sums_in_place = true}, refuses_winograd3},
     {"winograd_phases",
      plan_winograd_phases,
      estimate_winograd_phases,
      {.sums_in_place = true},
      refuses_winograd_phases},
     {"strassen",
      plan_strassen,
      estimate_strassen,
      {.sums_in_place = true, .only_measured = true},
      refuses_strassen},
     {"amx",
      plan_amx,
      estimate_amx,
      {.sums_in_place = true, .any_format = true, .in_rows = true},
      refuses_amx},
     {"few_rows", plan_few_rows, estimate_few_rows, {.any_format = true}, refuses_few_rows},
     {"planes", plan_planes, estimate_planes, {.sums_in_place = true}, refuses_planes},
     {"depthwise",
      plan_depthwise,
      estimate_depthwise,
      {.sums_in_place = true, .in_rows = true},
      refuses_depthwise},
     {"grouped",
      plan_grouped,
      estimate_grouped,
      {.sums_in_place = true, .in_rows = true},
      refuses_grouped},
     {"direct",
      plan_direct,
      estimate_direct,
      {.sums_in_place = true, .gathers_channels = true, .in_rows = true},
      refuses_direct},
     {"depthwise_bfloat16",
      plan_depthwise_bfloat16,
      estimate_depthwise_bfloat16,
      {.sums_in_place = true, .in_rows = true},
      refuses_depthwise_bfloat16},
     {"grouped_bfloat16",
      plan_grouped_bfloat16,
      estimate_grouped_bfloat16,
      {.sums_in_place = true, .in_rows = true},
      refuses_grouped_bfloat16},
     {"dots_bfloat16",
      plan_dots_bfloat16,
      estimate_dots_bfloat16,
      {.sums_in_place = true, .in_rows = true},
      refuses_dots_bfloat16},
     {"winograd4_bfloat16",
      plan_winograd4_bfloat16,
      estimate_winograd4_bfloat16,
      {.sums_in_place = true},
      refuses_winograd_bfloat16},
     {"winograd4_fixed",
      plan_winograd4_fixed,
      estimate_winograd4_fixed,
      {.sums_in_place = true},
      refuses_winograd_bfloat16},
     {"winograd2_bfloat16",
      plan_winograd2_bfloat16,
      estimate_winograd2_bfloat16,
      {.sums_in_place = true},
      refuses_winograd_bfloat16},
     {"onednn_blocked",
      plan_onednn_blocked,
      estimate_onednn_blocked,
      {.any_format = true, .yardstick = true},
      refuses_onednn_blocked},
     {"onednn_channels_last",
      plan_onednn_channels_last,
      estimate_channels_last,
      {.last_resort = true},
      refuses_onednn_channels_last},
     {"in_float32", plan_in_float32, estimate_in_float32, {}, refuses_in_float32},
     {"aten", plan_aten, estimate_aten, {.last_resort = true}, refuses_aten}});

}  // namespace

ConvolutionPlan with_float_bias(ConvolutionPlan plan, std::int64_t channels) {
  const auto widened = [channels](const void* bias) {
    const auto* values = static_cast<const c10::BFloat16*>(bias);
    return bias ? std::vector<float>(values, values + channels) : std::vector<float>();
  };
  plan.run = [widened, run = std::move(plan.run)](const ConvolutionBuffers& buffers) {
    const std::vector<float> wide = widened(buffers.bias);
    ConvolutionBuffers all = buffers;
    if (buffers.bias) all.bias = wide.data();
    run(all);
  };
  if (!plan.run_rows) return plan;
  plan.run_rows =
      [widened, run_rows = std::move(plan.run_rows)](const ConvolutionBuffers& buffers) -> RunRows {
    const auto wide = std::make_shared<const std::vector<float>>(widened(buffers.bias));
    ConvolutionBuffers all = buffers;
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

ConvolutionProblem convolution_problem(at::IntArrayRef src_dims, Format format,
                                       const at::Tensor& weight, const at::Tensor& bias,
                                       at::IntArrayRef stride, at::IntArrayRef padding,
                                       at::IntArrayRef dilation, bool transposed,
                                       at::IntArrayRef output_padding, std::int64_t groups) {
  const std::size_t spatial = src_dims.size() - 2;
  Problem p{.src_dims = src_dims.vec(),
            .dst_dims = {},
            .weight_dims = weight.sizes().vec(),
            .stride = per_dim("stride", stride, spatial, 1),
            .padding = per_dim("padding", padding, spatial, 0),
            .dilation = per_dim("dilation", dilation, spatial, 1),
            .output_padding = per_dim("output_padding", output_padding, spatial, 0),
            .groups = groups,
            .src_format = format,
            .dst_format = format,
            .transposed = transposed,
            .has_bias = bias.defined(),
            .dtype = weight.scalar_type()};
  check_sizes(p);
  if (p.weight_dims.size() >= 2)
    p.dst_dims = {0, transposed ? p.weight_dims[1] * groups : p.weight_dims[0]};
  check_weight(p, bias);
  p.dst_dims = output_dims(p);
  return p;
}

GroupBundles group_bundles(const Problem& p) {
  if (p.groups == 1) return {1, 1};
  const auto filling = [&](std::int64_t channels) {
    return p.dst_format.block / std::gcd(channels / p.groups, p.dst_format.block);
  };
  const std::int64_t groups = std::lcm(filling(p.src_dims[1]), filling(p.dst_dims[1]));
  return {p.groups % groups == 0 ? p.groups / groups : 0, groups};
}

SpatialSizes spatial_sizes(const Problem& p) {
  const auto spatial = [](const Dims& dims) { return as_3d(at::IntArrayRef(dims).slice(2), 1); };
  return {.in = spatial(p.src_dims),
          .out = spatial(p.dst_dims),
          .kernel = spatial(p.weight_dims),
          .stride = as_3d(p.stride, 1),
          .padding = as_3d(p.padding, 0),
          .dilation = as_3d(p.dilation, 1)};
}

Key convolution_key(const char* name, const Problem& p) {
  Key key(name);
  for (const Dims* dims :
       {&p.src_dims, &p.weight_dims, &p.stride, &p.padding, &p.dilation, &p.output_padding}) {
    key.add(*dims);
  }
  key.add(p.groups).add(p.src_format).add(p.dst_format).add(p.transposed).add(p.has_bias);
  for (const Activation* activation : {&p.epilogue.before, &p.epilogue.after}) {
    key.add(static_cast<std::int64_t>(activation->kind));
    key.add(std::bit_cast<std::int32_t>(activation->alpha));
    key.add(std::bit_cast<std::int32_t>(activation->beta));
  }
  key.add(p.epilogue.residual);
  key.add(static_cast<std::int64_t>(p.dtype));
  return key;
}

const ConvolutionImplementations& convolution_implementations() { return kImplementations; }

std::optional<NamedPlan> plan_convolution(const Problem& p, const std::string& implementation) {
  const auto& row = kImplementations.row(implementation);
  if (auto plan = plan_by(row, p)) return NamedPlan{row.name, std::move(*plan)};
  return std::nullopt;
}

std::string convolution_refusal(const Problem& problem, const std::string& implementation) {
  Problem p = problem;
  if (p.dtype == at::kFloat) p.epilogue = {};  // as plan_by() asks at last
  const char* refusal = kImplementations.row(implementation).refuses(p);
  return refusal ? refusal : "has only a `ref` kernel for it, or none";
}

NamedPlan plan_convolution(const Problem& p) {
  if (auto plan = kImplementations.fastest(p, plan_by)) return std::move(*plan);
  fail_not_implemented("convolution", "float32 for an activation that oneDNN cannot fuse",
                       c10::toString(p.dtype), "");
}

at::Tensor pack_weights(const ConvolutionPlan& plan, const at::Tensor& weight) {
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
    if (auto plan = plan_by(*only, p)) return NamedPlan{only->name, std::move(*plan)};
    kImplementations.fail_forced(only->name, text("weight ", p.weight_dims, " on ", p.src_dims));
  });
  kImplementations.set_last(named.name);
  const ConvolutionPlan& plan = named.plan;
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
