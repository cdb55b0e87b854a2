#include "ops/pooling.h"

#include <array>
#include <memory>

#include "format/errors.h"
#include "ops/implementations.h"
#include "ops/reorder.h"
#include "ops/window.h"
#include "runtime/engine.h"
#include "runtime/primitive.h"
#include "runtime/trace.h"

namespace torch_blocked {
namespace {

std::optional<PoolingPlan> plan_onednn(const PoolingProblem& p) {
  static constexpr std::array kAlgorithms{dnnl::algorithm::pooling_max,
                                          dnnl::algorithm::pooling_avg_include_padding,
                                          dnnl::algorithm::pooling_avg_exclude_padding};
  const dnnl::memory::desc src_md = activation_md(p.src_dims, p.format, at::kFloat),
                           dst_md = activation_md(p.dst_dims, p.format, at::kFloat);
  Dims dilates = p.dilation;  // oneDNN counts the gaps
  for (std::int64_t& dilate : dilates) --dilate;
  Dims padding_end = p.padding;  // dst may end before the far padding, or with ceil_mode beyond it
  for (std::size_t i = 0; i < p.kernel.size(); ++i) {
    const Window window{p.kernel[i], p.stride[i], p.padding[i], p.dilation[i]};
    padding_end[i] = window.padding_end(p.src_dims[2 + i], p.dst_dims[2 + i]);
  }
  const dnnl::pooling_forward::primitive_desc pd(
      engine(), dnnl::prop_kind::forward_inference, kAlgorithms[static_cast<std::size_t>(p.kind)],
      src_md, dst_md, p.stride, p.kernel, dilates, p.padding, padding_end, user_scratchpad(),
      /*allow_empty=*/true);
  if (!pd) return std::nullopt;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, "pooling", pd.impl_info_str()});
    return std::nullopt;
  }
  const std::array<Primitive::Argument, 2> arguments{
      {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DST, dst_md}}};
  const auto primitive =
      std::make_shared<Primitive>(dnnl::pooling_forward(pd), arguments, pd.scratchpad_desc());
  return [primitive](const void* src, void* dst) { primitive->execute({src, dst}); };
}

const Implementations<PoolingProblem, PoolingPlan> kImplementations("pooling",
                                                                    {{"onednn", plan_onednn}});

}  // namespace

PoolingPlan plan_pooling(const PoolingProblem& p) {
  auto named = kImplementations.choose(p, kImplementations.forced(), [&] {
    return text("a window ", p.kernel, " on ", p.src_dims);
  });
  if (!named) return nullptr;
  kImplementations.set_last(named->name);
  return std::move(named->plan);
}

}  // namespace torch_blocked
