// oneDNN's convolutions, never its `ref` ones.
#include <ATen/ops/empty.h>

#include <array>
#include <memory>

#include "ops/convolution.h"
#include "ops/reorder.h"
#include "runtime/engine.h"
#include "runtime/packed_weights.h"
#include "runtime/primitive.h"
#include "runtime/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// Weights as oneDNN sees them: [OC, IC, *kernel], or [G, OC/G, IC/G, *kernel] with groups.
Dims onednn_weight_dims(const Problem& p) {
  Dims dims = p.weight_dims;
  if (p.transposed) std::swap(dims[0], dims[1]);  // [OC/G, IC, ...]
  if (p.groups == 1) return dims;
  dims[p.transposed ? 1 : 0] /= p.groups;
  dims.insert(dims.begin(), p.groups);
  return dims;
}

dnnl::memory::desc dense_weights_md(const Problem& p, const at::Tensor& weight) {
  Dims strides = weight.strides().vec();
  if (p.transposed) std::swap(strides[0], strides[1]);
  if (p.groups > 1) {
    strides.insert(strides.begin(), weight.stride(0) * (p.weight_dims[0] / p.groups));
  }
  return {onednn_weight_dims(p), onednn_type(p.dtype), strides};
}

// A primitive and the weights format it chose.
struct Convolution {
  Primitive primitive;
  dnnl::memory::desc weights_md;
  std::string weights_format;  // the key of packed weights
};

std::string name_of(const dnnl::memory::desc& md) {
  Key key("onednn");
  key.add(md.get_padded_dims()).add(md.get_strides()).add(md.get_inner_blks());
  return std::move(key.add(md.get_inner_idxs())).text();
}

template <typename Forward>
std::shared_ptr<Convolution> make(const Problem& p, const dnnl::memory::desc& src_md,
                                  const dnnl::memory::desc& dst_md) {
  const dnnl::memory::data_type type = onednn_type(p.dtype);
  // `any` for the weights only: oneDNN would pick nhwc for activations.
  const dnnl::memory::desc weights_md(onednn_weight_dims(p), type, dnnl::memory::format_tag::any);
  const dnnl::memory::desc bias_md =
      p.has_bias ? dnnl::memory::desc({p.dst_dims[1]}, type, dnnl::memory::format_tag::a)
                 : dnnl::memory::desc();
  Dims dilates = p.dilation;  // oneDNN counts the gaps
  for (std::int64_t& dilate : dilates) --dilate;
  const typename Forward::primitive_desc pd(
      engine(), dnnl::prop_kind::forward_inference,
      p.transposed ? dnnl::algorithm::deconvolution_direct : dnnl::algorithm::convolution_direct,
      src_md, weights_md, bias_md, dst_md, p.stride, dilates, p.padding, p.padding,
      user_scratchpad(), /*allow_empty=*/true);
  if (!pd) return nullptr;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, "convolution", pd.impl_info_str()});
    return nullptr;
  }
  std::vector<Primitive::Argument> arguments{
      {DNNL_ARG_SRC, src_md}, {DNNL_ARG_WEIGHTS, pd.weights_desc()}, {DNNL_ARG_DST, dst_md}};
  if (p.has_bias) arguments.push_back({DNNL_ARG_BIAS, bias_md});
  return std::make_shared<Convolution>(
      Convolution{Primitive(Forward(pd), arguments, pd.scratchpad_desc()), pd.weights_desc(),
                  name_of(pd.weights_desc())});
}

std::shared_ptr<Convolution> make(const Problem& p, const dnnl::memory::desc& src_md,
                                  const dnnl::memory::desc& dst_md) {
  return p.transposed ? make<dnnl::deconvolution_forward>(p, src_md, dst_md)
                      : make<dnnl::convolution_forward>(p, src_md, dst_md);
}

at::Tensor pack(const Problem& p, const at::Tensor& weight, const Convolution& convolution) {
  const dnnl::memory::desc& weights_md = convolution.weights_md;
  return packed_weights(weight, convolution.weights_format, [&] {
    const at::Tensor dense = weight.is_non_overlapping_and_dense() ? weight : weight.contiguous();
    const auto bytes = static_cast<std::int64_t>(weights_md.get_size());
    trace::Timed timed(trace::Kind::kPack, "convolution",
                       static_cast<std::int64_t>(dense.nbytes()) + bytes);
    const dnnl::memory::desc src_md = dense_weights_md(p, dense);
    const at::Tensor packed = at::empty({bytes}, at::kByte);
    const dnnl::reorder::primitive_desc pd(engine(), src_md, engine(), weights_md,
                                           user_scratchpad());
    const std::array<Primitive::Argument, 2> arguments{
        {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DST, weights_md}}};
    Primitive(dnnl::reorder(pd), arguments, pd.scratchpad_desc())
        .execute({dense.const_data_ptr(), packed.mutable_data_ptr()});
    return packed;
  });
}

void execute(const Problem& p, Convolution& convolution, const at::Tensor& src,
             const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& dst) {
  const at::Tensor packed = pack(p, weight, convolution);
  const void *in = src.const_data_ptr(), *weights = packed.const_data_ptr();
  void* out = dst.mutable_data_ptr();
  if (p.has_bias) {
    convolution.primitive.execute({in, weights, out, bias.contiguous().const_data_ptr()});
  } else {
    convolution.primitive.execute({in, weights, out});
  }
}

}  // namespace

std::optional<RunConvolution> plan_onednn_blocked(const Problem& p) {
  if (!has_onednn_type(p.dtype)) return std::nullopt;
  const auto convolution = make(p, blocked_md(p.src_dims, p.block, p.dtype),
                                blocked_md(p.dst_dims, p.block, p.dtype));
  if (!convolution) return std::nullopt;
  return [p, convolution](const Blocked& src, const at::Tensor& weight, const at::Tensor& bias) {
    const Blocked dst = empty_blocked(p.dst_dims, p.block, src.physical.options());
    execute(p, *convolution, src.physical, weight, bias, dst.physical);
    return dst.physical;
  };
}

std::optional<RunConvolution> plan_onednn_channels_last(const Problem& p) {
  if (!has_onednn_type(p.dtype)) return std::nullopt;
  const auto tag = std::array{dnnl::memory::format_tag::nwc, dnnl::memory::format_tag::nhwc,
                              dnnl::memory::format_tag::ndhwc}[p.spatial() - 1];
  const dnnl::memory::data_type type = onednn_type(p.dtype);
  const auto convolution = make(p, {p.src_dims, type, tag}, {p.dst_dims, type, tag});
  if (!convolution) return std::nullopt;
  return [p, convolution](const Blocked& src, const at::Tensor& weight, const at::Tensor& bias) {
    const at::Tensor dst = empty_dense(p.dst_dims, true, src.physical.options());
    execute(p, *convolution, reorder_to_dense("convolution", src, true), weight, bias, dst);
    return reorder_to_blocked("convolution", dst, p.block).physical;
  };
}

}  // namespace torch_blocked
