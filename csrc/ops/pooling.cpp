#include "ops/pooling.h"

#include <array>
#include <memory>

#include "ops/reorder.h"
#include "runtime/engine.h"
#include "runtime/primitive.h"
#include "runtime/trace.h"

namespace torch_blocked {

std::function<void(const void* src, void* dst)> plan_pooling(const PoolingProblem& p) {
  static constexpr std::array kAlgorithms{dnnl::algorithm::pooling_max,
                                          dnnl::algorithm::pooling_avg_include_padding,
                                          dnnl::algorithm::pooling_avg_exclude_padding};
  const dnnl::memory::desc src_md = activation_md(p.src_dims, p.block, at::kFloat),
                           dst_md = activation_md(p.dst_dims, p.block, at::kFloat);
  Dims dilates = p.dilation;  // oneDNN counts the gaps
  for (std::int64_t& dilate : dilates) --dilate;
  Dims padding_end = p.padding;  // dst may end before the far padding, or with ceil_mode beyond it
  for (std::size_t i = 0; i < p.kernel.size(); ++i) {
    const std::int64_t reach = p.dilation[i] * (p.kernel[i] - 1) + 1;
    padding_end[i] =
        (p.dst_dims[2 + i] - 1) * p.stride[i] + reach - p.src_dims[2 + i] - p.padding[i];
  }
  const dnnl::pooling_forward::primitive_desc pd(
      engine(), dnnl::prop_kind::forward_inference, kAlgorithms[static_cast<std::size_t>(p.kind)],
      src_md, dst_md, p.stride, p.kernel, dilates, p.padding, padding_end, user_scratchpad(),
      /*allow_empty=*/true);
  if (!pd) return nullptr;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, "pooling", pd.impl_info_str()});
    return nullptr;
  }
  const std::array<Primitive::Argument, 2> arguments{
      {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DST, dst_md}}};
  const auto primitive =
      std::make_shared<Primitive>(dnnl::pooling_forward(pd), arguments, pd.scratchpad_desc());
  return [primitive](const void* src, void* dst) { primitive->execute({src, dst}); };
}

}  // namespace torch_blocked
