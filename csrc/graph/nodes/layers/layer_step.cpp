#include "graph/nodes/layers/layer_step.h"

#include <bit>

#include "format/errors.h"
#include "runtime/memory/memory_pool.h"

namespace torch_blocked::graph {
namespace {

// Values do not matter for the time, except denormals. These are 0.01 both as float32 and as pairs
// of bfloat16.
constexpr auto kAny = std::bit_cast<float>(0x3c243c24);

at::Tensor filled(const Dims& dims, at::ScalarType dtype) {
  return empty_pooled(dims, dtype).fill_(kAny);
}

const void* data_or_null(const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }

}  // namespace

LayerProbe::LayerProbe(const ConvolutionProblem& p, Dims weight_dims)
    : dtype_(p.dtype),
      weight_dims_(std::move(weight_dims)),
      src_(filled(p.src_format.physical_shape(p.src_dims), p.dtype)),
      dst_(filled(p.dst_format.physical_shape(p.dst_dims), p.dtype)),
      bias_(p.has_bias ? filled({p.dst_dims[1]}, p.dtype) : at::Tensor()),
      has_residual_(p.epilogue.residual) {}

// Memory as large as a plan's packed weights. Where a plan knows the size nothing is packed:
// packing was half of the time it took to time ResNet-50's layers. All plans share this memory,
// which is evicted before each run.
at::Tensor LayerProbe::weights(const LayerPlan& plan) {
  if (plan.packed_bytes == 0) {
    at::Tensor& packed = packed_[plan.weights_format];
    if (!packed.defined()) packed = pack_weights(plan, filled(weight_dims_, dtype_));
    return packed;
  }
  if (!room_.defined() || static_cast<std::int64_t>(room_.nbytes()) < plan.packed_bytes) {
    room_ = filled({plan.packed_bytes / kFloatBytes + 1}, at::kFloat).view(at::kByte);
  }
  return room_.narrow(0, 0, plan.packed_bytes);
}

Contest::Entry LayerProbe::entry(LayerPlan plan) {
  const at::Tensor packed = weights(plan);
  const LayerBuffers buffers{.src = src_.const_data_ptr(),
                             .weights = packed.const_data_ptr(),
                             .bias = data_or_null(bias_),
                             .residual = has_residual_ ? dst_.const_data_ptr() : nullptr,
                             .dst = dst_.mutable_data_ptr()};
  return {[run = std::move(plan.run), buffers] { run(buffers); }, packed, plan.loops_only,
          plan.handicap};
}

LayerBuffers LayerTensors::parameters() const {
  return {.src = nullptr,
          .weights = packed.const_data_ptr(),
          .bias = data_or_null(bias),
          .residual = nullptr,
          .dst = nullptr};
}

LayerBuffers LayerTensors::buffers() const {
  LayerBuffers buffers = parameters();
  if (src) buffers.src = all[*src].const_data_ptr();
  if (residual) buffers.residual = all[*residual].const_data_ptr();
  buffers.dst = all[dst].mutable_data_ptr();
  return buffers;
}

LayerTensors tensors_of(const Step& step, const Running& running, const Weight& weight,
                        const at::Tensor& bias, const std::string& weights_format,
                        const std::function<at::Tensor()>& pack) {
  const Value residual = step.node->read(1);
  const auto src = step.reads.find(step.node->read(0));
  return {.all = running.tensors,
          .packed = running.weights.get(
              *step.node, weight.parts(),
              weight.narrowed ? text(weights_format, " of bfloat16") : weights_format, pack),
          .bias = bias.defined() ? bias.contiguous() : bias,
          .src = src == step.reads.end() ? std::nullopt : std::optional(src->second),
          .residual = residual == kNone ? std::nullopt : std::optional(step.reads.at(residual)),
          .dst = step.writes[0]};
}

}  // namespace torch_blocked::graph
