#include "ops/linear.h"

#include <ATen/ops/empty.h>

#include <array>
#include <memory>

#include "runtime/engine.h"
#include "runtime/primitive.h"
#include "runtime/trace.h"

namespace torch_blocked {
namespace {

using Md = dnnl::memory::desc;
using Tag = dnnl::memory::format_tag;
constexpr auto kF32 = dnnl::memory::data_type::f32;

dnnl::primitive_attr attributes(LinearActivation activation) {
  static constexpr std::array kAlgorithms{
      dnnl::algorithm::undef, dnnl::algorithm::eltwise_relu, dnnl::algorithm::eltwise_swish,
      dnnl::algorithm::eltwise_gelu_erf, dnnl::algorithm::eltwise_gelu_tanh};
  dnnl::primitive_attr attr = user_scratchpad();
  if (activation == LinearActivation::kNone) return attr;
  const float alpha = activation == LinearActivation::kSilu ? 1 : 0;
  dnnl::post_ops post_ops;
  post_ops.append_eltwise(kAlgorithms[static_cast<std::size_t>(activation)], alpha, 0);
  attr.set_post_ops(post_ops);
  return attr;
}

at::Tensor pack(const at::Tensor& weight, const Md& packed_md) {
  const auto bytes = static_cast<std::int64_t>(packed_md.get_size());
  trace::Timed timed(trace::Kind::kPack, "linear", bytes);
  const at::Tensor packed = at::empty({bytes}, at::kByte);
  const Md md(weight.sizes().vec(), kF32, Tag::ab);
  const dnnl::reorder::primitive_desc pd(engine(), md, engine(), packed_md, user_scratchpad());
  const std::array<Primitive::Argument, 2> arguments{
      {{DNNL_ARG_SRC, md}, {DNNL_ARG_DST, packed_md}}};
  Primitive(dnnl::reorder(pd), arguments, pd.scratchpad_desc())
      .execute({weight.const_data_ptr(), packed.mutable_data_ptr()});
  return packed;
}

}  // namespace

LinearPlan plan_linear(const LinearProblem& p) {
  const Md src_md({p.rows, p.inputs}, kF32, Tag::ab), dst_md({p.rows, p.outputs}, kF32, Tag::ab);
  const Md weights_md({p.outputs, p.inputs}, kF32, Tag::any);
  const Md bias_md = p.has_bias ? Md({p.outputs}, kF32, Tag::a) : Md();
  const dnnl::inner_product_forward::primitive_desc pd(engine(), dnnl::prop_kind::forward_inference,
                                                       src_md, weights_md, bias_md, dst_md,
                                                       attributes(p.activation));
  std::vector<Primitive::Argument> arguments{
      {DNNL_ARG_SRC, src_md}, {DNNL_ARG_WEIGHTS, pd.weights_desc()}, {DNNL_ARG_DST, dst_md}};
  if (p.has_bias) arguments.push_back({DNNL_ARG_BIAS, bias_md});
  const auto primitive =
      std::make_shared<Primitive>(dnnl::inner_product_forward(pd), arguments, pd.scratchpad_desc());
  const Md packed_md = pd.weights_desc();
  Key key("linear");
  key.add(packed_md.get_padded_dims()).add(packed_md.get_strides()).add(packed_md.get_inner_blks());
  return {.weights_format = std::move(key.add(packed_md.get_inner_idxs())).text(),
          .pack = [packed_md](const at::Tensor& weight) { return pack(weight, packed_md); },
          .run =
              [primitive, has_bias = p.has_bias](const float* src, const void* weights,
                                                 const float* bias, float* dst) {
                if (has_bias) {
                  primitive->execute({src, weights, dst, bias});
                } else {
                  primitive->execute({src, weights, dst});
                }
              }};
}

}  // namespace torch_blocked
