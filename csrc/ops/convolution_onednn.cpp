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

using Problem = ConvolutionProblem;

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

dnnl::memory::format_tag channels_last_tag(const Problem& p) {
  using Tag = dnnl::memory::format_tag;
  return std::array{Tag::nwc, Tag::nhwc, Tag::ndhwc}[p.spatial() - 1];
}

namespace {

// A primitive and the weights format it chose.
struct Convolution {
  Primitive primitive;
  dnnl::memory::desc weights_md;
  std::string weights_format;  // the key of packed weights
};

// `transposed` because the gradient of a convolution packs the same weights with O and I exchanged.
std::string name_of(const dnnl::memory::desc& md, bool transposed) {
  Key key("onednn");
  key.add(transposed).add(md.get_padded_dims()).add(md.get_strides()).add(md.get_inner_blks());
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
                  name_of(pd.weights_desc(), p.transposed)});
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

// A 1-D problem as a 2-D one of height 1, the same memory: oneDNN has more kernels for it (1-D
// transposed in 8c is `ref` on AVX-512). At height 1 any stride means the same; equal ones are
// taken by the kernel that wants them equal.
Problem as_2d(Problem p) {
  if (p.spatial() != 1) return p;
  for (Dims* dims : {&p.src_dims, &p.dst_dims, &p.weight_dims}) dims->insert(dims->begin() + 2, 1);
  p.stride.insert(p.stride.begin(), p.stride[0]);
  p.dilation.insert(p.dilation.begin(), 1);
  for (Dims* values : {&p.padding, &p.output_padding}) values->insert(values->begin(), 0);
  return p;
}

}  // namespace

std::optional<RunConvolution> plan_onednn_blocked(const Problem& problem) {
  if (!has_onednn_type(problem.dtype)) return std::nullopt;
  // oneDNN 3.2 adds the bias of a transposed convolution into the tail of 4c and 32c.
  if (problem.transposed && problem.block != 8 && problem.block != 16) return std::nullopt;
  const Problem p = as_2d(problem);
  const auto convolution =
      make(p, blocked_md(p.src_dims, p.block, p.dtype), blocked_md(p.dst_dims, p.block, p.dtype));
  if (!convolution) return std::nullopt;
  return [dims = problem.dst_dims, p, convolution](const Blocked& src, const at::Tensor& weight,
                                                   const at::Tensor& bias) {
    const Blocked dst = empty_blocked(dims, p.block, src.physical.options());
    const bool lifted = p.dst_dims.size() > dims.size();
    execute(p, *convolution, src.physical, lifted ? weight.unsqueeze(2) : weight, bias,
            dst.physical);
    return dst.physical;
  };
}

std::optional<RunConvolution> plan_onednn_channels_last(const Problem& p) {
  if (!has_onednn_type(p.dtype)) return std::nullopt;
  const dnnl::memory::format_tag tag = channels_last_tag(p);
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
